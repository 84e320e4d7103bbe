"""Tools that no list holds: something is done to a thing of any name, or told of it in a place, on a day."""

from random import Random

from benchmarks.demo_model.lexicon import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    FOODS,
    NATURE,
    OBJECTS,
    VERBS,
    article,
    pseudo_word,
)
from benchmarks.demo_model.tasks.skills import Parameter, Skill
from benchmarks.demo_model.tasks.values import FRACTIONS, kind, listing
from benchmarks.demo_model.tasks.wording import asked, described, mute_name, nouns, renamed, reworded, telling_name

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


def any_thing(rng: Random) -> str:
    chance = rng.random()
    if chance < 0.15:
        return pseudo_word(rng)
    if chance < 0.4:
        return rng.choice(nouns())
    if chance < 0.5:
        return f"{rng.choice(ADJECTIVES + COLOURS)} {rng.choice(_NOUNS)}"
    return rng.choice(_NOUNS) if chance < 0.75 else f"{rng.choice(nouns())} {rng.choice(nouns())}"


def strange(rng: Random, things: tuple[str, ...], deeds: tuple[tuple[str, ...], ...]) -> Skill:
    """A tool that no list holds: something is done to a thing, by its name, number or properties."""
    deed, thing = rng.choice(deeds), rng.choice(things)
    verb, other, third = (rng.choice(deed) for _ in range(3))
    mute = rng.random() < 0.25
    name = mute_name(rng) if mute else telling_name(rng, rng.choice((f"{other} {thing}", f"{thing} {other}")))
    description = rng.choice((
        f"{third.capitalize()} {{}}", f"{third.capitalize()} {{}}", f"Tool to {third} {{}}",
        f"Use this to {third} {{}}",
        f"Lets the user {third} {{}}", f"Can {third} {{}}",
    )).format(rng.choice((f"a {thing}", f"the {thing}", f"one {thing}", f"a given {thing}")))  # fmt: skip
    chosen = rng.sample(_ANY, rng.choice((1, 1, 1, 2, 2, 3)))
    parameters: dict[str, Parameter] = {}
    words: dict[str, str] = {}
    for number, (names, kind_, purpose) in enumerate(chosen):
        word = renamed(rng, names)
        words[f"s{number}"] = word.replace("_", " ")
        members = tuple(kind_[5:].split("/")) if kind_.startswith("enum:") else ()
        word = f"{thing.replace(' ', '_')}_{word}" if rng.random() < 0.12 else word
        parameters[f"s{number}"] = Parameter((word,), purpose, kind(kind_), members, kind_ in FRACTIONS)
    optional = frozenset(list(parameters)[1:]) if len(parameters) > 1 and rng.random() < 0.4 else frozenset[str]()
    questions = tuple(asked(rng, one) for one in _orders(rng, verb, thing, words, chosen[0][1], optional))
    silent = not mute and rng.random() < 0.12
    return Skill((name,), "" if silent else described(rng, description), parameters, questions, {}, "", optional)


