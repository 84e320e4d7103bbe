"""Terms and the unions of cells that they come to, found only as deep as needed; and how large a schema, and what is
made of it, may grow. Beyond a limit it is refused, never slow.

This is the algebra of set-theoretic types over JSON (compare Frisch, Castagna and Benzaken, Semantic Subtyping, 2008,
and Habib et al., Finding Data Compatibility Bugs with JSON Subschema Checks, 2021): conjunction distributes over cells,
negation goes through them by De Morgan, and whether a term is empty is a least fixed point, since JSON values are
finite. Emptiness is claimed only where it is certain."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine_core.grammar.patterns import PatternError
from penstock.engine_core.grammar.schema.cells import (
    ANY,
    FULL,
    AllOf,
    AnyOf,
    Array,
    Cell,
    Not,
    Object,
    Other,
    Place,
    Term,
    Union,
    all_of,
    negation,
)
from penstock.engine_core.grammar.schema.scalars import Boolean, Number, String
from penstock.protocol.errors import UnsupportedSchema

MAX_DEPTH = 256  # JSON levels of a schema
MAX_NODES = 200_000  # JSON values of a schema
MAX_STEPS = 20_000  # cells made while a schema is rewritten
MAX_TOGETHER = 64  # alternatives of one product in a loose reading
MAX_INPLACE = 48  # $ref, allOf, anyOf, oneOf, not, if inside one another, all for the same value
MAX_EMPTINESS = 24  # levels of required children that are searched for one that cannot be


class CircularTerm(Exception):
    """A term was asked for while it is being found: it refers to itself without a level of JSON in between."""


Cells = tuple[Cell, ...]
Read = Callable[["Algebra", Place], Cells]


class Allowance:
    """What is left of MAX_STEPS for one schema."""

    def __init__(self, *, hard: bool = True) -> None:
        self.hard = hard
        self.left = MAX_STEPS

    def spend(self, steps: int = 1) -> bool:
        """Whether the schema is within its limit. If that is hard, raise UnsupportedSchema where it is not."""
        self.left -= steps
        if self.left < 0 and self.hard:
            raise UnsupportedSchema("schema", "", f"it expands to more than {MAX_STEPS} alternatives")
        return self.left >= 0


def check_size(schema: object) -> None:
    """Raise UnsupportedSchema for a schema that is too deep or too large. No recursion, whatever the depth."""
    level: list[object] = [schema]
    depth = nodes = 0
    while level:
        depth += 1
        nodes += len(level)
        if depth > MAX_DEPTH:
            raise UnsupportedSchema("schema", "", f"it is nested deeper than {MAX_DEPTH} levels")
        if nodes > MAX_NODES:
            raise UnsupportedSchema("schema", "", f"it has more than {MAX_NODES} values")
        level = [child for node in level for child in children(node)]


def children(node: object) -> list[object]:
    """JSON values right inside a value."""
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, list) else []


def meet(a: Cell, b: Cell) -> Cell | None:
    """The conjunction of two cells of one type."""
    if a == b:
        return a
    match a, b:
        case Boolean(), Boolean():
            return a.meet(b)
        case Number(), Number():
            return a.meet(b)
        case String(), String():
            return a.meet(b)
        case Array(), Array():
            return a.meet(b)
        case Object(), Object():
            return a.meet(b)
    return None


def weight(cell: Cell) -> int:
    """What a step with a cell costs, in steps."""
    return 1 + len(cell.layers) + len(cell.required) // 4 if isinstance(cell, Object) else 1


class Algebra:
    """Finds cells and emptiness of terms, each once. `read` gives the cells of a schema of the document."""

    def __init__(self, read: Read, path: Callable[[Term], str], *, loose: bool = False) -> None:
        self.read = read
        self.path = path
        self.loose = loose
        self.widened = False  # a loose product gave its first factor
        self.allowance = Allowance(hard=not loose)
        self.found: dict[Term, Cells] = {}
        self.active: set[Term] = set()  # terms being found
        self.known: dict[Term, bool] = {}  # terms known to be empty, or not
        self.asked: set[Term] = set()  # terms whose emptiness is being decided, and assumed
        self.level = 0
        self.assumptions = 0  # answers so far that rest on a term whose emptiness is still being decided
        self.circles = 0  # answers so far that were not looked for, because a term is still being found

    def cells(self, term: Term) -> Cells:
        """The cells of a term. Raises UnsupportedSchema (malformed, too large) and CircularTerm."""
        known = self.found.get(term)
        if known is not None:
            return known
        if term in self.active:
            raise CircularTerm(self.path(term))
        if len(self.active) >= MAX_INPLACE:
            raise UnsupportedSchema("schema", self.path(term), f"more than {MAX_INPLACE} schemas hold for one value")
        self.active.add(term)
        try:
            cells = self._find(term)
        finally:
            self.active.remove(term)
        self.found[term] = cells
        return cells

    def _find(self, term: Term) -> Cells:
        match term:
            case Place():
                return self.read(self, term)
            case Union(cells):
                return cells
            case AllOf(parts):
                cells = FULL
                for part in parts:
                    cells = self.product(cells, self.cells(part))
                return cells
            case AnyOf(parts):
                return tuple(dict.fromkeys(cell for part in parts for cell in self.cells(part)))
            case Not(part):
                return self.rest(self.cells(part))

    def product(self, one: Cells, two: Cells) -> Cells:
        """What is in both unions, without cells that are seen to be empty.

        Loosely, all of the first where the product grows too large. A loose reading has no negation, which this would
        make too narrow.
        """
        if one == FULL or two == FULL:
            return two if one == FULL else one
        out: dict[Cell, None] = {}
        asked, self.asked = self.asked, set()  # what is dropped here must be empty whatever is being decided above
        try:
            for a in one:
                for b in two:
                    if type(a) is type(b):
                        if not self.allowance.spend(weight(a) + weight(b)) or (self.loose and len(out) > MAX_TOGETHER):
                            self.widened = True
                            return one
                        cell = meet(a, b)
                        if cell is not None and (cell in (a, b) or not self.hollow(cell)):
                            out[cell] = None
        finally:
            self.asked = asked
        return tuple(out)

    def rest(self, cells: Cells) -> Cells:
        """Everything that is in none of the cells."""
        out: list[Cell] = []
        for full in FULL:
            left: Cells = (full,)
            for cell in cells:
                if type(cell) is type(full):
                    left = () if cell == full else self.product(left, tuple(cell.complement()))
            out.extend(left)
        return tuple(out)

    def empty(self, term: Term) -> bool:
        """Whether no finite JSON value matches. False where that is not certain."""
        if term == ANY:
            return False
        known = self.known.get(term)
        if known is not None:
            return known
        if term in self.asked:
            self.assumptions += 1
            return True  # least fixed point: a value would have to hold itself
        if self.level >= MAX_EMPTINESS:
            return False
        assumptions, circles = self.assumptions, self.circles
        self.asked.add(term)
        self.level += 1
        try:
            empty = all(self.hollow(cell) for cell in self.cells(term))
        except CircularTerm:
            self.circles += 1
            empty = False
        finally:
            self.level -= 1
            self.asked.discard(term)
        certain = not self.asked or self.assumptions == assumptions if empty else self.circles == circles
        if certain:
            self.known[term] = empty
        return empty

    def disjoint(self, one: Term, two: Term) -> bool:
        """Whether no value matches both. False where that is not certain."""
        return self.empty(all_of(one, two))

    def covers(self, wide: Term, narrow: Term) -> bool:
        """Whether every value of `narrow` is one of `wide`. False where that is not certain."""
        return wide in (ANY, narrow) or self.empty(all_of(narrow, negation(wide)))

    def hollow(self, cell: Cell) -> bool:
        """Whether a cell is empty, read as deep as its required children."""
        match cell:
            case Number() | String():
                return cell.empty()
            case Array():
                return self._hollow_array(cell)
            case Object():
                return self._hollow_object(cell)
        return False

    def _hollow_array(self, cell: Array) -> bool:
        if cell.max_items is not None and cell.min_items > cell.max_items:
            return True
        if any(self.empty(term) for term in cell.prefix[: cell.min_items]):
            return True
        if cell.min_items > len(cell.prefix) and self.empty(cell.items):
            return True
        for count in cell.counts:
            if count.most is not None and count.least > count.most:
                return True
            if count.least and all(self.disjoint(term, count.term) for term in (*cell.prefix, cell.items)):
                return True
        return False

    def _hollow_object(self, cell: Object) -> bool:
        try:
            if any(map(self.empty, cell.terms_of(cell.required).values())):
                return True
            if cell.names and any(self.empty(cell.key_term(name)) for name in cell.required):
                return True
            if cell.min_properties > len(cell.required) and self.closed(cell):
                known = cell.terms_of(cell.known_names())
                if sum(not self.empty(term) for term in known.values()) < cell.min_properties:
                    return True
            return any(self._lacking(cell, other) for other in cell.others)
        except PatternError:
            return False

    def _lacking(self, cell: Object, other: Other) -> bool:
        """Whether no key can be the other that the cell must have."""
        if not self.closed(cell):
            return False
        known = cell.terms_of(other.candidates(cell.known_names()))
        return all(self.disjoint(term, other.term) for term in known.values())

    def closed(self, cell: Object) -> bool:
        """Whether no key that the cell does not name can have a value."""
        patterns = [term for layer in cell.layers for _, term in layer.patterns]
        return self.empty(cell.rest()) and all(map(self.empty, patterns))
