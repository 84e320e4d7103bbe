"""Every rewrite against jsonschema: schemas generated around one keyword at a time, then around all of them, and values
that hit and miss. Automaton, rewritten schema and jsonschema agree, or the schema is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.schema_instances import judge
from benchmarks.schema_judge import accepts, accepts_value
from tests.engine_core.grammar.schema.judging import made, refusal, same

Json = Any
quick = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
NAMES = ("a", "b", "c", "x-d")
KEYS = st.sampled_from(NAMES)
STRINGS = st.sampled_from(("", "a", "b", "ab", "abc", "ba", "x1", 'a"', "é", "\\", "a\nb", "A1"))
NUMBERS = st.one_of(st.integers(-4, 12), st.sampled_from((0.5, 1.5, -0.25, 2.75, 10.0)))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, STRINGS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from((*NAMES, "zz")), inner, max_size=4)
    ),
    max_leaves=6,
)
TYPES = st.sampled_from(("null", "boolean", "integer", "number", "string", "array", "object"))
PATTERNS = st.sampled_from(
    ("^a", "b$", "^[a-z]+$", "^$", '^[^"]*$', "a|b", "^(ab|x1)$", "^(?!a)", "^(?=.*b).{2}$", r"\d")
)
REST = st.one_of(st.just({}), st.just({"additionalProperties": False}))


def bag(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the keywords."""
    return st.fixed_dictionaries({}, optional=fields)


NUMERIC = bag(
    type=st.sampled_from(("integer", "number")),
    minimum=st.sampled_from((-2, 0, 0.5, 3)),
    exclusiveMinimum=st.sampled_from((-1, 0, 1.5)),
    maximum=st.sampled_from((2, 5.5, 10)),
    exclusiveMaximum=st.sampled_from((1, 7, 2.75)),
    multipleOf=st.sampled_from((1, 2, 0.5, 0.25, 3, 1.5)),
)
TEXTUAL = bag(minLength=st.integers(0, 2), maxLength=st.integers(0, 3), pattern=PATTERNS).map(
    lambda s: {"type": "string", **s}
)
LEAVES = st.one_of(
    st.just(True),
    st.just(False),
    TYPES.map(lambda t: {"type": t}),
    SCALARS.map(lambda v: {"const": v}),
    st.lists(SCALARS, min_size=1, max_size=4).map(lambda v: {"enum": v}),
    NUMERIC,
    TEXTUAL,
)
REQUIRED = st.lists(KEYS, unique=True, max_size=2)
OBJECTS = st.builds(
    lambda properties, required, rest: {"type": "object", "properties": properties, "required": required, **rest},
    st.dictionaries(KEYS, LEAVES, max_size=3),
    REQUIRED,
    REST,
)
PARTS = st.one_of(LEAVES, OBJECTS)
OBJECT_VALUES = st.dictionaries(st.sampled_from((*NAMES, "zz")), SCALARS, max_size=4)


@quick
@given(NUMERIC, st.lists(NUMBERS, min_size=4, max_size=8))
def test_numbers(schema: Json, values: list[Any]) -> None:
    same(schema, *values, "x", None)


@quick
@given(TEXTUAL, st.lists(STRINGS, min_size=4, max_size=8))
def test_strings(schema: Json, values: list[Any]) -> None:
    same(schema, *values, 3, None)


@quick
@given(NUMERIC, NUMERIC, st.lists(NUMBERS, min_size=4, max_size=8))
def test_not_over_numbers(schema: Json, wanted: Json, values: list[Any]) -> None:
    same({**wanted, "not": schema}, *values, "x", None)


@quick
@given(TEXTUAL, st.lists(STRINGS, min_size=4, max_size=10))
def test_not_over_strings(schema: Json, values: list[Any]) -> None:
    same({"type": "string", "not": schema}, *values, 3)


@quick
@given(st.lists(STRINGS, min_size=1, max_size=4), st.lists(STRINGS, min_size=4, max_size=8))
def test_not_over_values_is_exact(banned: list[str], values: list[str]) -> None:
    assert same({"type": "string", "not": {"enum": banned}}, *values, 3)


