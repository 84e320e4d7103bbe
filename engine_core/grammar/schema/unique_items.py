"""`uniqueItems` of items too many to be counted in a grammar: where such arrays stand, and what their items are.

No automaton of a bounded size remembers items. So these arrays are written without the keyword, and whoever follows the
output refuses what repeats an item (`engine_core.grammar.unique_items`). For that it must know from the keys and
indices on the way to an array whether its items are unique. A schema that leaves this open is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

from penstock.engine_core.grammar import automata
from penstock.engine_core.grammar.automata import Language
from penstock.engine_core.grammar.patterns import PatternError, read
from penstock.engine_core.grammar.schema.scalars import FORMAT_PATTERNS, Number, String
from penstock.engine_core.grammar.schema.writing_scalars import MAX_BOUND, numerals
from penstock.protocol.errors import UnsupportedSchema

Json: TypeAlias = dict[str, object]
Place: TypeAlias = tuple[dict[str, int], int, list[int], int, object]  # see `engine_core.grammar.unique_items.Place`
MARK = "x-unique"  # key of an array whose items are to be told apart: the number of its `Texts`
FREE = -1  # place under which nothing is unique
ENDLESS = -1  # count of texts without end
MAX_PLACES = 5000
MAX_ITEMS = 5000  # distinct texts that bound an array: no output has more items
AMBIGUOUS = (
    "keys and indices do not tell this array from one in another alternative whose items may repeat or are of another "
    "kind; give all of them the same items and uniqueItems, or let lenient leave it out"
)
# As llguidance holds them. Texts of the last three can always be continued, up to an address in brackets.
COUNTED: Mapping[str, str] = {
    **FORMAT_PATTERNS,
    "uuid": r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "ipv4": r"^((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)$",
}
CONTINUED = frozenset(("uri", "hostname", "email"))


def texts_of(cell: String | Number) -> tuple[Json, int | None] | None:
    """The texts of one kind of item, and how many there are if they are few; None where they cannot be told.

    At each place of an unfinished item the follower must know whether a text is left that is not taken yet.
    """
    if isinstance(cell, Number):
        return _integers(cell)
    if cell.not_formats or set(cell.formats) - COUNTED.keys() - CONTINUED:
        return None
    patterned = cell.patterns or cell.not_patterns or cell.among is not None or cell.excluded
    if not patterned and not COUNTED.keys() & set(cell.formats):
        if cell.max_length is not None and (cell.formats or not cell.max_length):
            return None
        return {"kind": "string", "most": cell.max_length}, None
    if CONTINUED.intersection(cell.formats):
        return None
    try:
        wanted = [*cell.patterns, *(read(COUNTED[name]) for name in cell.formats)]
        if cell.among is None and (cell.min_length or cell.max_length is not None):
            most = "" if cell.max_length is None else cell.max_length
            wanted.append(read(rf"^[\s\S]{{{cell.min_length},{most}}}$"))
        among = [] if cell.among is None else [automata.of_texts(cell.among)]
        among += [automata.inverted(automata.of_texts(cell.excluded))] if cell.excluded else []
        return _counted("string", automata.combined(wanted, cell.not_patterns, *among))
    except PatternError:
        return None


def _integers(cell: Number) -> tuple[Json, int | None] | None:
    bounds = [bound for bound in (cell.low, cell.high) if bound is not None]
    if cell.step() != 1 or cell.not_multiples or any(b.denominator != 1 or abs(b) >= MAX_BOUND for b in bounds):
        return None
    cell = cell.snapped()
    low, high = (None if bound is None else int(bound) for bound in (cell.low, cell.high))
    low = low if low is None or not cell.low_open else low + 1
    high = high if high is None or not cell.high_open else high - 1
    pattern = numerals("integer", low, high)
    try:
        return None if pattern is None else _counted("integer", automata.language(read(f"^({pattern})$")))
    except PatternError:
        return None


def _counted(kind: str, lang: Language) -> tuple[Json, int | None]:
    counts = texts_left(lang)
    total = counts[0] if 0 <= counts[0] <= MAX_ITEMS else None
    if set(counts) <= {ENDLESS, 0}:
        return {"kind": kind, "most": None}, total
    starts = sorted((low, letter) for letter, ranges in enumerate(lang.letters) for low, _ in ranges)
    table = {"starts": [low for low, _ in starts], "letters": [letter for _, letter in starts]}
    return {"kind": kind, "most": None, "texts": {**table, "moves": lang.moves, "counts": counts}}, total


def texts_left(lang: Language) -> list[int]:
    """How many texts there are from each state on; ENDLESS, or 0 where none is."""
    sizes = [sum(high - low + 1 for low, high in ranges) for ranges in lang.letters]
    users: list[set[int]] = [set() for _ in lang.moves]
    for state, row in enumerate(lang.moves):
        for target in row:
            users[target].add(state)
    alive, level = set(lang.accepts), list(lang.accepts)
    for state in level:
        level.extend(users[state] - alive)
        alive |= users[state]
    counts = [ENDLESS if state in alive else 0 for state in range(len(lang.moves))]
    going = set(alive)
    while ended := [state for state in going if going.isdisjoint(lang.moves[state])]:
        going.difference_update(ended)
        for state in ended:
            onward = sum(size * counts[target] for size, target in zip(sizes, lang.moves[state], strict=True))
            counts[state] = onward + (state in lang.accepts)
    return counts


def places(schema: Json, texts: Sequence[Json]) -> tuple[Place, ...]:
    """The places of a rewritten schema, the first one its root's; from each, the place behind a key or an index.

    Raises UnsupportedSchema where keys and indices don't tell which arrays are unique, or there are too many places.
    """
    return tuple(_Places(schema, texts).found())


class _Places:
    """Finds the places: sets of alternatives that a value may follow."""

    def __init__(self, schema: Json, texts: Sequence[Json]) -> None:
        definitions = schema.get("$defs", {})
        assert isinstance(definitions, dict), "$defs are written as an object"
        self._definitions = definitions
        self._texts = texts
        self._root = schema
        self._numbers: dict[frozenset[int], int] = {}
        self._nodes: list[list[Json]] = []

    def found(self) -> list[Place]:
        self._number(self._root)
        made: list[Place] = []
        for nodes in self._nodes:  # which grows meanwhile
            if len(self._nodes) > MAX_PLACES:
                raise UnsupportedSchema("uniqueItems", "", f"it stands below more than {MAX_PLACES} places")
            made.append(self._place(nodes))
        return _pruned(made)

    def _number(self, *children: object) -> int:
        """The place of values that follow one of the schemas."""
        nodes = {id(node): node for child in children for node in self._alternatives(child)}
        key = frozenset(nodes)
        if key not in self._numbers:
            self._numbers[key] = len(self._nodes)
            self._nodes.append(list(nodes.values()))
        return self._numbers[key]

    def _alternatives(self, schema: object) -> Iterator[Json]:
        waiting, seen = [schema], set()
        for node in waiting:
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            if "$ref" in node:
                waiting.append(self._definitions[str(node["$ref"]).removeprefix("#/$defs/")])
            elif "anyOf" in node:
                waiting.extend(node["anyOf"])
            else:
                yield node

    def _place(self, nodes: list[Json]) -> Place:
        objects = [node for node in nodes if node.get("type") == "object"]
        arrays = [node for node in nodes if node.get("type") == "array"]
        mark = self._mark(arrays, anything=any(node.keys() <= {"$defs"} for node in nodes))
        tables = [_table(node, "properties") for node in objects]
        others = [
            [*_table(node, "patternProperties").values(), node.get("additionalProperties", {})] for node in objects
        ]
        keys = {
            name: self._number(*chain(*([t[name]] if name in t else o for t, o in zip(tables, others, strict=True))))
            for name in dict.fromkeys(chain(*tables))
        }
        first = [_listed(node, "prefixItems") for node in arrays]
        rest = [[node.get("items", {}), node.get("contains", False)] for node in arrays]
        prefix = [
            self._number(*chain(*(f[at : at + 1] or r for f, r in zip(first, rest, strict=True))))
            for at in range(max(map(len, first), default=0))
        ]
        return keys, self._number(*chain(*others)), prefix, self._number(*chain(*rest)), mark

    def _mark(self, arrays: list[Json], *, anything: bool) -> Json | None:
        """What the items are that all of the arrays have alike; None where they may repeat."""
        found: list[Json | None] = [None] * anything
        for node in arrays:
            number = node.get(MARK)
            mark = self._texts[number] if isinstance(number, int) else None
            if mark not in found:
                found.append(mark)
        if len(found) > 1:
            raise UnsupportedSchema("uniqueItems", "", AMBIGUOUS)
        return found[0] if found else None


def _table(node: Json, keyword: str) -> Json:
    found = node.get(keyword, {})
    assert isinstance(found, dict), "a schema's tables are objects"
    return found


def _listed(node: Json, keyword: str) -> list[object]:
    found = node.get(keyword, [])
    assert isinstance(found, list), "items are listed"
    return found


def _pruned(made: list[Place]) -> list[Place]:
    """The places from which an array with unique items is reached; FREE stands for the others."""
    users: list[set[int]] = [set() for _ in made]
    for number, (keys, other, prefix, items, _) in enumerate(made):
        for target in (*keys.values(), other, *prefix, items):
            users[target].add(number)
    level = [number for number, place in enumerate(made) if place[-1] is not None]
    kept = set(level)
    for number in level:
        level.extend(users[number] - kept)
        kept |= users[number]
    kept.add(0)
    names = {number: at for at, number in enumerate(sorted(kept))}

    def to(number: int) -> int:
        return names.get(number, FREE)

    out: list[Place] = []
    for keys, other, prefix, items, mark in (made[number] for number in sorted(kept)):
        named = {name: to(target) for name, target in keys.items() if to(target) != to(other)}
        out.append((named, to(other), [to(n) for n in prefix], to(items), mark))
    return out
