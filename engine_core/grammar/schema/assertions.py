"""The keywords about a value itself and its children, one type at a time: type, const, enum, bounds, lengths, patterns,
properties, items. Each function turns those of one type into one cell."""

from __future__ import annotations

import dataclasses
import math
import re

from penstock.engine_core.grammar import automata, patterns
from penstock.engine_core.grammar.schema.algebra import meet
from penstock.engine_core.grammar.schema.cells import (
    ANY,
    FULL,
    NEVER,
    Array,
    Cell,
    Count,
    Layer,
    Object,
    Place,
    Term,
    Union,
)
from penstock.engine_core.grammar.schema.document import Document
from penstock.engine_core.grammar.schema.scalars import FORMATS, Boolean, Null, Number, String, fraction
from penstock.protocol.errors import UnsupportedSchema

TYPES = ("null", "boolean", "number", "string", "array", "object")
LARGEST_COUNT = 2**31
DECIMAL = re.compile(r"-?[0-9]{1,300}(\.[0-9]{1,300})?", re.ASCII)
NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
TEXTS = frozenset(("minLength", "maxLength", "pattern", "format"))
ARRAYS = frozenset((
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
    *("minContains", "maxContains"),
))  # fmt: skip
OBJECTS = frozenset((
    *("properties", "patternProperties", "additionalProperties", "required", "propertyNames"),
    *("minProperties", "maxProperties"),
))  # fmt: skip
Keywords = dict[str, object]


def read(document: Document, place: Place, node: Keywords) -> tuple[Cell, ...]:
    """The cells of a schema's own assertions, `const` and `enum` included. Raises UnsupportedSchema."""
    path = document.path(place)
    types = _types(node, path)
    out: list[Cell] = []
    if "null" in types:
        out.append(Null())
    if "boolean" in types:
        out.append(Boolean())
    if "number" in types or "integer" in types:
        number = _number(node, path, whole=True if "number" not in types else None)
        out.extend(() if number.empty() else (number,))
    if "string" in types:
        text = _string(document, node, path)
        out.extend(() if text.empty() else (text,))
    if "array" in types:
        array = _array(document, place, node, path)
        out.extend(() if array.max_items is not None and array.min_items > array.max_items else (array,))
    if "object" in types:
        made = Object().meet(_object(document, place, node, path))
        out.extend(() if made is None else (made,))
    cells = FULL if len(out) == len(FULL) and tuple(out) == FULL else tuple(out)
    for values in _listed(node, path):
        cells = _among(cells, values)
    if node.get("nullable") is True and "enum" in node and str(node.get("type")).isupper() and Null() not in cells:
        cells = (*cells, Null())  # Gemini's enums hold strings alone
    return cells


def _types(node: Keywords, path: str) -> frozenset[str]:
    if "type" not in node:
        return frozenset(TYPES)
    value = node["type"]
    listed = value if isinstance(value, list) else [value]
    names = []
    for name in listed:
        known = name.lower() if isinstance(name, str) and name.isupper() else name  # Gemini's "OBJECT"
        if known not in (*TYPES, "integer"):
            raise UnsupportedSchema("type", path, f"{str(name)[:100]!r} is no JSON type")
        names.append(known)
    return frozenset([*names, "null"] if node.get("nullable") is True else names)


def _listed(node: Keywords, path: str) -> list[list[object]]:
    out = []
    if "const" in node:
        out.append([node["const"]])
    if "enum" in node:
        value = node["enum"]
        if not isinstance(value, list):
            raise UnsupportedSchema("enum", path, "it must be a list")
        out.append(value)
    return out


def constant(value: object) -> Cell:
    """The cell of exactly one JSON value."""
    match value:
        case None:
            return Null()
        case bool():
            return Boolean((value,))
        case int() | float():
            number = fraction(value)
            return Number(number, False, number, False)
        case str():
            return String(among=(value,))
        case list():
            items = tuple(Union((constant(item),)) for item in value)
            return Array(items, NEVER, len(items), len(items))
    assert isinstance(value, dict), "a schema is made of JSON values"
    properties = tuple((name, Union((constant(child),))) for name, child in value.items())
    return Object((Layer(properties, (), NEVER, annotates=False),), tuple(value))


def constants(values: list[object]) -> tuple[Cell, ...]:
    """The cells of a list of values; its strings share one."""
    strings = dict.fromkeys(value for value in values if isinstance(value, str))
    out: dict[Cell, None] = {String(among=tuple(strings)): None} if strings else {}
    out.update(dict.fromkeys(constant(value) for value in values if not isinstance(value, str)))
    return tuple(out)


def _among(cells: tuple[Cell, ...], values: list[object]) -> tuple[Cell, ...]:
    listed = constants(values)
    if cells == FULL:
        return listed
    found = (meet(cell, one) for one in listed for cell in cells if type(cell) is type(one))
    return tuple(dict.fromkeys(cell for cell in found if cell is not None))