@quick
@given(st.lists(TYPES, min_size=1, max_size=3, unique=True), st.lists(VALUES, min_size=3, max_size=6))
def test_not_over_types(types: list[str], values: list[Any]) -> None:
    assume("integer" not in types or "number" in types)
    exact = same({"not": {"type": types}}, *values)
    assert exact or {"null", "boolean", "number", "string", "array", "object"} <= set(types)


@quick
@given(st.lists(KEYS, unique=True, min_size=1, max_size=2), REST, st.lists(OBJECT_VALUES, min_size=3, max_size=6))
def test_not_over_required_is_exact(names: list[str], rest: Json, values: list[Any]) -> None:
    properties: dict[str, Any] = {name: {} for name in NAMES}
    assert same({"type": "object", "properties": properties, **rest, "not": {"required": names}}, *values, [])


@quick
@given(st.lists(PARTS, min_size=1, max_size=3), st.lists(VALUES, min_size=4, max_size=8))
def test_one_of(branches: list[Json], values: list[Any]) -> None:
    same({"oneOf": branches}, *values)


@quick
@given(st.lists(st.sampled_from(("x", "y", "z", "w")), min_size=2, max_size=4, unique=True), st.data())
def test_one_of_with_a_discriminator_is_exact(kinds: list[str], data: st.DataObject) -> None:
    branches = [
        {"type": "object", "properties": {"kind": {"const": kind}, kind: {"type": "integer"}}, "required": ["kind"]}
        for kind in kinds
    ]
    value = st.fixed_dictionaries({}, optional={"kind": st.sampled_from((*kinds, "q", 1)), "x": SCALARS, "y": SCALARS})
    assert same({"oneOf": branches}, *(data.draw(value) for _ in range(5)))


@quick
@given(st.lists(PARTS, min_size=1, max_size=3), OBJECTS, st.lists(VALUES, min_size=4, max_size=8))
def test_all_of(parts: list[Json], base: Json, values: list[Any]) -> None:
    same({**base, "allOf": parts}, *values)
    same({"allOf": parts}, *values)


@quick
@given(st.lists(PARTS, min_size=1, max_size=3), PARTS, st.lists(VALUES, min_size=4, max_size=8))
def test_any_of_beside_others(parts: list[Json], base: Json, values: list[Any]) -> None:
    same({**(base if isinstance(base, dict) else {}), "anyOf": parts}, *values)


@quick
@given(PARTS, PARTS, PARTS, OBJECTS, st.lists(VALUES, min_size=4, max_size=8))
def test_if_then_else(test: Json, then: Json, other: Json, base: Json, values: list[Any]) -> None:
    same({"if": test, "then": then, "else": other}, *values)
    same({**base, "if": test, "then": then}, *values)
    same({**base, "if": test, "else": other}, *values)


@quick
@given(st.sampled_from(("p", "q")), REQUIRED, REQUIRED, st.data())
def test_if_over_a_constant_is_exact(wanted: str, then: list[str], other: list[str], data: st.DataObject) -> None:
    schema = {
        "type": "object",
        "properties": {"k": {"enum": ["p", "q", "r"]}, **{name: {"type": "integer"} for name in NAMES}},
        "required": ["k"],
        "additionalProperties": False,
        "if": {"properties": {"k": {"const": wanted}}},
        "then": {"required": then},
        "else": {"required": other},
    }
    keys = {name: st.integers(0, 3) for name in NAMES}
    value = st.fixed_dictionaries({}, optional={"k": st.sampled_from(("p", "q", "r", "s")), **keys})
    assert same(schema, *(data.draw(value) for _ in range(6)))


@quick
@given(st.dictionaries(KEYS, REQUIRED, min_size=1, max_size=2), REST, st.lists(OBJECT_VALUES, min_size=4, max_size=8))
def test_dependent_required_is_exact(table: Json, rest: Json, values: list[Any]) -> None:
    properties: dict[str, Any] = {name: {} for name in NAMES}
    assert same({"type": "object", "properties": properties, **rest, "dependentRequired": table}, *values, [])
    draft = "http://json-schema.org/draft-07/schema#"
    assert same({"$schema": draft, "properties": properties, **rest, "dependencies": table}, *values, 3)


