"""Terms and what they come to: unions of cells, found only as deep as somebody asks.

This is the algebra of set-theoretic types over JSON (compare Frisch, Castagna and Benzaken, Semantic Subtyping, 2008,
and Habib et al., Finding Data Compatibility Bugs with JSON Subschema Checks, 2021): conjunction distributes over cells,
negation goes through them by De Morgan, and whether a term is empty is a least fixed point, since JSON values are
finite. Emptiness is said only where it is certain."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.engine_core.grammar.patterns import PatternError
from penstock.engine_core.grammar.schema import numbers, records, series, texts
from penstock.engine_core.grammar.schema.bounds import MAX_INPLACE, MAX_TOGETHER, Allowance
from penstock.engine_core.grammar.schema.cells import (
    ANY,
    FULL,
    Cell,
    Every,
    Inverse,
    Number,
    Other,
    Place,
    Record,
    Series,
    Some,
    Term,
    Text,
    Truth,
    Union,
    every,
    inverse,
)
from penstock.protocol.errors import UnsupportedSchema

MAX_EMPTINESS = 24  # levels of required children that are searched for one that cannot be


class CircularTerm(Exception):
    """A term was asked for while it is being found: it refers to itself without a level of JSON in between."""


Cells = tuple[Cell, ...]
Read = Callable[["Algebra", Place], Cells]


def meet(a: Cell, b: Cell) -> Cell | None:
    """The conjunction of two cells of one type."""
    if a == b:
        return a
    match a, b:
        case Truth(), Truth():
            values = tuple(v for v in a.values if v in b.values)
            return Truth(values) if values else None
        case Number(), Number():
            return numbers.intersect(a, b)
        case Text(), Text():
            return texts.intersect(a, b)
        case Series(), Series():
            return series.intersect(a, b)
        case Record(), Record():
            return records.intersect(a, b)
    return None


def others(cell: Cell) -> Cells:
    """Everything of the cell's own type that is not in it."""
    match cell:
        case Truth(values):
            return (Truth((not values[0],)),) if len(values) == 1 else ()
        case Number():
            return tuple(numbers.complement(cell))
        case Text():
            return tuple(texts.complement(cell))
        case Series():
            return tuple(series.complement(cell))
        case Record():
            return tuple(records.complement(cell))
    return ()


def weight(cell: Cell) -> int:
    """What a step with a cell costs, in steps."""
    return 1 + len(cell.layers) + len(cell.required) // 4 if isinstance(cell, Record) else 1


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
        self.barren: dict[Term, bool] = {}  # terms known to be empty, or not
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
            case Every(parts):
                cells = FULL
                for part in parts:
                    cells = self.product(cells, self.cells(part))
                return cells
            case Some(parts):
                return tuple(dict.fromkeys(cell for part in parts for cell in self.cells(part)))
            case Inverse(part):
                return self.rest(self.cells(part))

    def product(self, one: Cells, two: Cells) -> Cells:
        """What is in both unions, without cells that are seen to be empty.

        Loosely, all of the first where the product grows too large: then no negation is asked for, whom that misled.
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
                    left = () if cell == full else self.product(left, others(cell))
            out.extend(left)
        return tuple(out)

    def empty(self, term: Term) -> bool:
        """Whether no finite JSON value matches. False where that is not certain."""
        if term == ANY:
            return False
        known = self.barren.get(term)
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
            barren = all(self.hollow(cell) for cell in self.cells(term))
        except CircularTerm:
            self.circles += 1
            barren = False
        finally:
            self.level -= 1
            self.asked.discard(term)
        certain = not self.asked or self.assumptions == assumptions if barren else self.circles == circles
        if certain:
            self.barren[term] = barren
        return barren

    def disjoint(self, one: Term, two: Term) -> bool:
        """Whether no value matches both. False where that is not certain."""
        return self.empty(every(one, two))

    def covers(self, wide: Term, narrow: Term) -> bool:
        """Whether every value of `narrow` is one of `wide`. False where that is not certain."""
        return wide in (ANY, narrow) or self.empty(every(narrow, inverse(wide)))

    def hollow(self, cell: Cell) -> bool:
        """Whether a cell is empty, read as deep as its required children."""
        match cell:
            case Number():
                return numbers.empty(cell)
            case Text():
                return texts.empty(cell)
            case Series():
                return self._hollow_series(cell)
            case Record():
                return self._hollow_record(cell)
        return False

    def _hollow_series(self, cell: Series) -> bool:
        if cell.most is not None and cell.fewest > cell.most:
            return True
        places: Iterable[Term] = cell.prefix[: cell.fewest]
        if any(self.empty(term) for term in places):
            return True
        if cell.fewest > len(cell.prefix) and self.empty(cell.items):
            return True
        for count in cell.counts:
            if count.most is not None and count.least > count.most:
                return True
            if count.least and all(self.disjoint(term, count.term) for term in (*cell.prefix, cell.items)):
                return True
        return False

    def _hollow_record(self, cell: Record) -> bool:
        try:
            if any(map(self.empty, records.terms_of(cell, cell.required).values())):
                return True
            if cell.names and any(self.empty(named(cell, name)) for name in cell.required):
                return True
            if cell.fewest > len(cell.required) and self.closed(cell):
                known = records.terms_of(cell, records.known_names(cell))
                if sum(not self.empty(term) for term in known.values()) < cell.fewest:
                    return True
            return any(self._lacking(cell, other) for other in cell.others)
        except PatternError:
            return False
        return False

    def _lacking(self, cell: Record, other: Other) -> bool:
        """Whether no key can be the other that the cell must have."""
        if not self.closed(cell):
            return False
        known = records.terms_of(cell, records.meant(other, records.known_names(cell)))
        return all(self.disjoint(term, other.term) for term in known.values())

    def closed(self, cell: Record) -> bool:
        """Whether no key that the cell does not name can have a value."""
        patterns = [term for layer in cell.layers for _, term in layer.patterns]
        return self.empty(every(*(layer.rest for layer in cell.layers))) and all(map(self.empty, patterns))


def named(cell: Record, name: str) -> Term:
    """What must hold for a key of that name to be allowed at all."""
    return every(Union((Text(among=(name,)),)), *cell.names)
