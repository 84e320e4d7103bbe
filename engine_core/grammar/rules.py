"""The rules of an EBNF grammar as a tree, and which of them anything finite can satisfy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """These characters."""

    value: str


@dataclass(frozen=True)
class Chars:
    """One character of these ranges, or of none of them."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool = False


@dataclass(frozen=True)
class Name:
    """What a rule says."""

    rule: str


@dataclass(frozen=True)
class Sequence:
    """One after the other; nothing at all when empty."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """One of these."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """At least `low` and at most `high` times; None: any number."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Lexeme:
    """This, read in one piece."""

    part: Node


Node = Text | Chars | Name | Sequence | Choice | Repeat | Lexeme


def names(node: Node) -> Iterator[str]:
    """Rules that a node uses."""
    match node:
        case Name(rule):
            yield rule
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from names(part)
        case Repeat(part) | Lexeme(part):
            yield from names(part)


def completable(rules: Mapping[str, Node]) -> set[str]:
    """Rules that some text of finite length satisfies; the others need one another forever."""
    users: dict[str, list[str]] = {}
    for name, node in rules.items():
        for used in set(names(node)):
            users.setdefault(used, []).append(name)
    found: set[str] = set()
    waiting = deque(rules)
    while waiting:
        name = waiting.popleft()
        if name not in found and completed(rules[name], found):
            found.add(name)
            waiting.extend(users.get(name, ()))
    return found


def completed(node: Node, rules: AbstractSet[str]) -> bool:
    """Whether a text satisfies a node that uses no other rules than these. Every class of characters has some."""
    match node:
        case Name(rule):
            return rule in rules
        case Sequence(parts):
            return all(completed(part, rules) for part in parts)
        case Choice(parts):
            return any(completed(part, rules) for part in parts)
        case Repeat(part, low):
            return low == 0 or completed(part, rules)
        case Lexeme(part):
            return completed(part, rules)
    return True