@quick
@given(st.dictionaries(KEYS, PARTS, min_size=1, max_size=2), st.lists(OBJECT_VALUES, min_size=4, max_size=8))
def test_dependent_schemas(table: Json, values: list[Any]) -> None:
    same({"dependentSchemas": table}, *values, 3, [])


NAMING = st.one_of(
    PATTERNS.map(lambda p: {"pattern": p}),
    st.lists(st.sampled_from((*NAMES, "q")), max_size=3).map(lambda v: {"enum": v}),
    st.integers(0, 2).map(lambda n: {"maxLength": n}),
    st.integers(1, 2).map(lambda n: {"minLength": n}),
    KEYS.map(lambda k: {"not": {"const": k}}),
    st.booleans(),
)


@quick
@given(
    NAMING, st.one_of(OBJECTS, LEAVES.map(lambda s: {"additionalProperties": s})), st.lists(OBJECT_VALUES, min_size=4)
)
def test_property_names(naming: Json, base: Json, values: list[Any]) -> None:
    same({**base, "propertyNames": naming}, *values, 3)


@quick
@given(
    st.dictionaries(st.sampled_from(("^a", "c$", "^x-", ".", "^[ab]$")), LEAVES, min_size=1, max_size=2),
    st.dictionaries(KEYS, LEAVES, max_size=2),
    st.one_of(st.just({}), LEAVES.map(lambda s: {"additionalProperties": s})),
    st.lists(OBJECT_VALUES, min_size=4, max_size=8),
)
def test_pattern_properties(patterns: Json, properties: Json, rest: Json, values: list[Any]) -> None:
    same({"type": "object", "patternProperties": patterns, "properties": properties, **rest}, *values)


@quick
@given(st.integers(0, 3), st.integers(0, 4), OBJECTS, st.lists(OBJECT_VALUES, min_size=4, max_size=8))
def test_counts_of_properties(fewest: int, most: int, base: Json, values: list[Any]) -> None:
    same({**base, "minProperties": fewest}, *values)
    same({**base, "maxProperties": most}, *values)
    same({**base, "minProperties": fewest, "maxProperties": most}, *values)


@quick
@given(st.integers(0, 4), st.integers(0, 4), REQUIRED, st.lists(OBJECT_VALUES, min_size=4, max_size=8))
def test_counts_of_known_properties_are_exact(fewest: int, most: int, required: list[str], values: list[Any]) -> None:
    assume(max(fewest, len(required)) <= most)
    schema = {
        "type": "object",
        "properties": {name: {"type": ["integer", "null"]} for name in NAMES},
        "required": required,
        "minProperties": fewest,
        "maxProperties": most,
        "additionalProperties": False,
    }
    assert same(schema, *values)


VALUES_OF_SETS = st.sampled_from(("r", "g", 1, 2, None, True))
SHORT = st.lists(VALUES_OF_SETS, max_size=4)


@quick
@given(
    st.lists(VALUES_OF_SETS, min_size=1, max_size=4),
    st.integers(0, 2),
    st.integers(0, 3),
    st.lists(SHORT, min_size=4, max_size=8),
)
def test_unique_items_over_values(values: list[Any], fewest: int, most: int, instances: list[Any]) -> None:
    distinct = list({json.dumps(value): value for value in values}.values())
    assume(fewest <= min(most, len(distinct)))
    schema = {"type": "array", "items": {"enum": distinct}, "uniqueItems": True, "minItems": fewest, "maxItems": most}
    assert same(schema, *instances)


ARRAYS = bag(
    prefixItems=st.lists(LEAVES, min_size=1, max_size=2),
    items=LEAVES,
    minItems=st.integers(0, 2),
    maxItems=st.integers(0, 3),
    uniqueItems=st.booleans(),
    contains=LEAVES,
    minContains=st.integers(0, 2),
    maxContains=st.integers(0, 2),
).map(lambda s: {"type": "array", **s})


