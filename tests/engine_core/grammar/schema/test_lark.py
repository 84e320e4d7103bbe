"""Schemas with a form in Lark alone: the grammar against jsonschema, below objects, arrays, unions, references."""

from __future__ import annotations

import itertools
import json
from typing import Any

import llguidance
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.schema_instances import judge
from benchmarks.schema_judge import LIMITS, accepts, accepts_value
from penstock.engine_core.grammar.schema import lark
from penstock.engine_core.grammar.schema.writing import rewrite
from penstock.engine_core.grammar.sources import SchemaForm, schema_source
from penstock.protocol.errors import UnsupportedSchema
from tests.engine_core.grammar.schema.judging import made, refusal, same, tokenizer

Json = Any
quick = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
INT = {"type": "integer"}
SET: Json = {"type": "array", "items": {"enum": ["x", "xy", 1, 12]}, "uniqueItems": True}
SETS: list[Any] = [[], ["x"], ["x", "xy"], ["x", "x"], [1, 12], [12, 1, 12], [1, "x", 12, "xy"], ["z"], None, [[]]]
ATOMS = (1, 2, "x", None)
LISTS = [list(chosen) for size in range(5) for chosen in itertools.product(ATOMS, repeat=size)]
HOLES: list[Json] = [
    SET,
    {**SET, "minItems": 1, "maxItems": 2},
    {"type": "array", "contains": {"const": 1}, "minContains": 1},
    {"type": "array", "items": {"type": ["integer", "null"]}, "contains": INT, "maxContains": 1},
    {"type": "integer", "maximum": 2**64},
    {"not": INT},
]
HOLE_VALUES = [*SETS, 3, 2**64, 2**64 + 1, 0.5, [2, None], [1, None, None], [1, 1], {}]


def test_what_llguidance_holds_needs_no_lark() -> None:
    found = rewrite({"type": "object", "properties": {"a": {"type": "array", "items": INT}}}).schema
    assert isinstance(found, dict)
    assert lark.grammar(found, {}) is None


@pytest.mark.parametrize("fewest", [0, 1, 2])
@pytest.mark.parametrize("most", [None, 1, 3])
def test_unique_items(fewest: int, most: int | None) -> None:
    schema = {"type": "array", "items": {"enum": list(ATOMS)}, "uniqueItems": True, "minItems": fewest}
    limited = schema if most is None else {**schema, "maxItems": most}
    if most is None or fewest <= most:
        assert same(limited, *LISTS)


def test_unique_items_of_64_values() -> None:
    values = list(range(1, 65))
    schema = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 64}, "uniqueItems": True}
    assert same({**schema, "minItems": 64}, values, values[::-1], values[1:], [*values, 64])
    assert same(schema, values, values[::-1], [*values, 64], [*values[1:], 64], [64, 1, 64], [65], [0], [])
    assert refusal({**schema, "items": {"enum": [*values, "65"]}}).keyword == "uniqueItems"


def test_unique_items_whose_long_list_of_values_stands_in_two_places() -> None:
    listed = {"enum": [f"a value with a rather long name, number {at}" for at in range(8)]}
    values = listed["enum"]
    schema = {"anyOf": [listed, {"type": "array", "items": listed, "uniqueItems": True}]}
    assert same(schema, values[0], "x", [], values, values[:2], [values[0], values[0]])


def test_several_long_patterns_of_keys() -> None:
    patterns = {"[0-9a-f]{32}": INT, "^(?=.*-)[a-z-]{3,20}$": {"type": "string"}}
    schema = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    name = "0123456789abcdef" * 2
    values = [{}, {name: 1}, {name: "x"}, {"a-b": "x"}, {"a-b": 1}, {name: 1, "a-b": "x"}, {"abc": "x"}, {name[1:]: 1}]
    assert same(schema, *values)


def test_one_unnamed_key_at_most() -> None:
    schema = {"type": "object", "additionalProperties": SET, "maxProperties": 1}
    assert same(schema, {}, {"a": []}, {"a": ["x", "x"]}, {"a": [1], "b": []})