def _bound(node: Keywords, keyword: str, path: str) -> int | float | None:
    value = node.get(keyword)
    if value is None and keyword not in node:
        return None
    if isinstance(value, str) and DECIMAL.fullmatch(value):  # Gemini's "minItems": "1"
        value = float(value) if "." in value else int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedSchema(keyword, path, "it must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise UnsupportedSchema(keyword, path, "it must be finite")
    return value


def _count(node: Keywords, keyword: str, path: str) -> int | None:
    value = _bound(node, keyword, path)
    if value is None:
        return None
    if value < 0 or value != int(value):
        raise UnsupportedSchema(keyword, path, "it must be an integer of at least 0")
    if value > LARGEST_COUNT:
        return LARGEST_COUNT
    return int(value)


def names(value: object, keyword: str, path: str) -> tuple[str, ...]:
    """A list of keys. Raises UnsupportedSchema."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UnsupportedSchema(keyword, path, "it must be a list of strings")
    return tuple(dict.fromkeys(value))


def _number(node: Keywords, path: str, whole: bool | None) -> Number:
    cell = Number(whole=whole)
    if NUMBERS.isdisjoint(node):
        return cell
    for inclusive, exclusive, name in (("minimum", "exclusiveMinimum", "low"), ("maximum", "exclusiveMaximum", "high")):
        for keyword in (inclusive, exclusive):
            if isinstance(node.get(keyword), bool) and keyword == exclusive:
                continue
            bound = _bound(node, keyword, path)
            if bound is None:
                continue
            is_open = keyword == exclusive or node.get(exclusive) is True
            value = fraction(bound)
            side = Number(low=value, low_open=is_open) if name == "low" else Number(high=value, high_open=is_open)
            narrower = cell.meet(side)
            if narrower is None:
                return Number(low=fraction(1), high=fraction(0))
            cell = narrower
    multiple = _bound(node, "multipleOf", path)
    if multiple is not None:
        if multiple <= 0:
            raise UnsupportedSchema("multipleOf", path, "it must be more than 0")
        cell = dataclasses.replace(cell, multiples=(fraction(multiple),))
    return cell


def read_pattern(document: Document, value: object, keyword: str, path: str) -> patterns.Node:
    """The tree of a pattern. Raises UnsupportedSchema, if lenient only for what is no text."""
    if not isinstance(value, str):
        raise UnsupportedSchema(keyword, path, "a pattern is a string")
    try:
        return patterns.read(value)
    except patterns.PatternError as error:
        if not document.lenient:
            raise UnsupportedSchema(keyword, path, f"{error}") from None
        return patterns.Opaque(value, str(error))


def key_pattern(document: Document, text: str, path: str) -> patterns.Node:
    """The tree of a pattern of keys, lookaheads at its start worked in. Raises UnsupportedSchema."""
    wanted, unwanted = patterns.split(read_pattern(document, text, "patternProperties", path))
    if len(wanted) == 1 and not unwanted:
        return wanted[0]
    try:
        return automata.pattern(automata.combined(wanted, unwanted))
    except patterns.PatternError as error:
        return patterns.Opaque(text, f"the lookahead in it: {error}")


def _string(document: Document, node: Keywords, path: str) -> String:
    if TEXTS.isdisjoint(node):
        return String()
    wanted: tuple[patterns.Node, ...] = ()
    unwanted: tuple[patterns.Node, ...] = ()
    if "pattern" in node:
        wanted, unwanted = patterns.split(read_pattern(document, node["pattern"], "pattern", path))
    name = node.get("format")
    return String(
        _count(node, "minLength", path) or 0,
        _count(node, "maxLength", path),
        wanted,
        unwanted,
        (name,) if isinstance(name, str) and name in FORMATS else (),
    )


def _array(document: Document, place: Place, node: Keywords, path: str) -> Array:
    if ARRAYS.isdisjoint(node):
        return Array()
    prefix: tuple[Term, ...] = ()
    rest: Term = ANY
    evaluated: int | None = 0
    listed = "prefixItems" if "prefixItems" in node else "items" if isinstance(node.get("items"), list) else None
    if listed is not None and node[listed] != []:
        prefix = tuple(document.branches(place, node, listed))
        evaluated = len(prefix)
    after = "items" if listed != "items" else "additionalItems"
    if after in node:
        rest = document.child(place, node[after], after)
        evaluated = None
    counts: tuple[Count, ...] = ()
    if "contains" in node and not document.drops(place, "contains", "left out"):
        least = _count(node, "minContains", path)
        most = _count(node, "maxContains", path)
        least = 1 if least is None else least
        if least > 0 or most is not None:
            counts = (Count(document.child(place, node["contains"], "contains"), least, most),)
        elif document.tracks_evaluation:
            counts = (Count(document.child(place, node["contains"], "contains"), 0, None),)
    unique = node.get("uniqueItems", False)
    if not isinstance(unique, bool):
        raise UnsupportedSchema("uniqueItems", path, "it must be a boolean")
    fewest, most = _count(node, "minItems", path) or 0, _count(node, "maxItems", path)
    return Array(prefix, rest, fewest, most, counts, unique, evaluated).shortened()


def _object(document: Document, place: Place, node: Keywords, path: str) -> Object:
    if OBJECTS.isdisjoint(node):
        return Object()
    properties: tuple[tuple[str, Term], ...] = ()
    matched: tuple[tuple[patterns.Node, Term], ...] = ()
    if "properties" in node:
        table = document.table(place, node, "properties")
        first = node.get("propertyOrdering")
        ordered = [name for name in first if name in table] if isinstance(first, list) else []
        properties = tuple(
            (n, document.child(place, table[n], "properties", n)) for n in dict.fromkeys((*ordered, *table))
        )
    if "patternProperties" in node:
        table = document.table(place, node, "patternProperties")
        matched = tuple(
            (key_pattern(document, text, path), document.child(place, schema, "patternProperties", text))
            for text, schema in table.items()
        )
    rest = document.child(place, node.get("additionalProperties", True), "additionalProperties")
    layers: tuple[Layer, ...] = ()
    if properties or matched or "additionalProperties" in node:
        layers = (Layer(properties, matched, rest, closing="additionalProperties" in node),)
    keys: tuple[Term, ...] = ()
    if "propertyNames" in node:
        keys = (document.child(place, node["propertyNames"], "propertyNames"),)
    required = names(node["required"], "required", path) if "required" in node else ()
    fewest = _count(node, "minProperties", path) or 0
    return Object(layers, required, fewest, _count(node, "maxProperties", path), keys)