@quick
@given(ARRAYS, st.lists(st.lists(SCALARS, max_size=4), min_size=4, max_size=8))
def test_arrays(schema: Json, values: list[Any]) -> None:
    same(schema, *values, {})


@quick
@given(
    st.lists(LEAVES, min_size=1, max_size=2), LEAVES, st.lists(st.lists(SCALARS, max_size=4), min_size=4, max_size=8)
)
def test_arrays_of_draft_7(items: list[Json], rest: Json, values: list[Any]) -> None:
    draft = "http://json-schema.org/draft-07/schema#"
    same({"$schema": draft, "type": "array", "items": items, "additionalItems": rest}, *values)


@quick
@given(ARRAYS, st.lists(st.lists(SCALARS, max_size=4), min_size=4, max_size=8))
def test_not_over_arrays(schema: Json, values: list[Any]) -> None:
    same({"type": "array", "items": {"type": ["integer", "string"]}, "maxItems": 3, "not": schema}, *values)


@quick
@given(st.lists(OBJECTS, min_size=1, max_size=3), st.sampled_from(("allOf", "anyOf", "oneOf")), LEAVES, st.data())
def test_unevaluated_properties(parts: list[Json], keyword: str, rest: Json, data: st.DataObject) -> None:
    opened = [{k: v for k, v in part.items() if k != "additionalProperties"} for part in parts]
    values = data.draw(st.lists(OBJECT_VALUES, min_size=4, max_size=8))
    same({keyword: opened, "unevaluatedProperties": rest}, *values)
    same({"properties": {"a": {}}, keyword: parts, "unevaluatedProperties": False}, *values)


@quick
@given(ARRAYS, LEAVES, st.lists(st.lists(SCALARS, max_size=4), min_size=4, max_size=8))
def test_unevaluated_items(part: Json, rest: Json, values: list[Any]) -> None:
    same({"anyOf": [part, {"prefixItems": [True]}], "unevaluatedItems": rest}, *values)


ANYTHING = st.recursive(
    PARTS,
    lambda inner: st.one_of(
        st.builds(
            lambda k, v: {k: v}, st.sampled_from(("allOf", "anyOf", "oneOf")), st.lists(inner, min_size=1, max_size=3)
        ),
        inner.map(lambda s: {"not": s}),
        st.builds(lambda i, t, e: {"if": i, "then": t, "else": e}, inner, inner, inner),
        st.builds(lambda k, s: {"type": "object", "properties": {k: s}}, KEYS, inner),
        st.builds(lambda s: {"type": "array", "items": s, "maxItems": 2}, inner),
    ),
    max_leaves=6,
)


@settings(quick, max_examples=100)
@given(ANYTHING, st.lists(VALUES, min_size=4, max_size=8))
def test_keywords_inside_one_another(schema: Json, values: list[Any]) -> None:
    if isinstance(schema, dict):
        same(schema, *values)


def test_known_keys_have_one_spelling() -> None:
    """llguidance takes a known key in another spelling for an additional one."""
    out = made({"type": "object", "properties": {"a": {"type": "integer"}, "é\n": {"type": "null"}}})
    assert out.matcher is not None
    for text in ('{"a":1}', '{"a":1,"b":"x"}', '{"é\\n":null}', '{"a":1,"\\"":2}'):
        assert accepts(out.matcher, text), text
    for text in ('{"\\u0061":"x"}', '{"a":1,"\\u0061":"x"}', '{"a":1,"a":2}', '{"\\u00e9\\n":1}', '{"é\\u000a":1}'):
        assert not accepts(out.matcher, text), text


@pytest.mark.parametrize("pattern", ['^[^"]$', "^[^\\\\]$", '^[^"x]+$', r"^[^\n\"]$", r"^[^/\\:]+$"])
@pytest.mark.parametrize("text", ['"', "\\", "a", "x", "\n", "/", 'a"', "\\a"])
def test_sets_without_a_quote(pattern: str, text: str) -> None:
    """llguidance takes an escaped quote for a control character in some sets."""
    assert same({"type": "string", "pattern": pattern}, text)


