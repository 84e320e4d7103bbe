"""Facts told and asked for again in people's own words; the model repeats each in one form, whatever the words were.

The wordings stand in data/facts.txt (about the user) and data/people.txt (about somebody else); things are made here.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from benchmarks.demo_model.conversation import Exercise, Message, exchange
from benchmarks.demo_model.lexicon import ANIMALS, JOBS, OBJECTS, TOPICS, article, code, pseudo_word
from benchmarks.demo_model.tasks.recall import UNKNOWN
from benchmarks.demo_model.tasks.values import KINDS, person, scrambled, secret, spoken

_DATA = Path(__file__).parents[1] / "data"
FACTS, PEOPLE, HELD_OUT = "facts.txt", "people.txt", "facts_held_out.txt"

_RELATIONS = (
    "sister", "brother", "mother", "father", "wife", "husband", "son", "daughter", "boss", "neighbour", "friend",
    "uncle",
    "aunt", "cousin", "roommate", "teacher", "doctor", "colleague", "best friend", "grandmother", "grandfather",
    "niece",
    "girlfriend", "boyfriend", "manager", "dentist", "landlord", "flatmate", "mom", "dad", "partner", "coach",
    "neighbor",
)  # fmt: skip
_PETS = (
    "horse",
    "hamster",
    "parrot",
    "rabbit",
    "fish",
    "turtle",
    "snake",
    "pony",
    "pet",
    "goat",
    "bird",
    "kitten",
    "puppy",
)
_NAMED = ("boat", "car", "robot", "house", "band", "company", "ship", "computer", "school", "doll", "team", "shop")
_SAID_NAME = (
    "My {r} is called {v}.", "My {r}'s name is {v}.", "I have a {r} named {v}.", "I have a {r} called {v}.",
    "The name of my {r} is {v}.", "{v} is my {r}.", "My {r} {v} is here.", "{v} is the name of my {r}.",
    "I named my {r} {v}.", "My {r} is named {v}.", "This is my {r} {v}.", "We call my {r} {v}.", "I've got a {r}, {v}.",
)  # fmt: skip
_ASKED_NAME = (
    "What is my {r} called?", "What's my {r}'s name?", "What is the name of my {r}?", "Who is my {r}?",
    "Do you know my {r}'s name?", "What is my {r}'s name?", "How is my {r} called?", "Tell me the name of my {r}.",
    "What's the name of my {r}?", "Do you remember what my {r} is called?", "What do I call my {r}?",
    "What did I say my {r} is called?", "Remind me of my {r}'s name.", "Can you tell me what my {r} is called?",
)  # fmt: skip
_SAID_WHERE = (
    "My {t} is {v}.", "I put my {t} {v}.", "I left my {t} {v}.", "My {t} lies {v}.", "I keep my {t} {v}.",
    "I've put the {t} {v}.", "I hid my {t} {v}.", "You'll find my {t} {v}.", "The {t} is {v}.", "I stored my {t} {v}.",
)  # fmt: skip
_ASKED_WHERE = (
    "Where is my {t}?", "Where did I put my {t}?", "Where did I leave my {t}?", "Where can I find my {t}?",
    "Do you know where my {t} is?", "Where do I keep my {t}?", "I can't find my {t}. Where is it?", "Where's my {t}?",
    "Have you seen my {t}?", "Where is the {t}?", "I'm looking for my {t}.", "Where did I hide my {t}?",
)  # fmt: skip
_SAID_IS = (
    "My {t} is {v}.", "{v} is my {t}.", "My {t}: {v}", "The {t} I have is {v}.", "As for my {t}, it is {v}.",
    "I have the {t} {v}.", "My {t} has always been {v}.", "For my {t} I chose {v}.", "The {t} is {v}.",
)  # fmt: skip
_ASKED_IS = (
    "What is my {t}?", "What's my {t}?", "Which {t} do I have?", "Do you know my {t}?", "Tell me my {t}.",
    "Can you tell me my {t}?", "What was my {t}?", "Remind me of my {t}.", "What did I say my {t} is?", "my {t}?",
    "What is the {t}?", "Which is my {t}?",
)  # fmt: skip
_LIKED = ("book", "film", "song", "season", "city", "singer", "game", "flower", "fruit", "subject", "day", "month",
          "band", "team", "toy", "tree", "cake", "ice cream", "language", "movie", "author", "car",
          "place")  # fmt: skip
_OWNED = ("account id", "badge number", "seat", "gate", "customer number", "user name", "PIN", "token", "licence plate",
          "member number", "ticket", "postal code", "bus line", "shoe size", "nickname", "last name", "middle name",
          "blood type", "height", "star sign", "booking code", "street", "bank", "old school", "home town",
          "hobby")  # fmt: skip
_HEADS = (
    "", "", "", "", "", "Hi! ", "Hello. ", "Please remember this: ", "Remember: ", "Just so you know: ", "By the way: ",
    "Let me tell you something. ", "Hey! ", "Some facts: ", "So, ", "Well, ", "First of all: ", "For later: ", "Note: ",
    "Good morning! ", "Listen: ", "Here is something about me: ", "Keep this in mind: ",
)  # fmt: skip
_TAILS = (
    "", "", "", "", "", " Please remember that.", " Keep that in mind.", " Don't forget it.", " Remember it.", " Okay?",
    " Can you remember that?", " Nice to meet you!", " How are you?", " I will ask you later.",
)  # fmt: skip
_QUESTION_HEADS = (
    "", "", "", "", "", "Do you remember? ", "I forgot. ", "Tell me: ", "One more question. ", "So, ", "Now tell me: ",
    "Hey, ", "Thanks. ", "By the way, ", "Okay. ", "Quick question: ", "And ", "Great. ", "Let's see. ", "Hmm, ",
)  # fmt: skip
# What other assistants say to a fact: talks that begin elsewhere go on here.
_OTHERS_NOTES = (
    "Nice to meet you, {v}!", "Got it.", "Okay!", "OK.", "Sure, I'll remember that.", "Thanks for telling me!",
    "Noted.",
    "That's great! How can I help you today?", "I see. Thank you for sharing that with me.", "Understood.",
    "Good to know.",
    "Great!", "Thank you, I will keep that in mind.", "{v}, what a nice choice!", "Alright.",
    "Hello! How can I help you?",
)  # fmt: skip
_OTHERS_TALK = (
    ("What's 2 + 2?", "4"), ("Tell me a joke.", "I don't know any."), ("How are you?", "I'm doing well, thanks!"),
    ("Thanks!", "You're welcome!"), ("Nice weather today.", "It is!"), ("Do you like music?", "I am a language model."),
    ("What can you do?", "Many things."), ("I'm tired.", "Take a break."), ("Okay.", "Anything else?"),
    ("I had a long day.", "I'm sorry to hear that."), ("Let's talk about something else.",
    "Sure, what would you like?"),
    ("What is the capital of France?", "Paris."), ("Good.", "How else can I help?"), ("Who are you?",
    "I'm an assistant."),
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """What was said, one way to ask for it, and the fact as the model repeats it."""

    said: str
    question: str
    answer: str
    value: str


@dataclass(frozen=True)
class Wording:
    """A block of the data file."""

    kind: str
    answer: str
    said: tuple[str, ...]
    asked: tuple[str, ...]


@cache
def wordings(file: str) -> tuple[Wording, ...]:
    """The blocks of a data file."""
    text = "\n".join(line for line in (_DATA / file).read_text().splitlines() if not line.startswith("#"))
    found = []
    for block in text.split("\n\n"):
        lines = block.strip().splitlines()
        if lines:
            kind, answer = lines[0].split(" ", 1)
            said, asked = (tuple(line[2:].split(" | ")) for line in lines[1:])
            found.append(Wording(kind, answer, said, asked))
    return tuple(found)


def _value(rng: Random, kind: str, answer: str) -> str:
    if kind == "job":
        return article(rng.choice(JOBS))
    if kind == "secret" or (kind == "code" and rng.random() < 0.25):
        return secret(rng)
    drawn = spoken(KINDS[kind](rng))
    return drawn.removeprefix("on ") if "on {}" in answer else drawn


def worded(rng: Random, wording: Wording, who: str = "", mine: str = "") -> Fact:
    """A fact in some of its wordings. who: of whom, as the user says it; mine: as the model does."""
    value = _value(rng, wording.kind, wording.answer)
    said, question = rng.choice(wording.said), rng.choice(wording.asked)
    answer = wording.answer.replace("{w}", mine).replace("{}", value)
    said = said.replace("{w}", who).replace("{}", value)
    question = question.replace("{w}", who[0].lower() + who[1:] if who.startswith("My ") else who)
    return Fact(_raised(said), question, _raised(answer), value)


def _raised(text: str) -> str:
    return text[0].upper() + text[1:]


def _somebody(rng: Random) -> tuple[str, str]:
    """Somebody, as the user speaks of them and as the model does."""
    if rng.random() < 0.45:
        name = person(rng)
        return name, name
    relation = rng.choice(_RELATIONS)
    if rng.random() < 0.3:
        name = person(rng)
        return f"My {relation} {name}", f"Your {relation} {name}"
    return f"My {relation}", f"Your {relation}"


def _from(rng: Random, said: tuple[str, ...], asked: tuple[str, ...], answer: str, **words: str) -> Fact:
    text = rng.choice(said).format(**words)
    return Fact(_raised(text), rng.choice(asked).format(**words), _raised(answer.format(**words)), words["v"])


def _thing(rng: Random) -> str:
    return pseudo_word(rng) if rng.random() < 0.15 else rng.choice(OBJECTS)


def _made(rng: Random) -> Fact:
    """A fact that no list holds."""
    kind = rng.random()
    if kind < 0.4:
        pool = rng.choice((_RELATIONS, _RELATIONS, _PETS, _NAMED, (_thing(rng),)))
        relation = rng.choice(pool)
        return _from(rng, _SAID_NAME, _ASKED_NAME, "Your {r} is called {v}.", r=relation, v=person(rng))
    if kind < 0.6:
        where = rng.choice(("in the", "under the", "behind the", "next to the", "on the", "near the", "inside the"))
        return _from(rng, _SAID_WHERE, _ASKED_WHERE, "Your {t} is {v}.", t=_thing(rng),
                     v=f"{where} {rng.choice(OBJECTS + ANIMALS)}")  # fmt: skip
    value = rng.choice((code(rng), secret(rng), str(rng.randrange(1, 1000)), person(rng), scrambled(rng)))
    if kind < 0.75:
        spelled = rng.choice(("favourite", "favorite"))
        thing = rng.choice((*_LIKED, rng.choice(TOPICS), pseudo_word(rng)))
        return _from(rng, _SAID_IS, _ASKED_IS, "Your {t} is {v}.", t=f"{spelled} {thing}", v=value)
    thing = f"{rng.choice(OBJECTS)} {rng.choice(('number', 'code', 'name', 'id'))}"
    thing = rng.choice(_OWNED) if rng.random() < 0.5 else thing
    return _from(rng, _SAID_IS, _ASKED_IS, "Your {t} is {v}.", t=thing, v=value)


def fact(rng: Random) -> Fact:
    """A fact in somebody's own words."""
    kind = rng.random()
    if kind < 0.48:
        return worded(rng, rng.choice(wordings(FACTS)))
    if kind < 0.7:
        return worded(rng, rng.choice(wordings(PEOPLE)), *_somebody(rng))
    return _made(rng)


