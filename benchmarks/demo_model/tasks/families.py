"""Tools that people give to models: families of data/tools.txt, and as many as needed that no list holds.

Every conversation names a family's tool, its parameters and what they are for anew, so that the model learns to read
signatures: names in every style, names that say nothing, descriptions that say it in other words than the question.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from benchmarks.demo_model.tasks.skills import Parameter, Skill
from benchmarks.demo_model.tasks.unlisted import any_deeds, any_thing, different, natural, strange
from benchmarks.demo_model.tasks.values import FRACTIONS, KINDS, Said, kind
from benchmarks.demo_model.tasks.wording import asked, described, mute_name, renamed, reworded, styled, telling_name

_DATA = Path(__file__).parents[1] / "data"
TRAINING, HELD_OUT = "tools.txt", "tools_held_out.txt"
_NEAR, _ALIKE = 6, 4  # families of one neighbourhood of the file; how near two must stand to be taken for each other
_ABOUT_WEATHER = 3 + _ALIKE  # families before this one are about the weather or near it
_TELLING = 12  # a word that stands in the names of more families says nothing about what they are for


@dataclass(frozen=True)
class Family:
    """A block of the data file."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[tuple[str, bool, str, tuple[str, ...], str], ...]  # slot, whether optional, kind, names, purpose
    questions: tuple[str, ...]
    meanings: frozenset[str]  # its first name, and first names of families that do the same


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
        frozenset(
            [lines[0].split(" | ")[0], *(name for mark, text in rest if mark == "g" for name in text.split(" | "))]
        ),
    )


def _same(one: int, other: int) -> bool:
    """Whether two families do the same, so that a question for one is a question for the other."""
    listed = families(TRAINING)
    return not listed[one].meanings.isdisjoint(listed[other].meanings)


def of_weather(index: int) -> bool:
    """Whether a question about the weather could be meant for this family."""
    return 0 <= index < _ABOUT_WEATHER or (index >= 0 and any(_same(index, other) for other in range(3)))


@cache
def _telling_words() -> tuple[frozenset[str], ...]:
    """The words of each family's names that few families share."""
    words = [{word for name in family.names for word in name.split(" ")} for family in families(TRAINING)]
    often = Counter(word for one in words for word in one)
    return tuple(frozenset(word for word in one if often[word] <= _TELLING) for one in words)


def _alike(one: int, other: int) -> bool:
    """Whether a question for one family might be taken for a question for the other."""
    words = _telling_words()
    return abs(one - other) <= _ALIKE or _same(one, other) or not words[one].isdisjoint(words[other])


def known(rng: Random, index: int, file: str = TRAINING) -> Skill:
    """A tool of a family as one conversation has it."""
    family = families(file)[index]
    mute = rng.random() < 0.25
    name = mute_name(rng) if mute else telling_name(rng, rng.choice(family.names))
    silent = not mute and rng.random() < 0.12
    kinds = {slot: kind_ for slot, _, kind_, _, _ in family.parameters}
    parameters = {}
    for slot, _, kind_, names, purpose in family.parameters:
        names = (renamed(rng, names),) if rng.random() < 0.5 else names
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
        "" if silent else described(rng, reworded(rng, rng.choice(family.descriptions))),
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


def kit(rng: Random, size: int) -> list[Skill]:
    """Skills of a kit, no two alike: families from all over or of near kinds, and tools that no list holds."""
    form = rng.random()
    if form < 0.22:
        things = list(dict.fromkeys(any_thing(rng) for _ in range(size)))
        return [natural(rng, thing) for thing in things]
    if form < 0.42:
        # Few things and few deeds, so that the tools of a kit share words and each word counts.
        nouns = tuple(any_thing(rng) for _ in range(rng.choice((1, 2, 2, size))))
        deeds = tuple(rng.sample(any_deeds(rng), rng.choice((1, 2, 2, size))))
        if len(nouns) * len(deeds) < size:
            nouns = tuple(any_thing(rng) for _ in range(size))
        return different(rng, nouns, deeds, size)
    count = len(families(TRAINING))
    chosen = rng.sample(range(count), size)
    if size > 1 and rng.random() < 0.15:
        start = rng.randrange(count - _NEAR)
        chosen = rng.sample(range(start, start + _NEAR), min(size, _NEAR))
    chosen = [one for number, one in enumerate(chosen) if not any(_same(one, other) for other in chosen[:number])]
    skills = [known(rng, index) for index in chosen]
    if rng.random() < 0.3:
        other = natural(rng, any_thing(rng)) if rng.random() < 0.5 else strange(rng, (any_thing(rng),), any_deeds(rng))
        skills[rng.randrange(len(skills))] = other
    return skills


def unserved(rng: Random, skills: list[Skill]) -> Skill:
    """A skill of a family that is not like any of these skills."""
    taken = {skill.family for skill in skills if skill.family >= 0}
    while True:
        index = rng.randrange(len(families(TRAINING)))
        if not any(_alike(index, other) for other in taken):
            return known(rng, index)