def test_nullable_is_openapis() -> None:
    assert same({"type": "string", "nullable": True}, "a", None, 1)
    assert same({"type": "string", "nullable": False}, "a", None, 1)
    assert same({"nullable": True, "enum": ["a"]}, "a", None)
    assert same({"type": "string", "nullable": True, "enum": ["a"]}, "a", None)


def test_exclusive_bounds_of_draft_4() -> None:
    draft = "http://json-schema.org/draft-04/schema#"
    schema = {"$schema": draft, "type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 3}
    assert same(schema, 1, 2, 3, 4)
    assert same({**schema, "exclusiveMinimum": False}, 0, 1)


def test_formats_are_constraints_where_they_can_be() -> None:
    assert same({"type": "string", "format": "uuid"}, "3f2c7f0e-6b0a-4c58-9a59-0d8d6c9d1a11", "x", "")
    assert same({"type": "string", "format": "date"}, "2024-05-01", "2024-13-01", "x")
    dates = {"oneOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}]}
    assert same(dates, "2024-05-01", "2024-05-01T00:00:00Z", "x")
    assert same({"type": "string", "format": "phone"}, "anything")


def test_constants_of_every_type() -> None:
    values: list[Any] = [None, True, 0, 1, 1.5, -2, "x", "", [], [1, "a"], {}, {"a": [None]}, {"a": {"b": 1}}]
    for value in values:
        assert same({"const": value}, *values, 2, "y", [1], {"a": 1})
    assert same({"enum": values}, *values, 2, "y", [1])
    assert same({"enum": values, "type": ["string", "object"]}, *values, 2, "y")


def test_multiples_are_decimal() -> None:
    schema = {"type": "number", "multipleOf": 0.01, "minimum": 0}
    assert same(schema, 19.99, 0.07, 0.015, 3, 0, -1)
    assert judge(schema).is_valid(19.99)


REFUSED: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": {"type": "object"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}, "allOf": [{"contains": {"const": 2}}]},
    "minProperties": {"type": "object", "minProperties": 2},
    "pattern": {"type": "string", "pattern": r"(a)\1"},
    "patternProperties": {"type": "object", "patternProperties": {"a(?!b)": {"type": "null"}}},
    "multipleOf": {"type": "integer", "multipleOf": 1_000_003},
    "minimum": {"type": "integer", "minimum": -(10**40)},
    "maximum": {"type": "integer", "maximum": 10**40},
    "not": {"type": "number", "not": {"type": "integer"}, "minimum": 0.5},
}


@pytest.mark.parametrize("keyword", list(REFUSED))
def test_what_has_no_exact_form_is_refused_by_name(keyword: str) -> None:
    error = refusal({"type": "object", "properties": {"at": REFUSED[keyword]}})
    assert (error.keyword, error.path) == (keyword, "/properties/at")


def test_the_branches_of_one_of_are_told_apart_with_what_stands_beside_them() -> None:
    card = {"properties": {"kind": {"const": "card"}, "number": {"type": "string"}}, "required": ["number"]}
    bank = {"properties": {"kind": {"const": "bank"}, "iban": {"type": "string"}}}
    cash = {"properties": {"kind": {"enum": ["cash", "coins"]}}}
    schema = {"type": "object", "required": ["kind"], "oneOf": [card, bank, cash]}
    rewritten = made(schema).schema
    assert isinstance(rewritten, dict)
    assert len(rewritten["anyOf"]) == 3
    values = [
        {"kind": "card", "number": "1"},
        {"kind": "card"},
        {"kind": "bank"},
        {"kind": "coins"},
        {"kind": "x"},
        {},
        3,
    ]
    assert same(schema, *values)


def test_one_of_counts_branches_that_overlap_whatever_stands_beside_them() -> None:
    branches = [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 1}}}]
    schema = {"type": "object", "required": ["a"], "oneOf": branches}
    assert same(schema, {"a": 1}, {"a": 2}, {"a": 2, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 1}, {"a": 2, "b": 2}, {})
    nested = {"allOf": [{"type": "object", "required": ["k"]}, {"oneOf": branches}]}
    assert same(nested, {"k": 0, "a": 1, "b": 2}, {"a": 1, "b": 2}, {"k": 0, "a": 1, "b": 1})