def _facts(rng: Random, size: int) -> list[Fact]:
    """Facts of which none answers another's question."""
    found: dict[str, Fact] = {}
    while len(found) < size:
        new = fact(rng)
        start = new.answer.removesuffix(".").removesuffix(new.value)
        if all(new.question != one.question and start != known for known, one in found.items()):
            found[start] = new
    return list(found.values())


def lowered(answer: str) -> str:
    """The fact inside a sentence."""
    return answer[0].lower() + answer[1:] if answer.startswith(("Your ", "You ", "The ")) else answer


def _noted(facts: list[Fact]) -> str:
    return "Noted: " + " and ".join(lowered(one.answer.removesuffix(".")) for one in facts) + "."


def _joined(rng: Random, facts: list[Fact]) -> str:
    if len(facts) == 1:
        return facts[0].said
    if rng.random() < 0.5 and all(one.said[-1] == "." for one in facts):
        rest = [_inside(one.said) for one in facts[1:]]
        link = rng.choice((" and ", ", and "))
        return facts[0].said[:-1] + link + " and ".join(one.removesuffix(".") for one in rest) + "."
    return " ".join(one.said for one in facts)


def _inside(said: str) -> str:
    return (
        said[0].lower() + said[1:]
        if said.startswith(("My ", "The ", "You ", "We ", "This ", "Our ", "There "))
        else said
    )


