"""Sorting, counting, copying and reversing short lists, and picking from them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.demo_model.conversation import Exercise, exchange
from benchmarks.demo_model.lexicon import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    FOODS,
    JOBS,
    NAMES,
    OBJECTS,
    VERBS,
    WORDS,
    code,
    pseudo_word,
)

_LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
# What the items of a list are called, and the items.
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("animals", ANIMALS), ("colours", COLOURS), ("foods", FOODS), ("names", NAMES), ("things", OBJECTS), ("words",
     WORDS),
    ("words", WORDS), ("words", VERBS), ("words", ADJECTIVES), ("jobs", JOBS), ("letters", _LETTERS),
    ("letters", tuple(letter.upper() for letter in _LETTERS)),
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How a list stands in the question, and how it then stands in the answer."""

    write: Callable[[list[str]], str]
    answer: Callable[[list[str]], str]
    lines: bool = False  # the list takes lines of its own


def _joined(separator: str) -> Callable[[list[str]], str]:
    return separator.join


def _and(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _bulleted(items: list[str]) -> str:
    return "\n".join("- " + item for item in items)


def _numbered(items: list[str]) -> str:
    return "\n".join(f"{index}. {item}" for index, item in enumerate(items, 1))


def _plain(items: list[str]) -> list[int | str]:
    return [int(item) if item.isdigit() else item for item in items]


def _as_json(items: list[str]) -> str:
    return json.dumps(_plain(items))


def _as_dense_json(items: list[str]) -> str:
    return json.dumps(_plain(items), separators=(",", ":"))


def _bracketed(items: list[str]) -> str:
    return f"[{', '.join(items)}]"


_COMMA = _joined(", ")
_FORMS = (
    Form(_COMMA, _COMMA), Form(_COMMA, _COMMA), Form(_COMMA, _COMMA), Form(_COMMA, _COMMA), Form(_joined(","), _COMMA),
    Form(_joined(" "), _joined(" ")), Form(_joined(" "), _joined(" ")), Form(_and, _COMMA), Form(_joined("; "),
        _joined("; ")),
    Form(_joined("\n"), _joined("\n"), lines=True), Form(_bulleted, _bulleted, lines=True),
    Form(_numbered, _numbered, lines=True), Form(_as_json, _as_json), Form(_as_dense_json, _as_json), Form(_bracketed,
        _bracketed),
)  # fmt: skip


def _numbers(rng: Random, size: int) -> list[str]:
    limit = rng.choice((10, 20, 100, 100, 1000, 1000, 10000))
    return [str(rng.randrange(limit)) for _ in range(size)]


def _named(rng: Random, size: int) -> tuple[str, list[str]]:
    """What the items are called, and the items: known words."""
    kind, pool = rng.choice(_KINDS)
    return kind, rng.sample(pool, size)


def _anything(rng: Random, size: int) -> tuple[str, list[str]]:
    """What the items are called, and the items: numbers, known words, invented words, codes."""
    chance = rng.random()
    if chance < 0.35:
        return "numbers", _numbers(rng, size)
    if chance < 0.75:
        return _named(rng, size)
    if chance < 0.9:
        return "words", [pseudo_word(rng) for _ in range(size)]
    return "codes", [code(rng) for _ in range(size)]


def _question(rng: Random, heads: tuple[str, ...], kind: str, form: Form, items: list[str]) -> str:
    """One of the heads with the list behind it, or in it where the head has a place for it."""
    head = rng.choice(heads).replace("{kind}", kind)
    if "{}" in head:
        if not form.lines:
            return head.format(form.write(items))
        head = head.replace(" {}", "")
    elif rng.random() < 0.12 and not form.lines:
        return f"{form.write(items)}\n{head}."
    if rng.random() < 0.15:
        head = "Please " + head[0].lower() + head[1:]
    return head + (":\n" if form.lines else ": ") + form.write(items)


def _transform(
    rng: Random, task: str, heads: tuple[str, ...], named: tuple[str, list[str]], result: list[str], thought: str
) -> Exercise:
    kind, items = named
    form = rng.choice(_FORMS)
    question = _question(rng, heads, kind, form, items)
    return exchange(task, f"{task}{thought[:12]}|{'|'.join(items)}", question, form.answer(result), thought)


_ASCENDING = (
    "Sort these {kind}", "Sort {} in ascending order", "Sort these {kind} from smallest to largest", "Sort", "Sort {}",
    "Put these {kind} in order", "Sort this list of {kind}", "Order these from small to large",
    "Sort the following {kind}",
    "Sort the list {}", "Sort the {kind} {}", "Arrange these {kind} in ascending order", "Sort this list",
    "Order these {kind}",
    "Sort these {kind} in increasing order", "Can you sort these {kind}", "Sort them", "Arrange in order {}",
)  # fmt: skip
_DESCENDING = (
    "Sort these {kind} in descending order", "Sort {} from largest to smallest",
    "Put these {kind} in order, largest first",
    "Order these from large to small", "Sort in descending order", "Sort the list {} in descending order",
    "Sort the following {kind} from largest to smallest", "Sort these {kind}, largest first", "Sort descending",
)  # fmt: skip
_ALPHABETICAL = (
    "Sort these {kind} alphabetically", "Sort these {kind}", "Put these {kind} in alphabetical order", "Sort",
    "Sort {}",
    "Sort {} in alphabetical order", "Order these {kind} from A to Z", "Sort the list {}", "Sort the following {kind}",
    "Sort the list {} alphabetically", "Sort this list", "Arrange these {kind} alphabetically",
    "Can you sort these {kind}",
)  # fmt: skip


def sort(rng: Random) -> Exercise:
    """Numbers up or down, or words alphabetically."""
    chance = rng.random()
    if chance < 0.45:
        items = _numbers(rng, rng.randrange(2, 9))
        ordered = sorted(items, key=int)
        return _transform(rng, "sort", _ASCENDING, ("numbers", items), ordered, "I put the smallest number first.")
    if chance < 0.65:
        items = _numbers(rng, rng.randrange(2, 9))
        ordered = sorted(items, key=int, reverse=True)
        return _transform(rng, "sort", _DESCENDING, ("numbers", items), ordered, "I put the largest number first.")
    kind, items = _named(rng, rng.randrange(2, 7))
    return _transform(rng, "sort", _ALPHABETICAL, (kind, items), sorted(items), "I compare the first letters.")


_REVERSE = (
    "Reverse this list", "Reverse the order of these {kind}", "Write this list backwards", "Reverse",
    "Reverse these {kind}",
    "Give me this list in reverse order", "Turn this list around", "Reverse the list", "Reverse the list {}",
    "Reverse {}",
    "Reverse the following {kind}", "List these {kind} in reverse order", "Write {} in reverse order",
    "Say these {kind} backwards",
)  # fmt: skip
_COPY = (
    "Repeat this list", "Copy this list", "Repeat after me", "Say this again", "Copy", "Repeat", "Repeat these {kind}",
    "Write this list once more", "Repeat exactly", "Echo", "Copy these {kind}", "Repeat the following",
    "Copy the following {kind}",
    "Write down these {kind}", "Say",
)  # fmt: skip


def reverse(rng: Random) -> Exercise:
    """The same items, last first."""
    kind, items = _anything(rng, rng.randrange(2, 10))
    return _transform(rng, "reverse", _REVERSE, (kind, items), items[::-1], "I start with the last item.")


def copy(rng: Random) -> Exercise:
    """The same items in the same order, or the same sentence."""
    if rng.random() < 0.3:
        words = [rng.choice(WORDS) if rng.random() < 0.8 else pseudo_word(rng) for _ in range(rng.randrange(1, 12))]
        if rng.random() < 0.3:
            words.insert(0, "the")
        sentence = " ".join(words)
        if rng.random() < 0.4:
            sentence = sentence[0].upper() + sentence[1:] + rng.choice(".!?")
        question = rng.choice(
            ("Repeat: {}", "Say {}", "Repeat after me: {}", 'Say "{}"', "Say '{}'", 'Repeat "{}"', "Echo: {}")
        )
        return exchange("copy", sentence, question.format(sentence), sentence, "I repeat the sentence as it stands.")
    kind, items = _anything(rng, rng.randrange(1, 13))
    return _transform(rng, "copy", _COPY, (kind, items), items, "I repeat the items as they stand.")


_COUNT = (
    "How many items are in this list", "Count the items", "How long is this list", "Count these",
    "How many {kind} are here",
    "Count the {kind}", "How many {kind} are in this list", "Count these {kind}", "How many {kind} do you see", "Count",
)  # fmt: skip
_COUNT_INSIDE = ("How many {kind} are in {}?", "How many items are in {}?", "How many {kind} are in the list {}?")
_COUNT_ONE = (
    'How many times does "{w}" appear in', "Count the {w} entries in this list", 'Count "{w}"',
    "How often does {w} appear in",
    "How many times is {w} in this list",
)  # fmt: skip


def count(rng: Random) -> Exercise:
    """The length of a list, or how often one item stands in it."""
    form = rng.choice(_FORMS)
    if rng.random() < 0.5:
        kind, items = _anything(rng, rng.randrange(1, 13))
        inside = rng.random() < 0.2 and not form.lines
        question = _question(rng, _COUNT_INSIDE if inside else _COUNT, kind, form, items)
        if not inside and not form.lines and rng.random() < 0.1:
            question += "?"
        answer = f"The list has {len(items)} item{'s' * (len(items) != 1)}."
        thought = " ".join(f"{i} {item}" for i, item in enumerate(items, 1))
    else:
        kind, pool = _anything(rng, 4)
        items = [rng.choice(pool) for _ in range(rng.randrange(3, 11))]
        wanted = rng.choice(pool)
        times = items.count(wanted)
        heads = tuple(head.replace("{w}", wanted) for head in _COUNT_ONE)
        question = _question(rng, heads, kind, form, items)
        answer = f'"{wanted}" appears {times} time{"s" * (times != 1)}.'
        thought = f'I look for "{wanted}" in the list.'
    return exchange("count", f"{answer[:5]}|{'|'.join(items)}", question, answer, thought)


def pick(rng: Random) -> Exercise:
    """The first, last, nth, largest or smallest item."""
    if rng.random() < 0.4:
        word, best = rng.choice((("largest", max), ("smallest", min)))
        items = _numbers(rng, rng.randrange(2, 9))
        heads: tuple[str, ...] = (
            f"What is the {word} number in this list", f"Find the {word} number", f"What is the {word} number in {{}}?",
            f"Which number is the {word}", f"Find the {word} number in {{}}",
        )  # fmt: skip
        kind, thought = "numbers", f"I look for the {word} number."
        answer = f"The {word} number is {best(items, key=int)}."
    else:
        kind, items = _anything(rng, rng.randrange(4, 9))
        word, index = rng.choice((("first", 0), ("second", 1), ("third", 2), ("fourth", 3), ("last", -1)))
        heads = (
            f"What is the {word} item in this list", f"Which item comes {word}", f"What is the {word} item of {{}}?",
            f"Give me the {word} item",
        )  # fmt: skip
        answer, thought = f"The {word} item is {items[index]}.", f"I look for the {word} item."
    question = _question(rng, heads, kind, rng.choice(_FORMS), items)
    return exchange("pick", f"{word}|{'|'.join(items)}", question, answer, thought)
