"""From keywords to cells: what one schema says about a value, every keyword of drafts 7, 2019-09 and 2020-12.

People mix drafts, so a keyword of any of the three means what its draft says whatever `$schema` announces. Two things
depend on the announced draft: up to draft 7 a `$ref` hides its siblings. `nullable` means what OpenAPI 3.0.3 says: null
is allowed too where `type` stands in the same schema. Boolean `exclusiveMinimum` and `exclusiveMaximum` are draft 4's.
Gemini's dialect is understood too: types in capitals, counts as strings, `nullable` beside an `enum` of strings,
`propertyOrdering`. A `format` that is not held is an annotation, as is every unknown keyword."""

from __future__ import annotations

import dataclasses
import itertools

from penstock.engine_core.grammar.patterns import PatternError
from penstock.engine_core.grammar.schema import assertions
from penstock.engine_core.grammar.schema.algebra import Algebra, Cells, CircularTerm
from penstock.engine_core.grammar.schema.cells import (
    ANY,
    FULL,
    NEVER,
    AnyOf,
    Array,
    Cell,
    Layer,
    Object,
    Obstacle,
    Place,
    Term,
    Union,
    all_of,
    any_of,
    negation,
    unannotated,
    without,
)
from penstock.engine_core.grammar.schema.document import Document
from penstock.engine_core.grammar.schema.scalars import Number, String
from penstock.protocol.errors import UnsupportedSchema

MAX_BRANCHES = 6  # alternatives of an anyOf whose annotations matter to unevaluatedProperties or unevaluatedItems
WHOLE = Union(FULL)
NOT_OBJECTS = tuple(cell for cell in FULL if not isinstance(cell, Object))


