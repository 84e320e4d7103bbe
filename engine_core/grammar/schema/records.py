"""Cells of objects: their conjunction and complement, and the one term that all layers together have for a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from penstock.engine_core.grammar import automata
from penstock.engine_core.grammar.schema.cells import ANY, NEVER, Layer, Obstacle, Other, Record, Term, every, inverse


def absent(name: str) -> Record:
    """Objects without a key."""
    return Record((Layer(((name, NEVER),), annotates=False),))


def intersect(a: Record, b: Record) -> Record | None:
    """Objects of both; None where there are none, as far as that is seen without reading the values."""
    most = b.most if a.most is None else a.most if b.most is None else min(a.most, b.most)
    cell = Record(
        a.layers if not b.layers else tuple(dict.fromkeys(a.layers + b.layers)),
        a.required if not b.required else tuple(dict.fromkeys(a.required + b.required)),
        max(a.fewest, b.fewest),
        most,
        a.names if not b.names else tuple(dict.fromkeys(a.names + b.names)),
        a.obstacles if not b.obstacles else tuple(dict.fromkeys(a.obstacles + b.obstacles)),
        a.others if not b.others else tuple(dict.fromkeys(a.others + b.others)),
    )
    if most is not None and max(cell.fewest, len(cell.required)) > most:
        return None
    banned = {name for layer in cell.layers for name, term in layer.properties if term == NEVER}
    return None if not banned.isdisjoint(cell.required) else cell


def terms_of(cell: Record, names: Iterable[str]) -> dict[str, Term]:
    """What the values of those keys must match. `Record.names` is not asked.

    Raises PatternError where a pattern cannot be told to match a key.
    """
    tables = [(dict(layer.properties), layer) for layer in cell.layers]
    out: dict[str, Term] = {}
    for name in names:
        words = []
        for table, layer in tables:
            found = [table[name]] if name in table else []
            found.extend(term for node, term in layer.patterns if automata.matches(node, name))
            words.extend(found or [layer.rest])
        out[name] = words[0] if len(words) == 1 else every(*words)
    return out


def known_names(cell: Record) -> tuple[str, ...]:
    """Keys that a layer or `required` names, in the order in which they are written."""
    named = dict.fromkeys(name for layer in cell.layers for name, _ in layer.properties)
    named.update(dict.fromkeys(cell.required))
    return tuple(named)


def complement(cell: Record) -> list[Record]:
    """Cells of all other objects; what has no exact form is an obstacle."""
    out: list[Record] = [absent(name) for name in cell.required]
    if cell.fewest:
        out.append(Record(most=cell.fewest - 1))
    if cell.most is not None:
        out.append(Record(fewest=cell.most + 1))
    for layer in cell.layers:
        for name, term in layer.properties:
            if term != ANY:
                known = Layer(((name, inverse(term)),), annotates=False)
                out.append(Record((known,), (name,)))
        out.extend(_some(Other(inverse(term), inside=node)) for node, term in layer.patterns if term != ANY)
        if layer.rest != ANY:
            names = tuple(name for name, _ in layer.properties)
            out.append(_some(Other(inverse(layer.rest), names, tuple(node for node, _ in layer.patterns))))
    if cell.names:
        out.append(Record(fewest=1, obstacles=(Obstacle("not", "", "of propertyNames has no exact form"),)))
    out.extend(map(none_of, cell.others))
    out.extend(Record(obstacles=(obstacle,)) for obstacle in cell.obstacles)
    return out


def _some(other: Other) -> Record:
    """Objects with such a key."""
    if other == Other(ANY):
        return Record(fewest=1)
    return Record(fewest=1, others=(other,))


def none_of(other: Other) -> Record:
    """Objects without such a key."""
    term = inverse(other.term)
    if other.inside is not None:
        return Record((Layer((), ((other.inside, term),), annotates=False),))
    named = tuple((name, ANY) for name in other.names)
    return Record((Layer(named, tuple((node, ANY) for node in other.patterns), term, annotates=False),))


def meant(other: Other, names: Iterable[str]) -> list[str]:
    """Those of the names that may be the key. Raises PatternError where a pattern cannot be told to match one."""
    out = [name for name in names if name not in set(other.names)]
    if other.inside is not None:
        out = [name for name in out if automata.matches(other.inside, name)]
    return [name for name in out if not any(automata.matches(node, name) for node in other.patterns)]


def unannotated(cell: Record) -> Record:
    """The same objects, none of whose keys counts as evaluated."""
    layers = tuple(dataclasses.replace(layer, annotates=False, closing=False) for layer in cell.layers)
    return dataclasses.replace(cell, layers=layers)
