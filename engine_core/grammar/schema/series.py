"""Cells of arrays: their conjunction and complement. Items are terms; nothing here looks into them."""

from __future__ import annotations

import dataclasses

from penstock.engine_core.grammar.schema.cells import ANY, NEVER, Count, Obstacle, Series, Term, every, inverse


def item(cell: Series, at: int) -> Term:
    """The term of the item at a place."""
    return cell.prefix[at] if at < len(cell.prefix) else cell.items


def intersect(a: Series, b: Series) -> Series | None:
    """Arrays of both; None where there are none, as far as that is seen without reading the items."""
    length = max(len(a.prefix), len(b.prefix))
    most = b.most if a.most is None else a.most if b.most is None else min(a.most, b.most)
    cell = Series(
        tuple(every(item(a, i), item(b, i)) for i in range(length)),
        every(a.items, b.items),
        max(a.fewest, b.fewest),
        most,
        a.counts if not b.counts else tuple(dict.fromkeys(a.counts + b.counts)),
        a.unique or b.unique,
        None if a.evaluated is None or b.evaluated is None else max(a.evaluated, b.evaluated),
        a.obstacles if not b.obstacles else tuple(dict.fromkeys(a.obstacles + b.obstacles)),
    )
    cell = shortened(cell)
    return None if cell.most is not None and cell.fewest > cell.most else cell


def shortened(cell: Series) -> Series:
    """An item that can never be ends the array before it."""
    most = cell.most
    for at, term in enumerate(cell.prefix):
        if term == NEVER and (most is None or at < most):
            most = at
            break
    if cell.items == NEVER and (most is None or most > len(cell.prefix)):
        most = len(cell.prefix)
    return cell if most == cell.most else dataclasses.replace(cell, most=most, prefix=cell.prefix[:most])


def complement(cell: Series) -> list[Series]:
    """Cells of all other arrays; what has no exact form is an obstacle."""
    out = []
    if cell.fewest:
        out.append(Series(most=cell.fewest - 1))
    if cell.most is not None:
        out.append(Series(fewest=cell.most + 1))
    for at, term in enumerate(cell.prefix):
        if term != ANY:
            out.append(Series(prefix=(ANY,) * at + (inverse(term),), fewest=at + 1))
    if cell.items == NEVER:
        out.append(Series(fewest=len(cell.prefix) + 1))
    elif cell.items != ANY:
        # some item after the prefix does not match
        matched = Count(inverse(cell.items))
        unseen = Obstacle("not", "", "of items after a prefix has no exact form")
        out.append(Series(counts=(matched,)) if not cell.prefix else Series(obstacles=(unseen,)))
    for count in cell.counts:
        if count.least:
            out.append(Series(counts=(Count(count.term, 0, count.least - 1),)))
        if count.most is not None:
            out.append(Series(counts=(Count(count.term, count.most + 1),)))
    if cell.unique:
        repeats = Obstacle("not", "", "of uniqueItems has no exact form")
        out.append(Series(fewest=2, obstacles=(repeats,)))
    out.extend(Series(obstacles=(obstacle,)) for obstacle in cell.obstacles)
    return out