def _orders(
    rng: Random, verb: str, thing: str, words: dict[str, str], first: str, optional: frozenset[str]
) -> list[str]:
    """Ways to ask for it, with all parameters or without some optional one."""
    kept = [slot for slot in words if slot not in optional or rng.random() < 0.5]
    start = verb.capitalize()
    if len(kept) > 1 and rng.random() < 0.5:  # not always as the signature has them
        rng.shuffle(kept)
    if len(kept) == 1 and first in ("code", "person"):
        return [f"{start} {thing} {{s0}}.", f"{start} the {thing} {{s0}}.", f"I want to {verb} the {thing} {{s0}}.",
                f"I need to {verb} {thing} {{s0}}.", f"The {thing} {{s0}}: {verb} it.",
                f"{{s0}} is the {thing} to {verb}.", f"Can you {verb} {thing} {{s0}} for me?",
                f"{{s0}} is {article(thing)} that I want to {verb}.", f"Can I {verb} {thing} {{s0}} before lunch?",
                f"{{s0}}: {verb} this {thing}, please.", f"{start} {thing} {{s0}} while I wait."]  # fmt: skip
    called = [f"{words[slot]} {{{slot}}}" for slot in kept]
    with_ = listing(rng, called)
    dotted = ", ".join(f"{words[slot]}: {{{slot}}}" for slot in kept)
    said = " ".join(f"The {words[slot]} is {{{slot}}}." for slot in kept)
    first_said = " ".join(f"{{{slot}}} is the {words[slot]}." for slot in kept)
    return [f"{start} the {thing} with {with_}.", f"{start} a {thing} with the {with_}.",
    f"{start} the {thing}, {dotted}.",
            f"{start} the {thing}. {said}", f"I want to {verb} a {thing}. {said}",
            f"{start} a {thing} ({dotted}).", f"{first_said} {start} the {thing}.",
            f"{said} {start} the {thing}, please.",
            f"With {with_}, {verb} the {thing}.", f"{start} {article(thing)} with {with_} for me."]  # fmt: skip


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


# Where the value is the subject.
_HAVING = (
    "{v} needs the {t}.", "Can {v} get the {t}?", "{v}: what is the {t}?",
    "What {t} does {v} have?", "{v} wants to know the {t}.",
    "Does {v} have a {t} by now?", "Has {v} got the {t}?", "{v} has a {t}. Which one?", "{v} is asking for the {t}.",
    "I think {v} has a {t}, please look.", "How does {v} stand with the {t}?", "Which {t} belongs to {v} at present?",
)  # fmt: skip


def natural(rng: Random, thing: str) -> Skill:
    """A tool that tells of a thing in a place, of a person, on a day: asked for as people ask."""
    other = any_thing(rng)
    whole = rng.choice((thing, thing, f"{thing} of the {other}", f"{other} {thing}", f"{other}'s {thing}"))
    chosen = rng.sample(tuple(_JOINTS), rng.choice((1, 1, 1, 2, 2, 3)))
    parameters: dict[str, Parameter] = {}
    phrases, sorts = [], []
    for number, kind_ in enumerate(chosen):
        joints, sort = _JOINTS[kind_]
        word = rng.choice(sort)
        names = (
            word.split(" ")[-1],
            renamed(rng, (word.split(" ")[-1], kind_)),
            pseudo_word(rng),
            rng.choice(nouns()),
            f"{thing.split(' ')[-1]}_{word.split(' ')[-1]}",
        )
        parameters[f"s{number}"] = Parameter((rng.choice(names),), f"{word.capitalize()} to look at", kind(kind_))
        phrases.append((f"s{number}", joints))
        sorts.append(f"{joints[0]} {word}" if joints[0] != "with number" else f"of {word}")
    mute = rng.random() < 0.35
    name = mute_name(rng) if mute else telling_name(rng, rng.choice((whole, f"get {whole}", thing)).replace("'s", ""))
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
    if len(chosen) == 1:
        questions += [asked(rng, frame.format(t=said, v="{s0}")) for frame in rng.sample(_HAVING, 3)]
    silent = not mute and rng.random() < 0.1
    return Skill(
        (name,), "" if silent else described(rng, reworded(rng, description)), parameters, tuple(questions), {}, ""
    )


def any_deeds(rng: Random) -> tuple[tuple[str, ...], ...]:
    """Deeds that people know, and some that nobody does."""
    return (*_DEEDS, *((pseudo_word(rng),) for _ in range(12)), *((rng.choice(VERBS),) for _ in range(12)))


def different(rng: Random, nouns: tuple[str, ...], deeds: tuple[tuple[str, ...], ...], size: int) -> list[Skill]:
    pairs = [(noun, deed) for noun in dict.fromkeys(nouns) for deed in dict.fromkeys(deeds)]
    return [strange(rng, (noun,), (deed,)) for noun, deed in rng.sample(pairs, min(size, len(pairs)))]
