"""Cells of objects: their conjunction and complement, and the one term that all layers together have for a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from engine_core.grammar.schema import languages
from engine_core.grammar.schema.cells import ANY, NEVER, Layer, Obstacle, Record, Term, every, inverse


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
            found.extend(term for node, term in layer.patterns if languages.matches(node, name))
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
        if any(term != ANY for _, term in layer.patterns):
            out.append(Record(fewest=1, obstacles=(Obstacle("not", "", "of patternProperties has no exact form"),)))
        if layer.rest != ANY:
            out.append(_another_key(layer))
    if cell.names:
        out.append(Record(fewest=1, obstacles=(Obstacle("not", "", "of propertyNames has no exact form"),)))
    out.extend(Record(obstacles=(obstacle,)) for obstacle in cell.obstacles)
    return out


def _another_key(layer: Layer) -> Record:
    """Objects with a key that the layer does not name, whose value is not what the layer wants."""
    if not layer.properties and not layer.patterns and layer.rest == NEVER:
        return Record(fewest=1)
    return Record(fewest=1, obstacles=(Obstacle("not", "", "of additionalProperties has no exact form"),))


def unannotated(cell: Record) -> Record:
    """The same objects, none of whose keys counts as evaluated."""
    layers = tuple(dataclasses.replace(layer, annotates=False, closing=False) for layer in cell.layers)
    return dataclasses.replace(cell, layers=layers)