class Reader:
    """Reads the schemas of one document."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def __call__(self, algebra: Algebra, place: Place) -> Cells:
        """The cells of a schema. Raises UnsupportedSchema for a malformed one, naming keyword and path."""
        node = self.document.nodes[place.number]
        if self.document.old and "$ref" in node:
            return algebra.cells(self.document.target(place, "$ref"))
        facts = assertions.read(self.document, place, node)
        seen_base = False
        before: list[Term] = []
        after: list[Term] = []
        for keyword in node:
            seen_base |= keyword in ("properties", "required", "patternProperties")
            term = self.applied(algebra, place, node, keyword, facts)
            if term is not None and term != ANY:
                (after if seen_base else before).append(term)
        if "properties" not in node and "required" not in node:
            before, after = [], before + after
        cells = facts
        for term in after:
            cells = algebra.product(cells, algebra.cells(term))
        for term in reversed(before):
            cells = algebra.product(algebra.cells(term), cells)
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in node and not self.document.drops(place, keyword, "left out"):
                cells = self.unevaluated(algebra, place, node, cells)
                break
        return cells

    def applied(self, algebra: Algebra, place: Place, node: dict[str, object], keyword: str, own: Cells) -> Term | None:
        """What a keyword asks for that applies schemas to the same value, one of the `own` cells; else None."""
        match keyword:
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self.document.target(place, keyword)
            case "allOf":
                return all_of(*self.document.branches(place, node, keyword))
            case "anyOf":
                return self.any_of(place, self.document.branches(place, node, keyword))
            case "oneOf":
                branches = self.document.branches(place, node, keyword)
                if len(branches) > 1 and self.document.drops(place, keyword, "taken for anyOf"):
                    return any_of(*branches)
                return self.one_of(algebra, branches, Union(own))
            case "not" | "if" | "dependentRequired" | "dependentSchemas" | "dependencies" if self.document.drops(
                place, keyword, "left out"
            ):
                return None
            case "not":
                return self.negated(algebra, self.document.child(place, node[keyword], keyword))
            case "if":
                return self.conditional(algebra, place, node)
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                return self.dependent(place, node, keyword)
        return None

    def any_of(self, place: Place, branches: list[Term]) -> Term:
        """With annotations in play a value that matches several branches is evaluated by all of them."""
        if not self.document.tracks_evaluation or self.document.loose:
            return any_of(*branches)
        if len(branches) > MAX_BRANCHES:
            raise UnsupportedSchema("anyOf", self.document.path(place), "too many branches beside unevaluated keywords")
        sizes = range(1, len(branches) + 1)
        chosen = (all_of(*some_of) for size in sizes for some_of in itertools.combinations(branches, size))
        return AnyOf(tuple(dict.fromkeys(chosen)))

    def one_of(self, algebra: Algebra, branches: list[Term], own: Term) -> Term:
        """Each branch without those others that it has, or may have, values in common with among its own cells."""
        shared: list[list[Term]] = [[] for _ in branches]
        inside = [all_of(own, branch) for branch in branches] if own != WHOLE else branches
        tags = [tags_of(algebra, branch) for branch in inside] if len(branches) > 2 else [{}] * len(branches)
        for (i, a), (j, b) in itertools.combinations(enumerate(inside), 2):
            if any(tags[i][name].isdisjoint(tags[j][name]) for name in tags[i].keys() & tags[j].keys()):
                continue
            algebra.allowance.spend()
            if not algebra.disjoint(a, b):
                shared[i].append(branches[j])
                shared[j].append(branches[i])
        options = []
        for branch, rivals in zip(branches, shared, strict=True):
            options.append(all_of(branch, *(self.negated(algebra, rival) for rival in rivals)))
        return any_of(*options)

    def negated(self, algebra: Algebra, term: Term) -> Term:
        """The negation, which evaluates nothing."""
        if not self.document.tracks_evaluation or term in (ANY, NEVER):
            return negation(term)
        return Union(tuple(unannotated(cell) for cell in algebra.rest(algebra.cells(term))))

    def conditional(self, algebra: Algebra, place: Place, node: dict[str, object]) -> Term | None:
        """`if` with what follows from it either way; None where nothing does."""
        tracked = self.document.tracks_evaluation
        if "then" not in node and "else" not in node and not tracked:
            return None
        test = self.document.child(place, node["if"], "if")
        then = self.document.child(place, node["then"], "then") if "then" in node else ANY
        other = self.document.child(place, node["else"], "else") if "else" in node else ANY
        if other == ANY and not tracked:
            return any_of(negation(test), all_of(test, then))
        return any_of(all_of(test, then), all_of(self.negated(algebra, test), other))

    def dependent(self, place: Place, node: dict[str, object], keyword: str) -> Term:
        """Each key that is absent, or present with what it asks for."""
        out = []
        for name, wanted in self.document.table(place, node, keyword).items():
            if isinstance(wanted, list) and keyword != "dependentSchemas":
                names = assertions.names(wanted, keyword, self.document.path(place))
                if not names:
                    continue
                consequence: Term = Union((*NOT_OBJECTS, Object(required=names)))
            else:
                consequence = self.document.child(place, wanted, keyword, name)
                if consequence == ANY:
                    continue
            missing = Union((*NOT_OBJECTS, without(name)))
            out.append(any_of(missing, all_of(Union((Object(required=(name,)),)), consequence)))
        return all_of(*out)

    def unevaluated(self, algebra: Algebra, place: Place, node: dict[str, object], cells: Cells) -> Cells:
        """The cells with unevaluatedProperties and unevaluatedItems applied to what nothing else has looked at."""
        keys = self.document.child(place, node.get("unevaluatedProperties", True), "unevaluatedProperties")
        items = self.document.child(place, node.get("unevaluatedItems", True), "unevaluatedItems")
        out = []
        for cell in cells:
            found: Cell | None
            if isinstance(cell, Object) and "unevaluatedProperties" in node:
                found = cell.meet(Object((remaining_keys(cell, keys),)))
            elif isinstance(cell, Array) and "unevaluatedItems" in node:
                found = self.remaining_items(place, cell, items)
            else:
                out.append(cell)
                continue
            if found is not None and not algebra.hollow(found):
                out.append(found)
        return tuple(out)

    def remaining_items(self, place: Place, cell: Array, items: Term) -> Array | None:
        if cell.evaluated is None:
            return cell
        if cell.counts and items != ANY:
            reason = "contains beside it evaluates items that are not known in advance"
            obstacle = Obstacle("unevaluatedItems", self.document.path(place), reason)
            return dataclasses.replace(cell, evaluated=None, obstacles=(*cell.obstacles, obstacle))
        return cell.meet(Array((ANY,) * cell.evaluated, items, evaluated=None))


def tags_of(algebra: Algebra, branch: Term) -> dict[str, frozenset[object]]:
    """Required keys of a branch whose values are listed strings or numbers, when it is an object of one form."""
    try:
        cells = algebra.cells(branch)
        if len(cells) != 1 or not isinstance(cells[0], Object):
            return {}
        record = cells[0]
        out: dict[str, frozenset[object]] = {}
        for name, term in record.terms_of(record.required).items():
            listed: set[object] = set()
            for cell in algebra.cells(term):
                match cell:
                    case String(among=tuple(values)):
                        listed.update(values)
                    case Number(low=low, high=high) if low is not None and low == high:
                        listed.add(low)
                    case _:
                        break
            else:
                out[name] = frozenset(listed)
        return out
    except (CircularTerm, PatternError):
        return {}


def remaining_keys(cell: Object, rest: Term) -> Layer:
    """A layer for the keys that no annotating layer of the cell names."""
    heard = [layer for layer in cell.layers if layer.annotates]
    if any(layer.closing for layer in heard):
        return Layer(closing=True)
    properties = dict.fromkeys(name for layer in heard for name, _ in layer.properties)
    patterns = dict.fromkeys(node for layer in heard for node, _ in layer.patterns)
    named = tuple((name, ANY) for name in properties)
    return Layer(named, tuple((node, ANY) for node in patterns), rest, closing=True)
