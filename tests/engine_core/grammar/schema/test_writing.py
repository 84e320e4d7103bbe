"""What is written: plain schemas stay plain, shared and recursive ones move to $defs, arrays and objects become
alternatives (writing.py, writing_arrays.py, writing_objects.py); what reading.py and assertions.py call malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine_core.grammar.schema import writing_arrays, writing_objects
from penstock.engine_core.grammar.schema.writer import MAX_INLINE
from penstock.engine_core.grammar.schema.writing import rewrite
from penstock.engine_core.grammar.schema.writing_objects import MAX_PRESENCE
from tests.engine_core.grammar.schema.judging import made, refusal, same

CLOSED = {"additionalProperties": False}
OPEN = {"patternProperties": {writing_objects.ANY_KEY: {}}, "additionalProperties": False}
INT = {"type": "integer"}
TEXT = {"type": "string"}


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


WRITTEN: list[tuple[Any, Any]] = [
    ({}, {}),
    ({"title": "x"}, {}),
    ({"type": ["string", "null"]}, {"type": ["string", "null"]}),
    ({"type": ["number", "integer"]}, {"type": "number"}),
    ({"enum": ["a", 1, None]}, {"anyOf": [{"type": "null"}, {"enum": ["a", 1]}]}),
    ({"const": "a"}, {"enum": ["a"]}),
    ({"type": "boolean", "const": True}, {"enum": [True]}),
    ({"anyOf": [TEXT, {"type": "null"}]}, {"type": ["string", "null"]}),
    ({"oneOf": [TEXT, INT]}, {"type": ["string", "integer"]}),
    ({"allOf": [TEXT, {"minLength": 2}]}, {"type": "string", "minLength": 2}),
    ({"type": "array", "items": [TEXT, INT]}, {"type": "array", "prefixItems": [TEXT, INT]}),
    ({"type": "array", "items": TEXT, "maxItems": 0}, {"type": "array", "items": TEXT, "maxItems": 0}),
    (
        {"type": "array", "prefixItems": [TEXT], "items": False},
        {"type": "array", "prefixItems": [TEXT], "items": False},
    ),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
    ({**object_of(a=INT), **CLOSED}, {**object_of(a=INT), **CLOSED}),
    (object_of(a=INT), {**object_of(a=INT), **OPEN}),
    (object_of(a=False), {**object_of(a=False), **OPEN}),
    ({**object_of(a=False), **CLOSED}, {"type": "object", **CLOSED}),
    ({"type": "object"}, {"type": "object"}),
    ({"type": "object", "required": ["a"], **CLOSED, "properties": {"b": {}}}, None),
    ({"type": "object", "additionalProperties": INT}, {"type": "object", "additionalProperties": INT}),
    ({"type": "object", "maxProperties": 2}, {"type": "object", "maxProperties": 2}),
    ({"type": "object", "minProperties": 1}, {"type": "object", "minProperties": 1}),
    ({"type": "object", "propertyNames": {"enum": ["a"]}}, {**object_of(a={}), **CLOSED}),
    ({"type": "object", "propertyNames": False}, {"type": "object", **CLOSED}),
]


@pytest.mark.parametrize(("schema", "wanted"), WRITTEN)
def test_writing(schema: Any, wanted: Any) -> None:
    if wanted is None:
        assert "no value" in refusal(schema).message
    else:
        assert rewrite(schema).schema == wanted


def test_the_order_of_keys_is_the_schemas() -> None:
    schema = {
        "allOf": [{"$ref": "#/$defs/base"}],
        "properties": {"z": TEXT, "a": TEXT},
        "required": ["late", "z"],
        "anyOf": [{"properties": {"m": INT}}],
        "$defs": {"base": {"type": "object", "properties": {"first": TEXT, "a": TEXT}}},
    }
    written = rewrite({**schema, "type": "object"}).schema
    assert isinstance(written, dict)
    assert list(written["properties"]) == ["first", "a", "z", "m", "late"]  # type: ignore[call-overload]


def test_shared_schemas_are_written_once() -> None:
    address = object_of(street=TEXT, city=TEXT)
    schema = {"$defs": {"Address": address}, **object_of(a={"$ref": "#/$defs/Address"}, b={"$ref": "#/$defs/Address"})}
    written = rewrite(schema).schema
    assert isinstance(written, dict)
    assert json.dumps(written).count("street") == 2  # inline where it is met first, and in $defs
    assert same(schema, {"a": {"street": "x"}, "b": {"city": "y"}}, {"a": {"street": 1}}, {"b": {"city": 1}})


def test_definitions_of_one_name_are_told_apart() -> None:
    inner = {"$ref": "#/$defs/a/$defs/a"}
    nested = {"type": "array", "items": inner, "$defs": {"a": {"type": "array", "items": {"anyOf": [inner, INT]}}}}
    assert same({"$defs": {"a": nested}, "$ref": "#/$defs/a"}, [], [[]], [[1]], [[[1]]], [1], [["x"]])


def test_deep_schemas_move_to_definitions() -> None:
    schema: dict[str, Any] = {"const": "end"}
    value: Any = "end"
    for _ in range(MAX_INLINE * 4):
        schema = {**object_of(a=schema), "required": ["a"], **CLOSED}
        value = {"a": value}
    out = made(schema)
    assert "$defs" in out.schema  # type: ignore[operator]
    assert same(schema, value, {"a": 1}, value["a"])


ARRAYS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "contains what all items are": (
        {"type": "array", "items": {**INT, "minimum": 0}, "contains": INT, "minContains": 2, "maxContains": 3},
        ([], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, "x"]),
    ),
    "contains what no item is": (
        {"type": "array", "items": INT, "contains": TEXT, "minContains": 0, "maxContains": 1},
        ([], [1]),
    ),
    "contains in a short array": (
        {"type": "array", "maxItems": 3, "contains": {"const": 1}, "minContains": 2},
        ([1], [1, 1], [1, 2, 1], [2, 1, 1], [2, 1, 2], [1, 1, 1, 1]),
    ),
    "contains at most": (
        {"type": "array", "maxItems": 3, "contains": {"const": 1}, "maxContains": 1, "minContains": 0},
        ([], [1], [1, 1], [2, 1, 2], [1, 2, 1], [2, 3]),
    ),
    "contains exactly": (
        {"type": "array", "maxItems": 2, "contains": TEXT, "minContains": 1, "maxContains": 1},
        ([], ["a"], ["a", "b"], ["a", 1], [1, "a"], [1]),
    ),
    "contains none of": ({"type": "array", "not": {"contains": {"const": 1}}}, ([], [2], [2, 1], [1])),
    "contains in a tuple": (
        {"type": "array", "prefixItems": [TEXT, {}], "items": INT, "minItems": 1, "contains": TEXT},
        (["a"], ["a", 1], [1], ["a", "b", 1]),
    ),
    "unique booleans": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        ([], [True], [True, False], [True, True], [False, True, False]),
    ),
    "unique integers": (
        {"type": "array", "items": {**INT, "minimum": 1, "maximum": 3}, "uniqueItems": True},
        ([], [1, 2, 3], [1, 1], [3, 1]),
    ),
    "unique by type": (
        {"type": "array", "prefixItems": [TEXT, INT, {"type": "null"}], "items": False, "uniqueItems": True},
        (["a", 1, None], ["a"], [1], ["a", 1, None, 2]),
    ),
    "an item that can never be": ({"type": "array", "prefixItems": [INT, False, TEXT]}, ([], [1], [1, 2])),
}


@pytest.mark.parametrize("name", list(ARRAYS))
def test_arrays(name: str) -> None:
    schema, values = ARRAYS[name]
    assert same(schema, *values)


OBJECTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "one of many keys": (
        {**object_of(a=INT, b=INT, c=INT), "minProperties": 1},
        ({}, {"a": 1}, {"c": 1}, {"q": 1}, {"a": 1, "q": 2}, {"a": "x"}),
    ),
    "two of three": (
        {**object_of(a={}, b={}, c={}), "minProperties": 2, **CLOSED},
        ({"a": 1}, {"a": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}, {}),
    ),
    "at most one of three": (
        {**object_of(a={}, b={}, c={}), "maxProperties": 1, **CLOSED},
        ({}, {"a": 1}, {"b": 1, "c": 2}),
    ),
    "at most two beside others": (
        {**object_of(a=INT, b=INT), "maxProperties": 2},
        ({}, {"a": 1, "b": 2}, {"a": 1, "q": 2}, {"q": 1, "r": 2}, {"a": 1, "b": 2, "q": 3}, {"q": 1, "r": 1, "s": 1}),
    ),
    "none at all": ({"type": "object", "maxProperties": 0}, ({}, {"a": 1})),
    "required beyond the limit": (
        {"anyOf": [INT, {"type": "object", "required": ["a", "b"], "maxProperties": 1}]},
        (1, {}, {"a": 1}),
    ),
    "patterns and others": (
        {**object_of(a=INT), "patternProperties": {"^x-": TEXT}, "additionalProperties": {"type": "null"}},
        ({"a": 1}, {"x-1": "s"}, {"x-1": None}, {"q": None}, {"q": 1}, {"a": 1, "x-y": "s", "q": None}),
    ),
    "patterns that overlap": (
        {"type": "object", "patternProperties": {"^a": {"minimum": 1}, "b$": {"maximum": 5}}, **CLOSED},
        ({"a": 0}, {"a": 9}, {"b": 9}, {"ab": 3}, {"ab": 9}, {"ab": 0}, {"q": 1}),
    ),
    "a known key under a pattern": (
        {**object_of(ab={"minimum": 2}), "patternProperties": {"^a": INT}},
        ({"ab": 1}, {"ab": 2}, {"ab": 2.5}, {"ac": 1}, {"ac": "x"}, {"b": "x"}),
    ),
    "many patterns apart": (
        {"type": "object", "patternProperties": {f"^{c}_": {"const": c} for c in "abcdefgh"}, **CLOSED},
        ({"a_1": "a"}, {"a_1": "b"}, {"h_": "h", "c_": "c"}, {"q": 1}),
    ),
    "names by length and pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 3}, "additionalProperties": INT},
        ({"abc": 1}, {"abcd": 1}, {"A": 1}, {"a": "x"}, {}),
    ),
    "names of known keys": (
        {**object_of(long=INT, b=INT), "propertyNames": {"maxLength": 2}},
        ({"long": 1}, {"b": 1}, {"qq": 1}, {"qqq": 1}),
    ),
    "exactly one of two": (
        {**object_of(a=INT, b=INT), "oneOf": [{"required": ["a"]}, {"required": ["b"]}], **CLOSED},
        ({}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}),
    ),
    "inheritance": (
        {"allOf": [object_of(a=INT), {**object_of(b=INT), "required": ["b"]}], "unevaluatedProperties": False},
        ({"b": 1}, {"a": 1, "b": 2}, {"b": 1, "c": 1}, {"a": 1}),
    ),
}


@pytest.mark.parametrize("name", list(OBJECTS))
def test_objects(name: str) -> None:
    schema, values = OBJECTS[name]
    assert same(schema, *values)


def test_too_many_ways_are_refused() -> None:
    many = {**object_of(**{f"k{i}": {} for i in range(30)}), **CLOSED}
    assert refusal({**many, "minProperties": 10}).keyword == "minProperties"
    assert refusal({**many, "maxProperties": 10}).keyword == "maxProperties"
    wide = {**object_of(**{f"k{i}": {} for i in range(MAX_PRESENCE + 1)}), "minProperties": 1}
    assert refusal(wide).keyword == "minProperties"


MALFORMED: list[tuple[Any, str]] = [
    ({"type": "any"}, "type"),
    ({"type": 3}, "type"),
    ({"enum": "a"}, "enum"),
    ({"required": "a"}, "required"),
    ({"required": True}, "required"),
    ({"required": [1]}, "required"),
    ({"properties": []}, "properties"),
    ({"properties": {"a": 3}}, "a"),
    ({"patternProperties": {"(": {}}}, "patternProperties"),
    ({"pattern": "["}, "pattern"),
    ({"pattern": 3}, "pattern"),
    ({"minLength": -1}, "minLength"),
    ({"minLength": 1.5}, "minLength"),
    ({"maxItems": "three"}, "maxItems"),
    ({"minimum": "0x3"}, "minimum"),
    ({"minimum": float("nan")}, "minimum"),
    ({"multipleOf": 0}, "multipleOf"),
    ({"uniqueItems": "yes"}, "uniqueItems"),
    ({"allOf": []}, "allOf"),
    ({"anyOf": {}}, "anyOf"),
    ({"oneOf": [3]}, "0"),
    ({"not": "x"}, "not"),
    ({"dependencies": {"a": "b"}}, "a"),
    ({"dependentRequired": {"a": [1]}}, "dependentRequired"),
    ({"dependentRequired": []}, "dependentRequired"),
    ({"if": 3, "then": {}}, "if"),
]


@pytest.mark.parametrize(("schema", "keyword"), MALFORMED)
def test_malformed_schemas_are_refused_by_keyword(schema: Any, keyword: str) -> None:
    error = refusal({"properties": {"at": schema}})
    assert error.keyword == keyword
    assert error.path.startswith("/properties/at")


def test_values_are_listed_only_where_they_can_be() -> None:
    from penstock.engine_core.grammar.schema.algebra import Algebra
    from penstock.engine_core.grammar.schema.cells import Place
    from penstock.engine_core.grammar.schema.document import Document
    from penstock.engine_core.grammar.schema.reading import Reader
    from penstock.engine_core.grammar.schema.writer import Writer

    for schema, count in (
        ({"enum": ["a", 1, None]}, 3),
        ({"type": "boolean"}, 2),
        (INT, None),
        ({**INT, "minimum": 1, "maximum": 4}, 4),
    ):
        document = Document(schema)
        algebra = Algebra(Reader(document), document.path)
        writer = Writer(document, algebra, False, writing_arrays.write, writing_objects.write)
        values = writing_arrays.values_of(writer, Place(document.root))
        assert (None if values is None else len(values)) == count