@pytest.mark.parametrize("pattern", ["^(?!x-)", "^(?=[a-z]{2}$)", "^(?!x-)(?=a)[a-z-]+$"])
def test_lookahead_at_the_start_of_a_pattern_of_keys(pattern: str) -> None:
    keys = ["a", "ab", "x-a", "b-c", "", "a-", "A"]
    closed = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}
    values = [{key: value} for key in keys for value in (1, "s")]
    assert same(closed, *values)
    assert same({"type": "object", "patternProperties": {pattern: {"type": "integer"}}}, *values)


def test_gemini_writes_types_in_capitals_and_counts_as_strings() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "name": {"type": "STRING", "maxLength": "3"},
            "sizes": {"type": "ARRAY", "items": {"type": "INTEGER", "minimum": 1}, "minItems": "1", "maxItems": "2"},
            "mood": {"type": "STRING", "format": "enum", "enum": ["good", "bad"], "nullable": True},
            "note": {"type": "STRING", "nullable": True},
        },
        "required": ["name", "sizes"],
        "propertyOrdering": ["note", "sizes", "name"],
    }
    out = made(schema)
    assert isinstance(out.schema, dict)
    assert list(out.schema["properties"]) == ["note", "sizes", "name", "mood"]
    fine = {"name": "abc", "sizes": [1, 2], "mood": None, "note": None}
    assert accepts_value(out, fine)
    for wrong in ({"name": "abcd"}, {"sizes": []}, {"sizes": [1, 2, 3]}, {"sizes": [0]}, {"mood": "fine"}, {"note": 1}):
        assert not accepts_value(out, fine | wrong), wrong


def test_null_is_no_value_of_an_enum_in_other_dialects() -> None:
    assert not accepts_value(made({"type": "string", "enum": ["a"], "nullable": True}), None)


def closed(*names: str, required: tuple[str, ...] = ()) -> dict[str, Any]:
    properties = {name: {"type": "boolean"} for name in names}
    out: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**out, "required": list(required)} if required else out


RECORDS = [dict.fromkeys(keys, True) for keys in ([], "a", "b", "c", "ab", "ac", "bc", "abc", "x", "ax", "bx", "xy")]


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [closed("a", "b"), closed("a", "c")]},
        {"oneOf": [closed("a", "b", required=("a",)), closed("a", "c"), closed("x")]},
        {"oneOf": [closed("a", "b"), {"type": "object", "required": ["a"]}]},
        {"type": "object", "not": closed("a", "b")},
        {**closed("a", "b", "c"), "not": closed("a")},
        {"type": "object", "properties": {"a": {}}, "not": {"properties": {"b": {}}, "additionalProperties": False}},
        {"type": "object", "propertyNames": {"maxLength": 1}, "not": closed("a", "x")},
        {**closed("a", "b", "x"), "not": {"patternProperties": {"[ab]": {"const": False}}}},
        {**closed("a", "b", "x"), "not": {"additionalProperties": {"const": False}, "properties": {"x": {}}}},
        {"not": {"not": closed("a", "b")}, "type": "object"},
    ],
)
def test_the_negation_of_closed_objects(schema: dict[str, Any]) -> None:
    values = [*RECORDS, *(dict.fromkeys(record, "s") for record in RECORDS), {"a": False, "b": True}, {"a": False}, 3]
    assert same(schema, *values)


def test_a_key_that_must_be_unlike_the_rest_has_no_exact_form() -> None:
    schema = {"type": "object", "not": {"properties": {"a": {}}, "additionalProperties": {"type": "boolean"}}}
    assert refusal(schema).message == "not at /: of additionalProperties has no exact form"
    assert refusal({"type": "object", "not": {"patternProperties": {"^a": {"type": "null"}}}}).keyword == "not"
