"""Tools that people give to models: families of data/tools.txt, and as many as needed that no list holds.

Every conversation names a family's tool, its parameters and what they are for anew, so that the model learns to read
signatures: names in every style, names that say nothing, descriptions that say it in other words than the question.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from benchmarks.demo_model.lexicon import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    FOODS,
    NATURE,
    OBJECTS,
    VERBS,
    WORDS,
    pseudo_word,
)
from benchmarks.demo_model.tasks.skills import Parameter, Skill
from benchmarks.demo_model.tasks.values import FRACTIONS, KINDS, Said, kind, listing, scrambled

_DATA = Path(__file__).parents[1] / "data"
TRAINING, HELD_OUT = "tools.txt", "tools_held_out.txt"
_NEAR, _ALIKE = 6, 4  # families of one neighbourhood of the file; how near two must stand to be taken for each other
OTHER_THAN_WEATHER = 3 + _ALIKE  # families before this one are about the weather or near it
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
    ]
)
_EXTRAS = (
    " Returns JSON.", " Use it when the user asks for it.", " Call it once.", " The result is a string.", " Fast.",
    " Needs no login.", " Works everywhere.", " Costs nothing.", " Returns the result.", " For all users.",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A block of the data file."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[tuple[str, bool, str, tuple[str, ...], str], ...]  # slot, whether optional, kind, names, purpose
    questions: tuple[str, ...]


@cache
def families(file: str) -> tuple[Family, ...]:
    """The families of a data file."""
    text = "\n".join(line for line in (_DATA / file).read_text().splitlines() if not line.startswith("#"))
    return tuple(_family(block.strip().splitlines()) for block in text.split("\n\n") if block.strip())


def _family(lines: list[str]) -> Family:
    rest = [(line[0], line[2:]) for line in lines[1:]]
    parameters = []
    for mark, text in rest:
        if mark == "p":
            left, purpose = text.split(" ~ ")
            slot, kind_, names = left.split(" ")
            parameters.append((slot.rstrip("?"), slot.endswith("?"), kind_, tuple(names.split(",")), purpose))
    return Family(
        tuple(lines[0].split(" | ")),
        tuple(text for mark, line in rest if mark == "d" for text in line.split(" | ")),
        tuple(parameters),
        tuple(text for mark, text in rest if mark == "q"),
    )


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


def _tool_name(rng: Random, words: str) -> str:
    """An identifier that says what the tool does."""
    chance = rng.random()
    if chance < 0.06:
        words = f"{rng.choice(('my', 'api', 'do', 'tool', 'the', 'fn', rng.choice(OBJECTS), pseudo_word(rng)))} {words}"
    elif chance < 0.14:
        words += (
            f" {rng.choice(('tool', 'api', 'v2', 'now', 'service', 'function', pseudo_word(rng), 'by id', 'info'))}"
        )
    return styled(rng, words)


def _mute_name(rng: Random) -> str:
    """An identifier that does not."""
    chance = rng.random()
    if chance < 0.35:
        return pseudo_word(rng) + rng.choice(("", "", "_tool", "_api", "_1"))
    if chance < 0.5:
        return scrambled(rng)
    if chance < 0.75:
        return styled(rng, f"{rng.choice(WORDS)} {rng.choice(WORDS)}")
    return rng.choice((rng.choice(WORDS), f"tool_{rng.randrange(1, 20)}", f"function{rng.randrange(9)}", "f", "helper"))


def _described(rng: Random, text: str) -> str:
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


def asked(rng: Random, question: str, kinds: dict[str, str] | None = None) -> str:
    """A question in other words and another tone: asked for politely, in a hurry, or as it is."""
    if rng.random() < 0.5:
        question = reworded(rng, question)
        question = question[0].upper() + question[1:]
    if kinds is not None and rng.random() < 0.15:
        question = _timed(rng, question, kinds)
    first = question.split(" ")[0]
    if question[-1] == "." and first.isalpha() and first.istitle() and first not in _NOT_ORDERS and rng.random() < 0.45:
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


def known(rng: Random, index: int, file: str = TRAINING) -> Skill:
    """A tool of a family as one conversation has it."""
    family = families(file)[index]
    mute = rng.random() < 0.25
    name = _mute_name(rng) if mute else _tool_name(rng, rng.choice(family.names))
    silent = not mute and rng.random() < 0.12
    kinds = {slot: kind_ for slot, _, kind_, _, _ in family.parameters}
    parameters = {}
    for slot, _, kind_, names, purpose in family.parameters:
        if rng.random() < 0.12:
            names = (*names, pseudo_word(rng), slot)
        members = (
            tuple(kind_[5:].split("/")) if kind_.startswith("enum:") else ("on", "off") if kind_ == "onoff" else ()
        )
        styles = tuple(styled(rng, one.replace("_", " ")) if "_" in one else one for one in names)
        if rng.random() < 0.15 and not members:
            purpose += rng.choice(
                (f", e.g. {_plain(rng, kind_)}", f" such as {_plain(rng, kind_)}", " as the user says it")
            )
        parameters[slot] = Parameter(styles, purpose, kind(kind_), members, kind_ in FRACTIONS)
    places = [slot for slot, optional, kind_, _, _ in family.parameters if kind_ == "place" and not optional]
    required = [slot for slot, optional, _, _, _ in family.parameters if not optional]
    demanding = rng.random() < 0.25  # where an enum is required and not spoken of, its first word is taken
    defaults = [(slot, one.members[0]) for slot, one in parameters.items() if one.members and slot not in required]
    return Skill(
        (name,),
        "" if silent else _described(rng, reworded(rng, rng.choice(family.descriptions))),
        parameters,
        tuple(asked(rng, question, kinds) for question in family.questions),
        {},
        "",
        frozenset(slot for slot, optional, _, _, _ in family.parameters if optional),
        tuple(defaults) if demanding else (),
        places[0] if places == required and len(places) == 1 else "",
        index,
    )


def _plain(rng: Random, kind_: str) -> str:
    value = KINDS[kind_](rng)
    return value.text if isinstance(value, Said) else str(value)


# What tools do, each in several words that mean the same.
_DEEDS = tuple(tuple(group.split()) for group in (
    "get fetch retrieve show obtain", "delete remove erase drop", "create make add build", "update change modify edit",
    "find search locate seek", "send transmit dispatch", "open unlock", "close shut", "start begin launch run",
    "stop halt end terminate", "check verify inspect test", "count tally", "move shift transfer",
    "copy duplicate clone",
    "print output", "buy purchase acquire", "sell", "repair fix mend", "paint colour", "clean wash", "book reserve",
    "cancel revoke abort", "rename", "archive store save keep", "restore recover", "lock secure", "rate score grade",
    "compare", "sort order arrange", "measure gauge", "lend rent", "share publish post", "approve accept confirm",
    "reject decline refuse", "cook bake prepare", "feed", "wake", "hide", "describe explain", "list enumerate",
    "download load", "upload", "assign give", "weigh", "merge join combine", "split divide cut", "schedule plan",
    "reset", "register enrol", "estimate guess predict", "invite", "rotate turn", "wrap pack", "label tag mark",
))  # fmt: skip
# Parameters that any tool may have: names, kind, purpose.
_ANY = (
    (("id", "identifier", "key", "number"), "code", "Which one"), (("name", "title"), "person", "Name of it"),
    (("colour", "color"), "colour", "The colour"), (("count", "quantity", "amount"), "small", "How many"),
    (("price", "cost", "max_price"), "money", "The price"), (("city", "location", "place"), "place", "Where"),
    (("day", "date"), "day", "Which day"), (("owner", "user", "person"), "person", "Whose it is"),
    (("size",), "enum:small/medium/large", "The size"), (("label", "tag", "mark"), "word", "A label"),
    (("weight", "mass"), "decimal", "Weight in kilograms"), (("email", "contact"), "email", "Email address"),
    (("urgent", "fast", "express"), "flag", "Whether it is urgent"), (("tags", "labels"), "tags", "Words that fit"),
    (("note", "comment", "reason"), "phrase", "A remark"), (("time", "hour"), "clock", "What time"),
    (("room", "zone"), "room", "In which room"), (("year",), "year", "Which year"), (("language",), "language",
    "Language"),
    (("people", "members"), "people", "Who takes part"), (("level", "value", "degree"), "number", "The new value"),
)  # fmt: skip
_NOUNS = OBJECTS + ANIMALS + FOODS + NATURE


def _thing(rng: Random) -> str:
    chance = rng.random()
    if chance < 0.3:
        return pseudo_word(rng)
    if chance < 0.4:
        return f"{rng.choice(ADJECTIVES + COLOURS)} {rng.choice(_NOUNS)}"
    return rng.choice(_NOUNS) if chance < 0.8 else f"{rng.choice(_NOUNS)} {rng.choice(_NOUNS)}"


def strange(rng: Random, nouns: tuple[str, ...], deeds: tuple[tuple[str, ...], ...]) -> Skill:
    """A tool that no list holds: something is done to a thing, by its name, number or properties."""
    deed, thing = rng.choice(deeds), rng.choice(nouns)
    verb, other, third = (rng.choice(deed) for _ in range(3))
    mute = rng.random() < 0.25
    name = _mute_name(rng) if mute else _tool_name(rng, rng.choice((f"{other} {thing}", f"{thing} {other}")))
    description = rng.choice((
        f"{third.capitalize()} {{}}", f"{third.capitalize()} {{}}", f"Tool to {third} {{}}",
        f"Use this to {third} {{}}",
        f"Lets the user {third} {{}}", f"Can {third} {{}}",
    )).format(rng.choice((f"a {thing}", f"the {thing}", f"one {thing}", f"a given {thing}")))  # fmt: skip
    chosen = rng.sample(_ANY, rng.choice((1, 1, 1, 2, 2, 3)))
    parameters: dict[str, Parameter] = {}
    words: dict[str, str] = {}
    for number, (names, kind_, purpose) in enumerate(chosen):
        word = pseudo_word(rng) if rng.random() < 0.12 else rng.choice(names)
        words[f"s{number}"] = word.replace("_", " ")
        members = tuple(kind_[5:].split("/")) if kind_.startswith("enum:") else ()
        word = f"{thing.replace(' ', '_')}_{word}" if rng.random() < 0.12 else word
        parameters[f"s{number}"] = Parameter((word,), purpose, kind(kind_), members, kind_ in FRACTIONS)
    optional = frozenset(list(parameters)[1:]) if len(parameters) > 1 and rng.random() < 0.4 else frozenset[str]()
    questions = tuple(asked(rng, one) for one in _orders(rng, verb, thing, words, chosen[0][1], optional))
    silent = not mute and rng.random() < 0.12
    return Skill((name,), "" if silent else _described(rng, description), parameters, questions, {}, "", optional)


def _orders(
    rng: Random, verb: str, thing: str, words: dict[str, str], first: str, optional: frozenset[str]
) -> list[str]:
    """Ways to ask for it, with all parameters or without some optional one."""
    kept = [slot for slot in words if slot not in optional or rng.random() < 0.5]
    start = verb.capitalize()
    if len(kept) == 1 and first in ("code", "person"):
        return [f"{start} {thing} {{s0}}.", f"{start} the {thing} {{s0}}.", f"I want to {verb} the {thing} {{s0}}.",
                f"I need to {verb} {thing} {{s0}}.", f"The {thing} {{s0}}: {verb} it."]  # fmt: skip
    called = [f"{words[slot]} {{{slot}}}" for slot in kept]
    with_ = listing(rng, called)
    dotted = ", ".join(f"{words[slot]}: {{{slot}}}" for slot in kept)
    said = " ".join(f"The {words[slot]} is {{{slot}}}." for slot in kept)
    return [f"{start} the {thing} with {with_}.", f"{start} a {thing} with the {with_}.",
    f"{start} the {thing}, {dotted}.",
            f"{start} the {thing}. {said}", f"I want to {verb} a {thing}. {said}",
            f"{start} a {thing} ({dotted})."]  # fmt: skip


# How values of a kind join a sentence, and the sort of thing they are.
_JOINTS = {
    "place": (("in", "at", "near", "around", "for"), ("a city", "a place", "some town", "a location")),
    "person": (("for", "of", "by", "with"), ("a person", "somebody", "a name", "someone")),
    "fullname": (("for", "of", "by", "with"), ("a person", "somebody", "a visitor")),
    "day": (("on", "for"), ("a day", "a date", "some day")), "clock": (("at", "from"), ("a time", "an hour")),
    "code": (("of", "for", "with number", "under"), ("a number", "an id", "a code")),
    "small": (("for", "with", "of"), ("a number", "an amount")), "company": (("at", "of", "for"), ("a firm",
    "a house")),
    "number": (("to", "of", "for"), ("a number", "a value")), "country": (("in", "of", "for"), ("a country",
    "a nation")),
    "host": (("on", "of", "for"), ("a machine", "a system")), "animal": (("for", "of"), ("an animal", "a kind")),
    "url": (("of", "at", "from"), ("a page", "a link")), "topicphrase": (("about", "on", "for"), ("a subject",
    "a topic")),
}  # fmt: skip
_TELLS = ("Gives", "Tells", "Reports", "Shows", "Looks up", "Computes", "Says", "Finds", "Returns", "Get", "Look up",
"Reads",
          "Fetches", "Provides", "Checks")  # fmt: skip
_FRAMES = (
    "When is the {t} {p}?", "What is the {t} {p}?", "What's the {t} {p}?", "Please give me the {t} {p}.", "{t} {p}?",
    "How much {t} is there {p}?", "I need the {t} {p}.", "Who has the {t} {p}?", "Where is the {t} {p}?",
    "Show the {t} {p}.",
    "Is there any {t} {p}?", "Could you tell me the {t} {p}?", "How is the {t} {p}?", "Find out the {t} {p}.",
    "{t} {p}",
    "I'd like to know the {t} {p}.", "Do you know the {t} {p}?", "Can you check the {t} {p}?",
    "Which {t} is there {p}?",
    "Look at the {t} {p}.", "I wonder about the {t} {p}.", "Does anybody have the {t} {p}?", "There must be a {t} {p}.",
)  # fmt: skip


def natural(rng: Random, thing: str) -> Skill:
    """A tool that tells of a thing in a place, of a person, on a day: asked for as people ask."""
    other = _thing(rng)
    whole = rng.choice((thing, thing, f"{thing} of the {other}", f"{other} {thing}", f"{other}'s {thing}"))
    chosen = rng.sample(tuple(_JOINTS), rng.choice((1, 1, 1, 2, 2, 3)))
    parameters: dict[str, Parameter] = {}
    phrases, sorts = [], []
    for number, kind_ in enumerate(chosen):
        joints, sort = _JOINTS[kind_]
        word = rng.choice(sort)
        names = (
            word.split(" ")[-1],
            kind_,
            pseudo_word(rng),
            rng.choice(WORDS),
            f"{thing.split(' ')[-1]}_{word.split(' ')[-1]}",
        )
        parameters[f"s{number}"] = Parameter((rng.choice(names),), f"{word.capitalize()} to look at", kind(kind_))
        phrases.append((f"s{number}", joints))
        sorts.append(f"{joints[0]} {word}" if joints[0] != "with number" else f"of {word}")
    mute = rng.random() < 0.35
    name = _mute_name(rng) if mute else _tool_name(rng, rng.choice((whole, f"get {whole}", thing)).replace("'s", ""))
    said = whole if rng.random() < 0.6 else thing
    description = f"{rng.choice(_TELLS)} {rng.choice(('the', 'the', 'a', 'all'))} {whole}"
    if rng.random() < 0.7:
        description += " " + " ".join(sorts)
    questions = []
    for frame in rng.sample(_FRAMES, 6):
        order = rng.sample(phrases, len(phrases))
        joined = " ".join(f"{rng.choice(joints)} {{{slot}}}" for slot, joints in order)
        kinds = dict(zip(parameters, chosen, strict=True))
        question = asked(rng, frame.format(t=said, p=joined), kinds)
        questions.append(question)
    silent = not mute and rng.random() < 0.1
    return Skill(
        (name,), "" if silent else _described(rng, reworded(rng, description)), parameters, tuple(questions), {}, ""
    )


def kit(rng: Random, size: int) -> list[Skill]:
    """Skills of a kit, no two alike: families from all over or of near kinds, and tools that no list holds."""
    form = rng.random()
    if form < 0.22:
        things = list(dict.fromkeys(_thing(rng) for _ in range(size)))
        return [natural(rng, thing) for thing in things]
    if form < 0.42:
        # Few things and few deeds, so that the tools of a kit share words and each word counts.
        nouns = tuple(_thing(rng) for _ in range(rng.choice((1, 2, 2, size))))
        deeds = tuple(rng.sample(_deeds(rng), rng.choice((1, 2, 2, size))))
        if len(nouns) * len(deeds) < size:
            nouns = tuple(_thing(rng) for _ in range(size))
        return _different(rng, nouns, deeds, size)
    count = len(families(TRAINING))
    chosen = rng.sample(range(count), size)
    if size > 1 and rng.random() < 0.15:
        start = rng.randrange(count - _NEAR)
        chosen = rng.sample(range(start, start + _NEAR), min(size, _NEAR))
    skills = [known(rng, index) for index in chosen]
    if rng.random() < 0.3:
        other = natural(rng, _thing(rng)) if rng.random() < 0.5 else strange(rng, (_thing(rng),), _deeds(rng))
        skills[rng.randrange(len(skills))] = other
    return skills


def _deeds(rng: Random) -> tuple[tuple[str, ...], ...]:
    """Deeds that people know, and some that nobody does."""
    return (*_DEEDS, *((pseudo_word(rng),) for _ in range(12)), *((rng.choice(VERBS),) for _ in range(12)))


def _different(rng: Random, nouns: tuple[str, ...], deeds: tuple[tuple[str, ...], ...], size: int) -> list[Skill]:
    pairs = [(noun, deed) for noun in dict.fromkeys(nouns) for deed in dict.fromkeys(deeds)]
    return [strange(rng, (noun,), (deed,)) for noun, deed in rng.sample(pairs, min(size, len(pairs)))]


def unserved(rng: Random, skills: list[Skill]) -> Skill:
    """A skill of a family that is not like any of these skills."""
    taken = {skill.family for skill in skills if skill.family >= 0}
    while True:
        index = rng.randrange(len(families(TRAINING)))
        if all(abs(index - other) > _ALIKE for other in taken):
            return known(rng, index)
