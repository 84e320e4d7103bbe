"""The rules of an EBNF grammar as a tree."""

from __future__ import annotations

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