def _questioned(rng: Random, question: str) -> str:
    head = rng.choice(_QUESTION_HEADS)
    text = head + (
        question[0].lower() + question[1:] if head.endswith((", ", "And ")) and question[:2] != "I " else question
    )
    chance = rng.random()
    if chance < 0.06:
        text = text[0].lower() + text[1:]
    return text[:-1] if rng.random() < 0.06 else text


def _note(rng: Random, facts: list[Fact], foreign: bool) -> Exercise:
    said = rng.choice(_HEADS) + _joined(rng, facts) + rng.choice(_TAILS)
    if said[0].isalpha() and rng.random() < 0.06:
        said = said[0].lower() + said[1:]
    if foreign:
        reply = rng.choice(_OTHERS_NOTES).format(v=facts[0].value)
        return Exercise("note", "", (Message("user", said), Message("assistant", reply, foreign=True)))
    return exchange("note", "", said, _noted(facts), "The user tells me a fact.")


def aside(rng: Random) -> Exercise:
    """A turn of which the answer is another assistant's."""
    question, answer = rng.choice(_OTHERS_TALK)
    return Exercise("aside", "", (Message("user", question), Message("assistant", answer, foreign=True)))


def recall(rng: Random) -> tuple[list[Exercise], list[Exercise]]:
    """The turns that state facts, and the turns that ask for some of them, or for one that nobody has stated."""
    size = rng.choice((1, 1, 1, 2, 2, 3, 4, 5))
    facts = _facts(rng, size + 1)
    unsaid = facts.pop()
    foreign = rng.random() < 0.3
    turns = []
    left = facts
    while left:
        taken = rng.choice((1, 1, 1, 2, 3))
        turns.append(_note(rng, left[:taken], foreign))
        left = left[taken:]
        if foreign and rng.random() < 0.3:
            turns.append(aside(rng))
    asked = [
        exchange("recall", one.answer, _questioned(rng, one.question), one.answer, "The user has told me before.")
        for one in rng.sample(facts, rng.randrange(1, min(3, size) + 1))
    ]
    if rng.random() < 0.08:
        question = _questioned(rng, unsaid.question)
        asked.insert(
            rng.randrange(len(asked) + 1), exchange("unknown", "", question, UNKNOWN, "The user has not told me.")
        )
    return turns, asked


def combined(rng: Random) -> Exercise:
    """Facts stated and asked for in one message."""
    facts = _facts(rng, rng.choice((1, 1, 2, 3)))
    one = rng.choice(facts)
    return exchange("recall", one.answer, f"{_joined(rng, facts)} {_questioned(rng, one.question)}", one.answer,
                    "The message says it.")  # fmt: skip


def briefed(rng: Random) -> tuple[str, list[Exercise]]:
    """A system prompt that tells of other people, and questions about them."""
    facts = []
    while len(facts) < rng.choice((1, 2, 3)):
        name = person(rng)
        facts.append(worded(rng, rng.choice(wordings(PEOPLE)), name, name))
    system = rng.choice(("You are a helpful assistant. ", "", "Answer questions about people. ", "Context: "))
    system += " ".join(one.said for one in facts)
    asked = rng.sample(facts, rng.randrange(1, len(facts) + 1))
    return system, [
        exchange("system_recall", one.answer, _questioned(rng, one.question), one.answer, "The system message says it.")
        for one in asked
    ]
