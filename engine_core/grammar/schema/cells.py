"""What a schema comes down to: a union of cells, each of one JSON type. A cell is a conjunction; where a child of it is
a schema, it holds a term that is read only when somebody asks, so that recursive schemas stay finite.

A cell may carry `obstacles`: constraints that hold beside the others but that no automaton can express. A cell that
is found empty takes its obstacles with it; one that is written with an obstacle is a refusal."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TypeAlias

from penstock.engine_core.grammar.patterns import Node


@dataclasses.dataclass(frozen=True, slots=True)
class Obstacle:
    """A constraint without an exact form: the keyword, where it stands, and why."""

    keyword: str
    path: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A schema of the document, by its number there."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Every:
    """All of the parts hold."""

    parts: tuple[Term, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Some:
    """At least one of the parts holds."""

    parts: tuple[Term, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Inverse:
    """The part does not hold."""

    part: Term


@dataclasses.dataclass(frozen=True, slots=True)
class Union:
    """One of the cells holds."""

    cells: tuple[Cell, ...]


Term: TypeAlias = Place | Every | Some | Inverse | Union
ANY = Every(())
NEVER = Some(())


@dataclasses.dataclass(frozen=True, slots=True)
class Null:
    """null"""


@dataclasses.dataclass(frozen=True, slots=True)
class Truth:
    """One of the two booleans, or both."""

    values: tuple[bool, ...] = (True, False)


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """Numbers between two bounds. `whole` is None where integers and fractions are both allowed."""

    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    whole: bool | None = None
    multiples: tuple[Fraction, ...] = ()
    not_multiples: tuple[Fraction, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Strings. `among` lists the only values allowed, `excluded` those that are not; lengths are in characters."""

    shortest: int = 0
    longest: int | None = None
    patterns: tuple[Node, ...] = ()
    not_patterns: tuple[Node, ...] = ()
    formats: tuple[str, ...] = ()
    not_formats: tuple[str, ...] = ()
    among: tuple[str, ...] | None = None
    excluded: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """`contains`: between `least` and `most` items match the term."""

    term: Term
    least: int = 1
    most: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """Arrays: terms of the first items, the term of all others, and how many there may be.

    `evaluated` is how many leading items the keywords behind this cell looked at (None: all), for unevaluatedItems.
    """

    prefix: tuple[Term, ...] = ()
    items: Term = ANY
    fewest: int = 0
    most: int | None = None
    counts: tuple[Count, ...] = ()
    unique: bool = False
    evaluated: int | None = 0
    obstacles: tuple[Obstacle, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One schema's word on the keys of an object: named ones, those that match a pattern, and the rest.

    `annotates` and `closing` serve unevaluatedProperties: whether the named keys count as evaluated, and the rest too.
    """

    properties: tuple[tuple[str, Term], ...] = ()
    patterns: tuple[tuple[Node, Term], ...] = ()
    rest: Term = ANY
    annotates: bool = True
    closing: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Other:
    """Some key has a value of the term: one that is not among the names, matches none of the patterns, and is found by
    `inside`, where that is given."""

    term: Term
    names: tuple[str, ...] = ()
    patterns: tuple[Node, ...] = ()
    inside: Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Objects: every layer has its word on every key; `names` are terms that all keys obey as strings."""

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    fewest: int = 0
    most: int | None = None
    names: tuple[Term, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()
    others: tuple[Other, ...] = ()


Cell: TypeAlias = Null | Truth | Number | Text | Series | Record

FULL: tuple[Cell, ...] = (Null(), Truth(), Number(), Text(), Series(), Record())


def every(*terms: Term) -> Term:
    """The conjunction, flat and without repetition, in the order given: the first names the order of keys."""
    parts: dict[Term, None] = {}
    for term in terms:
        if isinstance(term, Every):
            parts.update(dict.fromkeys(term.parts))
        elif term == NEVER:
            return NEVER
        else:
            parts[term] = None
    return next(iter(parts)) if len(parts) == 1 else Every(tuple(parts))


def some(*terms: Term) -> Term:
    """The disjunction, flat and without repetition."""
    parts: dict[Term, None] = {}
    for term in terms:
        if isinstance(term, Some):
            parts.update(dict.fromkeys(term.parts))
        elif term == ANY:
            return ANY
        else:
            parts[term] = None
    return next(iter(parts)) if len(parts) == 1 else Some(tuple(parts))


def inverse(term: Term) -> Term:
    """The negation. Two of them cancel."""
    if term == ANY:
        return NEVER
    if term == NEVER:
        return ANY
    return term.part if isinstance(term, Inverse) else Inverse(term)