def test_an_alternative_that_only_its_written_form_shows_to_be_empty() -> None:
    one = {"type": "array", "contains": {"type": "number", "multipleOf": 11, "minimum": 100}}
    two = {"type": "array", "items": {"type": "number", "multipleOf": 4}}
    a, b = {"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}
    branches = [{"allOf": [{"items": a}, {"contains": b}]}, {"allOf": [{"items": b}, {"contains": a}]}]
    schema = {"type": "array", "oneOf": branches, "$defs": {"one": one, "two": two}}
    out = made(json.loads(json.dumps(schema)), lenient=True)  # without one object in two places
    assert accepts_value(out, [[110, 4], [132]])


def test_a_set_that_asks_for_more_values_than_there_are_is_empty() -> None:
    assert not same({**SET, "minItems": 5}, [])


def test_nothing_follows_the_last_value_of_a_set() -> None:
    out = made({**SET, "maxItems": 2})
    assert out.matcher is not None
    assert out.matcher.deep_copy().try_consume_tokens(list(b'["x",1,')) == len(b'["x",1')


COUNTS = [
    *({}, {"minContains": 2}, {"minContains": 0, "maxContains": 1}, {"minContains": 1, "maxContains": 2}),
    *({"minItems": 3}, {"minItems": 3, "maxContains": 1}, {"minContains": 2, "maxContains": 2, "minItems": 1}),
    *({"minItems": 2, "maxContains": 3, "maxItems": 40}, {"minContains": 2, "maxItems": 30}, {"minContains": 3}),
]


@pytest.mark.parametrize("bounds", COUNTS, ids=str)
def test_contains_in_an_array_of_any_length(bounds: Json) -> None:
    assert same({"type": "array", "contains": {"type": "integer"}, **bounds}, *LISTS)


def test_contains_is_counted_to_a_bound() -> None:
    assert same({"type": "array", "contains": INT, "minContains": 30}, [1] * 30, [1] * 29, [None, *[1] * 31])
    assert refusal({"type": "array", "contains": INT, "minContains": 2000}).keyword == "contains"


@quick
@given(st.dictionaries(st.sampled_from(("a", "b", "c")), st.sampled_from([*HOLES, INT, True]), min_size=1),
       st.lists(st.sampled_from(("a", "b", "c")), unique=True, max_size=3),
       st.sampled_from(({}, {"additionalProperties": False}, {"additionalProperties": SET},
                        {"patternProperties": {"^d": SET}}, {"patternProperties": {"^d": INT, "^e": SET},
                                                            "additionalProperties": False})),
       st.lists(st.dictionaries(st.sampled_from(("a", "b", "c", "d", "e1")), st.sampled_from(HOLE_VALUES), max_size=4),
                min_size=8, max_size=8))  # fmt: skip
def test_objects(properties: Json, required: list[str], rest: Json, values: list[Any]) -> None:
    required = [name for name in required if name in properties]
    assert same({"type": "object", "properties": properties, "required": required, **rest}, *values)


@quick
@given(st.lists(st.sampled_from([*HOLES, INT]), max_size=3), st.sampled_from([*HOLES, INT, False, True]),
       st.integers(0, 3), st.one_of(st.none(), st.integers(0, 5)),
       st.lists(st.lists(st.sampled_from(HOLE_VALUES), max_size=5), min_size=8, max_size=8))  # fmt: skip
def test_arrays(prefix: list[Json], items: Json, fewest: int, most: int | None, values: list[Any]) -> None:
    schema = {"type": "array", "items": items, "minItems": fewest}
    if prefix:
        schema["prefixItems"] = prefix
    if most is not None:
        schema["maxItems"] = most
    if (most is None or fewest <= most) and (items is not False or fewest <= len(prefix)):
        assert same(schema, *values)


@quick
@given(st.lists(st.sampled_from([*HOLES, INT, {"type": "null"}, {"type": "string"}]), min_size=1, max_size=3))
def test_alternatives(branches: list[Json]) -> None:
    assert same({"anyOf": branches}, *HOLE_VALUES)


def test_definitions_that_refer_to_themselves() -> None:
    node = {
        "type": "object",
        "properties": {"tags": SET, "next": {"$ref": "#/$defs/node"}, "plain": {"$ref": "#/$defs/plain"}},
        "additionalProperties": False,
    }
    plain = {"type": "array", "items": {"$ref": "#/$defs/plain"}}
    schema = {"$defs": {"node": node, "plain": plain}, "$ref": "#/$defs/node"}
    inner: list[Any] = [{}, {"tags": ["x"]}, {"tags": ["x", "x"]}, {"plain": [[], [[]]]}, {"plain": [1]}]
    assert same(schema, *inner, *({"next": value} for value in inner), {"next": {"next": {"tags": [1, 1]}}})


def test_a_long_chain_of_definitions() -> None:
    links: Json = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}, "maxItems": 1} for i in range(1200)
    }
    form = SchemaForm("none", lenient=False).form({"$defs": {**links, "d1200": SET}, "$ref": "#/$defs/d0"})
    assert "lark_grammar" in form


