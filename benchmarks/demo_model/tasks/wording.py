"""Words of tools: identifiers in every style, and questions and descriptions said in other words each time."""

import re
from functools import cache
from pathlib import Path
from random import Random

from benchmarks.demo_model.lexicon import OBJECTS, WORDS, pseudo_word
from benchmarks.demo_model.tasks.values import scrambled

_NOUNS_FILE = Path(__file__).parents[1] / "data/nouns.txt"
_HEADS = (
    "Hi! ", "Hey, ", "Hello, ", "Please help: ", "Quick question: ", "I need help. ", "Hello! ", "Ok, ", "Next: ",
    "Now, ", "One more thing. ", "Good morning. ", "Assistant, ",
)  # fmt: skip
_ASKS = ("Please {}", "Can you {}", "Could you {}", "Could you please {}", "I want you to {}", "I'd like you to {}",
         "Would you {}", "Can you please {}", "Go and {}", "Kindly {}")  # fmt: skip
_TAILS = (" Thanks!", " Thank you.", " Please.", " Be quick.", " Thanks a lot!")
_NOT_ORDERS = frozenset(
    [
        "I",
        "I'm",
        "I'd",
        "I've",
        "I'll",
        "The",
        "We",
        "It's",
        "My",
        "Is",
        "It",
        "Are",
        "There",
        "Who",
        "What",
        "Where",
        "When",
        "How",
        "Any",
        "Does",
        "Do",
        "Tell",
        "New",
        "This",
        "Volume",
        "Lights",
        "Table",
        "Timer",
        "Alarm",
        "Text",
        "Tag",
        "Note",
        "Email",
        "Message",
        "Please",
        "Could",
        "Can",
        "Would",
        "Lights",
        "Forecast",
        "Directions",
        "Holidays",
        "In",
        "On",
        "At",
        "For",
        "From",
        "To",
        "Near",
        "Around",
        "By",
        "With",
        "Under",
        "About",
        "Into",
        "Over",
        "If",
        "Our",
        "Somebody",
        "Today",
        "Newest",
        "Boats",
        "Platform",
        "Mail",
        "Flight",
    ]
)
_EXTRAS = (
    " Returns JSON.", " Use it when the user asks for it.", " Call it once.", " The result is a string.", " Fast.",
    " Needs no login.", " Works everywhere.", " Costs nothing.", " Returns the result.", " For all users.",
)  # fmt: skip


@cache
def nouns() -> tuple[str, ...]:
    """Nouns of every day: what parameters, tools and things are named after, beyond the words of other tasks."""
    return tuple(_NOUNS_FILE.read_text().split())


def renamed(rng: Random, names: tuple[str, ...]) -> str:
    """A parameter's name: a fitting one, or one that must be copied from the signature letter by letter."""
    chance = rng.random()
    if chance < 0.7:
        return rng.choice(names)
    if chance < 0.82:
        return rng.choice(nouns())
    if chance < 0.94:
        first = rng.choice(names) if rng.random() < 0.5 else rng.choice(nouns())
        return f"{first}_{rng.choice((rng.choice(nouns()), rng.choice(nouns()), 'id', 'name'))}"
    return pseudo_word(rng) if chance < 0.97 else scrambled(rng)


def styled(rng: Random, words: str) -> str:
    """Words as one identifier."""
    parts = words.replace("-", " ").split(" ")
    form = rng.random()
    if form < 0.6:
        return "_".join(parts)
    if form < 0.8:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if form < 0.9:
        return "-".join(parts)
    return "".join(part.capitalize() for part in parts) if form < 0.95 else "".join(parts)


def telling_name(rng: Random, words: str) -> str:
    """An identifier that says what the tool does."""
    chance = rng.random()
    if chance < 0.06:
        words = f"{rng.choice(('my', 'api', 'do', 'tool', 'the', 'fn', rng.choice(OBJECTS), pseudo_word(rng)))} {words}"
    elif chance < 0.14:
        words += (
            f" {rng.choice(('tool', 'api', 'v2', 'now', 'service', 'function', pseudo_word(rng), 'by id', 'info'))}"
        )
    return styled(rng, words)


def mute_name(rng: Random) -> str:
    """An identifier that does not."""
    chance = rng.random()
    if chance < 0.35:
        return pseudo_word(rng) + rng.choice(("", "", "_tool", "_api", "_1"))
    if chance < 0.5:
        return scrambled(rng)
    if chance < 0.75:
        return styled(rng, f"{rng.choice(WORDS)} {rng.choice(WORDS)}")
    return rng.choice((rng.choice(WORDS), f"tool_{rng.randrange(1, 20)}", f"function{rng.randrange(9)}", "f", "helper"))


def described(rng: Random, text: str) -> str:
    chance = rng.random()
    if chance < 0.35:
        return text
    if chance < 0.8:
        return text + "."
    return text + "." + rng.choice(_EXTRAS)


