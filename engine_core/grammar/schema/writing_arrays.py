"""Arrays as llguidance takes them: prefixItems, items, minItems, maxItems.

It does not hold `contains` and `uniqueItems`. Where they cannot be proven redundant, arrays are listed by the position
of each match, or left to `lark` in a form that it can count: items that match `contains` apart from the others, unique
items one by one. Strings and integers beyond that are marked for who follows the output (`unique_items`). Anything else
is refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from fractions import Fraction

from penstock.engine_core.grammar.schema.cells import ANY, Array, Cell, Count, Term, Union, all_of, negation
from penstock.engine_core.grammar.schema.scalars import Boolean, Null, Number, String, lower
from penstock.engine_core.grammar.schema.unique_items import CONTINUED, COUNTED, MARK, texts_of
from penstock.engine_core.grammar.schema.writer import Json, Writer

MAX_ARRANGEMENTS = 400  # arrays listed in place of uniqueItems, or of contains
MAX_PAIRED = 64  # items that are compared with one another
MAX_VALUES = 64  # values of unique items: a bit each of a rule's parameter
UNCOUNTED = (
    "items can be told apart where all are strings without a format, or of "
    f"{', '.join(sorted((*COUNTED, *CONTINUED)))}; where all are integers; where they have at most {MAX_VALUES} values "
    "in all; or with maxItems of 1; lenient leaves it out"
)
UNFOLLOWED = f"in a tag or a tool call, items can have at most {MAX_VALUES} values in all; lenient leaves it out"
MAX_COUNTED = 1024  # states in which the items that match `contains`, and all items, are counted


def write(writer: Writer, cell: Array) -> list[Json]:
    """The alternatives of a cell of arrays. Raises UnsupportedSchema."""
    writer.obstacles(cell.obstacles)
    plain = dataclasses.replace(cell, counts=(), obstacles=(), evaluated=0)
    cells = [plain]
    for count in cell.counts:
        cells = [narrowed for one in cells for narrowed in counted(writer, one, count)]
    if cell.unique:
        cells = [narrowed for one in cells for narrowed in distinct(writer, one)]
    written = (_written(writer, one) for one in cells if not writer.algebra.hollow(one))
    return [one for one in written if one is not None]


def _written(writer: Writer, cell: Array) -> Json | None:
    """None where no array is left."""
    out: Json = {"type": "array"}
    if cell.counts:
        return _written_count(writer, cell, cell.counts[0])
    if cell.unique:
        values = values_of(writer, cell.items)
        if values is not None and len(values) <= MAX_VALUES:
            return out | {"items": {"enum": list(map(_value, values))}, "uniqueItems": True} | _lengths(cell)
        followed = _followed(writer, cell.items)
        assert followed is not None, "the others have been made distinct"
        out[MARK] = writer.unique(followed[0])
    prefix = [writer.child(term) for term in cell.prefix]
    most = cell.max_items
    if False in prefix:
        most = lower(most, prefix.index(False))
        prefix = prefix[:most]
        if cell.min_items > len(prefix):
            return None
    if prefix:
        out["prefixItems"] = prefix
    rest = writer.child(cell.items)
    if rest is False:
        most = lower(most, len(prefix))
        if cell.min_items > len(prefix):
            return None
    if rest != {}:
        out["items"] = rest
    if cell.min_items:
        out["minItems"] = cell.min_items
    if most is not None and (rest is not False or most < len(prefix)):
        out["maxItems"] = most
    return out


def _written_count(writer: Writer, cell: Array, count: Count) -> Json | None:
    """With an upper bound the items are either of two kinds, of which `contains` is the second."""
    inside = writer.child(all_of(cell.items, count.term))
    if inside is False:
        rest = all_of(cell.items, negation(count.term))
        return None if count.least else _written(writer, dataclasses.replace(cell, items=rest, counts=()))
    out: Json = {"type": "array", "contains": inside, "minContains": count.least}
    if count.most is None:
        out["items"] = writer.child(cell.items)
    else:
        out["items"] = {"anyOf": [writer.child(all_of(cell.items, negation(count.term))), inside]}
        out["maxContains"] = count.most
    return out | _lengths(cell)


def _lengths(cell: Array) -> Json:
    most: Json = {} if cell.max_items is None else {"maxItems": cell.max_items}
    return ({"minItems": cell.min_items} if cell.min_items else {}) | most


def _value(cell: Cell) -> object:
    """The only value of a cell."""
    match cell:
        case Boolean(values):
            return values[0]
        case String(among=tuple(texts)):
            return texts[0]
        case Number(low=Fraction() as value):
            return int(value) if value.denominator == 1 else float(value)
    return None


def states(cell: Array, count: Count) -> tuple[int, int]:
    """How many items that match must be told apart, and how many items of all: both counted from 0."""
    matching = count.least if count.most is None else count.most
    if cell.max_items is not None:
        return matching, cell.max_items
    return matching, 0 if cell.min_items <= count.least else cell.min_items


def _countable(writer: Writer, cell: Array, count: Count) -> bool:
    matching, length = states(cell, count)
    alone = not (writer.plain or cell.prefix or cell.counts or cell.unique)
    return alone and (matching + 1) * (length + 1) <= MAX_COUNTED


def counted(writer: Writer, cell: Array, count: Count) -> Iterator[Array]:
    """`contains` without `contains`: arrays in which between `least` and `most` items match the term."""
    algebra = writer.algebra
    if count.least == 0 and count.most is None:
        yield cell
        return
    kinds = [*cell.prefix, cell.items]
    inside = [algebra.covers(count.term, kind) for kind in kinds]
    outside = [not sure and algebra.disjoint(kind, count.term) for sure, kind in zip(inside, kinds, strict=True)]
    if all(outside):
        if count.least == 0:
            yield cell
        return
    if all(inside):
        most = lower(cell.max_items, count.most)
        yield dataclasses.replace(cell, min_items=max(cell.min_items, count.least), max_items=most)
        return
    certain = sum(inside[: min(len(cell.prefix), cell.min_items)])
    if count.most is None and certain >= count.least:
        yield cell
        return
    longest = len(cell.prefix) if outside[-1] else cell.max_items  # items past it do not matter
    if longest is None and count.most == 0:
        refused = negation(count.term)
        yield dataclasses.replace(
            cell, prefix=tuple(all_of(t, refused) for t in cell.prefix), items=all_of(cell.items, refused)
        )
        return
    arranged = longest is not None and _ways(longest, count) <= MAX_ARRANGEMENTS
    if not arranged and _countable(writer, cell, count):
        yield dataclasses.replace(cell, counts=(count,))
        return
    if longest is None or not arranged or cell.counts:
        writer.left_out("contains", "it has no exact form in an array of any length beside other items")
        yield cell
        return
    yield from _placed(cell, count, longest)


def _ways(longest: int, count: Count) -> int:
    ways = 1
    for at in range(min(count.least if count.most is None else longest, longest)):
        ways = ways * (longest - at) // (at + 1) if count.most is None else ways * 2
        if ways > MAX_ARRANGEMENTS:
            return ways
    return ways


def _placed(cell: Array, count: Count, longest: int) -> Iterator[Array]:
    """One alternative for each choice of the items that match; with an upper bound all others must not."""
    other = ANY if count.most is None else negation(count.term)
    highest = count.least if count.most is None else min(count.most, longest)
    for size in range(count.least, highest + 1):
        for chosen in itertools.combinations(range(longest), size):
            prefix = tuple(all_of(cell.item(i), count.term if i in chosen else other) for i in range(longest))
            fewest = max(cell.min_items, chosen[-1] + 1 if chosen else 0)
            yield dataclasses.replace(cell, prefix=prefix, min_items=fewest)


def values_of(writer: Writer, term: Term) -> list[Cell] | None:
    """The scalars that match a term, one cell each; None where they cannot be listed."""
    out: list[Cell] = []
    for cell in writer.algebra.cells(term):
        match cell:
            case Null():
                out.append(cell)
            case Boolean(values):
                out.extend(Boolean((value,)) for value in values)
            case String(among=tuple(values), patterns=(), not_patterns=(), formats=()):
                out.extend(String(among=(value,)) for value in values)
            case Number(low=low, high=high, whole=True) if low is not None and high is not None:
                if high - low > MAX_ARRANGEMENTS:
                    return None
                numbers = (Number(Fraction(n), False, Fraction(n), False) for n in range(int(low), int(high) + 1))
                out.extend(n for n in numbers if not writer.algebra.disjoint(_of(n), _of(cell)))
            case Number(low=low, high=high) if low is not None and low == high:
                out.append(Number(low, False, low, False))
            case _:
                if not writer.algebra.hollow(cell):
                    return None
    return list(dict.fromkeys(out))


def _of(cell: Cell) -> Term:
    return Union((cell,))


def _followed(writer: Writer, term: Term) -> tuple[Json, int | None] | None:
    """What tells unique items apart while they are written, and how many there may be; None where nothing does."""
    cells = [cell for cell in writer.algebra.cells(term) if not writer.algebra.hollow(cell)]
    if len(cells) == 1 and isinstance(cells[0], String | Number):
        return texts_of(cells[0])
    return None


def distinct(writer: Writer, cell: Array) -> Iterator[Array]:
    """`uniqueItems` left out where the items differ anyway, kept where they can be counted one by one."""
    longest = cell.max_items
    kinds = [cell.item(i) for i in range(min(longest, MAX_PAIRED))] if longest is not None else []
    proven = dataclasses.replace(cell, unique=False)
    if longest is not None and longest <= 1:
        yield proven
        return
    pairs = itertools.combinations(kinds, 2)
    if longest is not None and longest <= MAX_PAIRED and all(writer.algebra.disjoint(a, b) for a, b in pairs):
        yield proven
        return
    values = values_of(writer, cell.items)
    if values is not None and not cell.prefix:
        limit = len(values) if longest is None else min(longest, len(values))
        if len(values) <= MAX_VALUES and not cell.counts and not writer.plain:
            if cell.min_items <= limit:
                yield dataclasses.replace(cell, max_items=limit)
            return
    followed = None if cell.prefix or cell.counts else _followed(writer, cell.items)
    if followed is not None and writer.follows:
        most = lower(longest, followed[1])
        if most is None or cell.min_items <= most:
            yield dataclasses.replace(cell, max_items=most)
        return
    writer.left_out("uniqueItems", UNCOUNTED if followed is None else UNFOLLOWED)
    yield dataclasses.replace(cell, unique=False)
