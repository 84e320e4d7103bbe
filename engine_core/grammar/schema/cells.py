"""Terms and cells. A schema comes down to a union of cells, each a conjunction of constraints on one JSON type. Where a
cell has children it holds terms, which are read only on demand, so that recursive schemas stay finite.

A cell may carry `obstacles`: constraints that hold beside the others but that no automaton can express. A cell that
turns out to be empty takes its obstacles with it; writing a cell with an obstacle is a refusal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypeAlias

from penstock.engine_core.grammar import automata
from penstock.engine_core.grammar.patterns import Node
from penstock.engine_core.grammar.schema.scalars import Boolean, Null, Number, String, lower, merged


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A schema of the document, by its number there."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class AllOf:
    """All of the parts hold."""

    parts: tuple[Term, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of the parts holds."""

    parts: tuple[Term, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Not:
    """The part does not hold."""

    part: Term


@dataclasses.dataclass(frozen=True, slots=True)
class Union:
    """One of the cells holds."""

    cells: tuple[Cell, ...]


Term: TypeAlias = Place | AllOf | AnyOf | Not | Union
ANY = AllOf(())
NEVER = AnyOf(())


def all_of(*terms: Term) -> Term:
    """The conjunction, flat and without repetition, in the order given: the first names the order of keys."""
    return NEVER if NEVER in terms else _flat(AllOf, terms)


def any_of(*terms: Term) -> Term:
    """The disjunction, flat and without repetition."""
    return ANY if ANY in terms else _flat(AnyOf, terms)


def _flat(kind: type[AllOf] | type[AnyOf], terms: tuple[Term, ...]) -> Term:
    parts: dict[Term, None] = {}
    for term in terms:
        parts.update(dict.fromkeys(term.parts if isinstance(term, kind) else (term,)))
    return next(iter(parts)) if len(parts) == 1 else kind(tuple(parts))


def negation(term: Term) -> Term:
    """The negation. Two of them cancel."""
    if term in (ANY, NEVER):
        return NEVER if term == ANY else ANY
    return term.part if isinstance(term, Not) else Not(term)


@dataclasses.dataclass(frozen=True, slots=True)
class Obstacle:
    """A constraint without an exact form: the keyword, where it stands, and why."""

    keyword: str
    path: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """`contains`: between `least` and `most` items match the term."""

    term: Term
    least: int = 1
    most: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """Arrays: terms of the first items, the term of all others, and how many there may be.

    `evaluated` is how many leading items the keywords behind this cell looked at (None: all), for unevaluatedItems.
    """

    prefix: tuple[Term, ...] = ()
    items: Term = ANY
    min_items: int = 0
    max_items: int | None = None
    counts: tuple[Count, ...] = ()
    unique: bool = False
    evaluated: int | None = 0
    obstacles: tuple[Obstacle, ...] = ()

    def item(self, at: int) -> Term:
        """The term of the item at a place."""
        return self.prefix[at] if at < len(self.prefix) else self.items

    def meet(self, other: Array) -> Array | None:
        """Arrays of both; None where there are certainly none. Items are not looked into."""
        length = max(len(self.prefix), len(other.prefix))
        cell = Array(
            tuple(all_of(self.item(i), other.item(i)) for i in range(length)),
            all_of(self.items, other.items),
            max(self.min_items, other.min_items),
            lower(self.max_items, other.max_items),
            merged(self.counts, other.counts),
            self.unique or other.unique,
            None if self.evaluated is None or other.evaluated is None else max(self.evaluated, other.evaluated),
            merged(self.obstacles, other.obstacles),
        ).shortened()
        return None if cell.max_items is not None and cell.min_items > cell.max_items else cell

    def shortened(self) -> Array:
        """An item that can never be ends the array before it."""
        most = self.max_items
        for at, term in enumerate(self.prefix):
            if term == NEVER and (most is None or at < most):
                most = at
                break
        if self.items == NEVER and (most is None or most > len(self.prefix)):
            most = len(self.prefix)
        return self if most == self.max_items else dataclasses.replace(self, max_items=most, prefix=self.prefix[:most])

    def complement(self) -> list[Array]:
        """Cells of all other arrays; what has no exact form is an obstacle."""
        out = []
        if self.min_items:
            out.append(Array(max_items=self.min_items - 1))
        if self.max_items is not None:
            out.append(Array(min_items=self.max_items + 1))
        for at, term in enumerate(self.prefix):
            if term != ANY:
                out.append(Array(prefix=(ANY,) * at + (negation(term),), min_items=at + 1))
        if self.items == NEVER:
            out.append(Array(min_items=len(self.prefix) + 1))
        elif self.items != ANY:
            # some item after the prefix does not match
            matched = Count(negation(self.items))
            unseen = Obstacle("not", "", "of items after a prefix has no exact form")
            out.append(Array(counts=(matched,)) if not self.prefix else Array(obstacles=(unseen,)))
        for count in self.counts:
            if count.least:
                out.append(Array(counts=(Count(count.term, 0, count.least - 1),)))
            if count.most is not None:
                out.append(Array(counts=(Count(count.term, count.most + 1),)))
        if self.unique:
            repeats = Obstacle("not", "", "of uniqueItems has no exact form")
            out.append(Array(min_items=2, obstacles=(repeats,)))
        out.extend(Array(obstacles=(obstacle,)) for obstacle in self.obstacles)
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One schema's constraint on the keys of an object: named ones, those that match a pattern, and the rest.

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

    def candidates(self, names: Iterable[str]) -> list[str]:
        """Those of the names that may be the key. Raises PatternError where a pattern cannot decide one."""
        out = [name for name in names if name not in set(self.names)]
        if self.inside is not None:
            out = [name for name in out if automata.matches(self.inside, name)]
        return [name for name in out if not any(automata.matches(node, name) for node in self.patterns)]

    def required(self) -> Object:
        """Objects with such a key."""
        return Object(min_properties=1, others=() if self == Other(ANY) else (self,))

    def absent(self) -> Object:
        """Objects without such a key."""
        term = negation(self.term)
        if self.inside is not None:
            return Object((Layer((), ((self.inside, term),), annotates=False),))
        named = tuple((name, ANY) for name in self.names)
        return Object((Layer(named, tuple((node, ANY) for node in self.patterns), term, annotates=False),))


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    """Objects: every layer constrains every key; `names` are terms that all keys obey as strings."""

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    names: tuple[Term, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()
    others: tuple[Other, ...] = ()

    def meet(self, other: Object) -> Object | None:
        """Objects of both; None where there are certainly none. Values are not looked into."""
        cell = Object(
            merged(self.layers, other.layers),
            merged(self.required, other.required),
            max(self.min_properties, other.min_properties),
            lower(self.max_properties, other.max_properties),
            merged(self.names, other.names),
            merged(self.obstacles, other.obstacles),
            merged(self.others, other.others),
        )
        most = cell.max_properties
        if most is not None and max(cell.min_properties, len(cell.required)) > most:
            return None
        banned = {name for layer in cell.layers for name, term in layer.properties if term == NEVER}
        return None if not banned.isdisjoint(cell.required) else cell

    def terms_of(self, names: Iterable[str]) -> dict[str, Term]:
        """What the values of those keys must match; `self.names` is not asked.

        Raises PatternError where a pattern cannot decide a key.
        """
        tables = [(dict(layer.properties), layer) for layer in self.layers]
        out: dict[str, Term] = {}
        for name in names:
            terms = []
            for table, layer in tables:
                found = [table[name]] if name in table else []
                found.extend(term for node, term in layer.patterns if automata.matches(node, name))
                terms.extend(found or [layer.rest])
            out[name] = terms[0] if len(terms) == 1 else all_of(*terms)
        return out

    def known_names(self) -> tuple[str, ...]:
        """Keys that a layer or `required` names, in the order in which they are written."""
        named = dict.fromkeys(name for layer in self.layers for name, _ in layer.properties)
        named.update(dict.fromkeys(self.required))
        return tuple(named)

    def rest(self) -> Term:
        """What the value of a key must match that no layer knows."""
        return all_of(*(layer.rest for layer in self.layers))

    def key_term(self, name: str) -> Term:
        """What must hold for a key of that name to be allowed at all."""
        return all_of(Union((String(among=(name,)),)), *self.names)

    def complement(self) -> list[Object]:
        """Cells of all other objects; what has no exact form is an obstacle."""
        out: list[Object] = [without(name) for name in self.required]
        if self.min_properties:
            out.append(Object(max_properties=self.min_properties - 1))
        if self.max_properties is not None:
            out.append(Object(min_properties=self.max_properties + 1))
        for layer in self.layers:
            for name, term in layer.properties:
                if term != ANY:
                    known = Layer(((name, negation(term)),), annotates=False)
                    out.append(Object((known,), (name,)))
            out.extend(Other(negation(term), inside=node).required() for node, term in layer.patterns if term != ANY)
            if layer.rest != ANY:
                names = tuple(name for name, _ in layer.properties)
                out.append(Other(negation(layer.rest), names, tuple(node for node, _ in layer.patterns)).required())
        if self.names:
            obstacle = Obstacle("not", "", "of propertyNames has no exact form")
            out.append(Object(min_properties=1, obstacles=(obstacle,)))
        out.extend(other.absent() for other in self.others)
        out.extend(Object(obstacles=(obstacle,)) for obstacle in self.obstacles)
        return out


def without(name: str) -> Object:
    """Objects without a key."""
    return Object((Layer(((name, NEVER),), annotates=False),))


Cell: TypeAlias = Null | Boolean | Number | String | Array | Object
FULL: tuple[Cell, ...] = (Null(), Boolean(), Number(), String(), Array(), Object())


def unannotated(cell: Cell) -> Cell:
    """The same cell, which evaluates nothing."""
    match cell:
        case Object(layers):
            layers = tuple(dataclasses.replace(layer, annotates=False, closing=False) for layer in layers)
            return dataclasses.replace(cell, layers=layers)
        case Array():
            return dataclasses.replace(cell, evaluated=0)
    return cell