def test_counted_keys_beside_a_set() -> None:
    schema = {"type": "object", "properties": {"a": SET}, "required": ["a"], "additionalProperties": SET}
    values: list[Any] = [{"a": []}, {"a": [], "b": []}, {"a": [], "b": [], "c": []}, {"b": [], "c": []}]
    assert same({**schema, "minProperties": 2}, *values)
    assert same({**schema, "maxProperties": 1}, *values)


WHITE = '{ "a" : [ "x" , 1 ] , "b" : { "c" : [ 2 ] } }'
TIGHT = '{"a":["x",1],"b":{"c":[2]}}'


@pytest.mark.parametrize(("whitespace", "right", "wrong"), [
    ("none", [TIGHT], [WHITE, '{"a": []}', '{"a":["x", 1]}']),
    ("bounded", [TIGHT, WHITE, '{\n  "a": [\n    "x"\n  ]\n}', "{ }", '{"a":[ ]}'],
     ['{"a":  []}', '{"a":[  ]}', "{  }"]),
    (r"[ \t]*", [TIGHT, WHITE, '{"a":\t  [ "x"\t]  }'], ['{"a":\n[]}']),
])  # fmt: skip
def test_whitespace_is_that_of_the_request(whitespace: str, right: list[str], wrong: list[str]) -> None:
    source = schema_source(SchemaForm(whitespace, lenient=False), {"type": "object", "properties": {"a": SET, "b": {}}})
    matcher = llguidance.LLMatcher(tokenizer(), source, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    assert [text for text in right if not accepts(matcher, text)] == []
    assert [text for text in (*wrong, f" {TIGHT}", f"{TIGHT} ") if accepts(matcher, text)] == []


def test_a_known_key_has_no_second_spelling() -> None:
    out = made({"type": "object", "properties": {"a": SET, 'q"\n': INT}})
    assert out.matcher is not None
    assert accepts(out.matcher, '{"a":["x"],"b":1}')
    assert accepts(out.matcher, '{"q\\"\\n":3}')
    assert not accepts(out.matcher, '{"\\u0061":3}')
    assert not accepts(out.matcher, '{"a":["x"],"a":3}')
    assert not accepts(out.matcher, '{"q\\"\\n":"x"}')


def test_lenient_leaves_out_what_has_no_form_beside_it() -> None:
    schema = {"type": "object", "properties": {"a": SET, "b": INT}, "required": ["a"], "minProperties": 2,
              "additionalProperties": {"type": "null"}}  # fmt: skip
    found = SchemaForm("none", lenient=True)
    form = found.form(schema)
    text = json.dumps({"grammars": [{"name": "g", **form}]})
    matcher = llguidance.LLMatcher(tokenizer(), text, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    for value in ('{"a":["x"],"b":1}', '{"a":["x"],"c":null}'):
        assert accepts(matcher, value)


def test_what_would_be_copied_too_often_is_a_refusal_and_lenient_leaves_the_set_out() -> None:
    large = {"type": "object", "properties": {f"property{i}": {"$ref": "#/$defs/large"} for i in range(200)}}
    users = {f"u{i}": {"type": "array", "items": {"$ref": "#/$defs/large"}, "maxItems": i + 1} for i in range(40)}
    schema = {"$defs": {"large": large}, "type": "object", "properties": {"a": SET, **users}}
    with pytest.raises(UnsupportedSchema, match="beside rules in Lark"):
        SchemaForm("none", lenient=False).form(schema)
    found = SchemaForm("none", lenient=True)
    assert "json_schema" in found.form(schema)
    assert any(note.startswith("uniqueItems") for note in found.approximations)


@pytest.mark.parametrize("schema", [
    {"type": "array", "items": {**INT, "minimum": 0}, "contains": {"multipleOf": 3}, "maxContains": 1},
    {**SET, "contains": {"const": 1}},
    {**SET, "items": {}},
    {"type": "array", "contains": {"const": 1}, "allOf": [{"contains": {"const": 2}}]},
])  # fmt: skip
def test_lenient_is_never_narrower(schema: Json) -> None:
    refusal(schema)
    out = made(schema, lenient=True)
    assert out.approximations
    validator = judge(schema)
    for value in (*LISTS, [3, 1], [1, 4, 6, 5], [1, "x", 12]):
        assert accepts_value(out, value) or not validator.is_valid(value), value