# Words that may stand for one another in questions and descriptions, whatever they are about.
_SYNONYMS = {
    word: tuple(group.split("/"))
    for group in (
        "find/look for/locate/search for/look up", "show/give/display/get", "need/want/would like/am looking for",
        "book/reserve/arrange", "check/look up/verify/see", "tell/say/let me know", "get/fetch/obtain/return",
        "gets/fetches/returns/gives/tells/reports", "returns/gives/reports/tells/provides",
        "finds/looks for/locates/lists",
        "city/town/place", "shows/displays/gives/presents", "creates/makes/adds/writes", "create/make/add/set up",
        "calculate/compute/work out/figure out", "calculates/computes/works out", "sends/delivers/dispatches/mails",
        "searches/looks/hunts", "current/present/latest", "weather/climate", "user/customer/person/somebody",
        "user's/customer's", "cost/price", "big/large", "starts/begins/launches", "start/begin/launch",
        "delete/remove/erase",
        "buy/purchase/get", "buys/purchases", "change/modify/update", "changes/modifies/updates", "money/funds/cash",
        "picture/image/photo", "parcel/package/shipment", "meeting/appointment", "restaurant/eatery/diner",
        "shop/store",
        "information/facts/details/data", "room/chamber", "text/words/passage", "trip/journey", "movie/film",
        "car/vehicle",
    )
    for word in group.split("/")[0:1]
}  # fmt: skip
_ADVERBS = (
    "today", "tonight", "now", "right now", "for me", "again", "this time", "quickly", "at the moment", "later today",
    "if you can", "as soon as possible", "this week", "by any chance", "currently", "these days", "somewhere",
    "actually",
)  # fmt: skip
_FREE = ("sentence", "task", "textual", "topicphrase", "phrase", "problem", "picture", "when", "song", "sql", "command",
         "pycode", "product", "food", "event", "day", "word")  # fmt: skip
# What may stand behind a value and is none of it; nothing stands behind values that may go on to the end.
_ENDLESS = ("sentence", "task", "textual", "when", "problem", "picture")
_BEHIND = (
    " for me", ", please", " please", " if you can", " if possible", " right away", " when you have time", " once more",
    " as soon as you can", " while I wait", " if that works", " if you don't mind", ", will you", " before lunch",
    " before I leave", " and tell me",
)  # fmt: skip
_BEHIND_SQL = (
    " against the database", " on the database", " on our database", " and show me the rows", " over the tables",
    " and tell me what comes out", " for me", ", please", " against the warehouse", " on the server",
)  # fmt: skip
_LAST_VALUE = re.compile(r"(.*\{(\w+)\}\"?)([.?]?)")
_JOINED_LAST = re.compile(
    r"([A-Z][^.?!:,{]*(?:\{\w+\}[^.?!:,{]*)*) (in|on|at|near|around|for|from|under) (\{(\w+)\})([.?])"
)
_FILLERS = ("just", "really", "please", "quickly", "maybe", "also", "kindly", "simply", "actually")


def reworded(rng: Random, text: str) -> str:
    """The text with words changed for others that mean the same, left out or put in; slots stay."""
    words = []
    for word in text.split(" "):
        bare = word.rstrip(".,?!").lower()
        if bare in _SYNONYMS and rng.random() < 0.4:
            other = rng.choice(_SYNONYMS[bare])
            word = (other.capitalize() if word[0].isupper() else other) + word[len(bare) :]
        elif bare in ("the", "a", "an", "please", "my") and rng.random() < 0.1:
            continue
        words.append(word)
        if bare in ("i", "you", "to", "is", "are") and rng.random() < 0.03:
            words.append(rng.choice(_FILLERS))
    return " ".join(words) if words else text


def _timed(rng: Random, question: str, kinds: dict[str, str]) -> str:
    """The question with a word of time or manner, where no free text could be taken to go on with it."""
    if any(f"{{{slot}}}" in question and kinds[slot] in _FREE for slot in kinds):
        return question
    adverb = rng.choice(_ADVERBS)
    if " in {" in question and rng.random() < 0.5:
        return question.replace(" in {", f" {adverb} in {{", 1)
    return f"{question[:-1]} {adverb}{question[-1]}" if question[-1] in ".?" else question


def _bounded(rng: Random, question: str, kinds: dict[str, str]) -> str:
    """The question with words behind the value that ended it, or with that value in front."""
    if (found := _JOINED_LAST.fullmatch(question)) and rng.random() < 0.4 and kinds[found[4]] not in _ENDLESS:
        rest, word, value, _, stop = found.groups()
        if not rest.startswith(("I ", "I'")):
            rest = rest[0].lower() + rest[1:]
        return f"{word.capitalize()} {value}, {rest}{stop}"
    found = _LAST_VALUE.fullmatch(question)
    if not found or (kinds[found[2]] in _ENDLESS and found[1][-1] != '"'):
        return question
    behind = rng.choice(_BEHIND_SQL if kinds[found[2]] == "sql" else _BEHIND)
    return found[1] + behind + found[3]


def asked(rng: Random, question: str, kinds: dict[str, str] | None = None) -> str:
    """A question in other words and another tone: asked for politely, in a hurry, or as it is."""
    if rng.random() < 0.5:
        question = reworded(rng, question)
        question = question[0].upper() + question[1:]
    if kinds is not None and rng.random() < 0.15:
        question = _timed(rng, question, kinds)
    elif kinds is not None and rng.random() < 0.25:
        question = _bounded(rng, question, kinds)
    first = question.split(" ")[0]
    one = question[-1] == "." and not any(mark in question for mark in ("? ", ". "))  # one sentence
    if one and first.isalpha() and first.istitle() and first not in _NOT_ORDERS and rng.random() < 0.45:
        form = rng.choice(_ASKS)
        question = form.format(question[0].lower() + question[1:-1]) + ("?" if form[0] in "CW" else ".")
    chance = rng.random()
    if chance < 0.1:
        question = rng.choice(_HEADS) + question
    elif chance < 0.17 and question[0] != "{":
        question = question[0].lower() + question[1:]
    if rng.random() < 0.08 and question[-1] in "?.":
        question = question[:-1]
    elif rng.random() < 0.08 and question[-1] in "?.":
        question += rng.choice(_TAILS)
    return question
