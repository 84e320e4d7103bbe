"""Arrays of unique items beyond what a grammar counts: which are followed, where they stand, what tells them apart."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.grammar import automata, patterns
from penstock.engine_core.grammar.schema import compile_schema
from penstock.engine_core.grammar.schema.unique_items import texts_left
from penstock.protocol.errors import UnsupportedSchema
from tests.engine_core.grammar.schema.judging import made, refusal, same

STRING = {"type": "string"}
CLOSED = {"type": "object", "additionalProperties": False}
INT = {"type": "integer"}
WORDS = ("", "a", "b", "ab", "A", "AB", "a\nb", 'say "a"', "\\", "é", "2024-02-29", "2024-03-31", "10.0.0.1", "x@y.org")
VALUES: list[Any] = [*WORDS, 0, 1, 10, -1, 70, None, True]


def unique(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


KINDS: dict[str, Any] = {
    "any string": STRING,
    "a length": {**STRING, "minLength": 1, "maxLength": 2},
    "a pattern": {**STRING, "pattern": "^[a-zA-Z]{1,2}$"},
    "a pattern without end": {**STRING, "pattern": "^[aA]"},
    "a pattern and a length": {**STRING, "pattern": "a", "maxLength": 3},
    "other strings": {**STRING, "not": {"enum": ["a", "b"]}},
    "dates": {**STRING, "format": "date"},
    "addresses": {**STRING, "format": "ipv4"},
    "mail": {**STRING, "format": "email"},
    "many values": {"enum": [*WORDS, *(f"value {i}" for i in range(80))]},
    "integers": INT,
    "bounded integers": {**INT, "minimum": -1, "exclusiveMaximum": 71},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_as_jsonschema_has_it(kind: str) -> None:
    turns = random.Random(kind)
    lists = [turns.choices(VALUES, k=turns.randrange(5)) for _ in range(40)]
    pairs = [[value, turns.choice(VALUES), value] for value in VALUES]
    assert same(unique(KINDS[kind]), *lists, *pairs, list(WORDS))
    assert same(unique(KINDS[kind], minItems=2, maxItems=3), *lists)


def test_no_more_items_than_there_are_texts() -> None:
    schema = unique({**STRING, "pattern": "^[a-c]{0,2}$"})
    assert made(schema).schema["maxItems"] == 13  # type: ignore[index]
    assert refusal({**schema, "minItems": 14}).keyword == "schema"
    assert "maxItems" not in made(unique({**STRING, "format": "date"})).schema  # type: ignore[operator]


@pytest.mark.parametrize("items", [
    {}, {"type": "number"}, {"type": ["string", "null"]}, {"type": "object"}, {"type": "array"},
    {**STRING, "format": "duration"}, {**STRING, "format": "email", "maxLength": 9}, {**INT, "multipleOf": 3},
    {**STRING, "maxLength": 900, "pattern": "^a*$"}, {**STRING, "not": {"format": "date"}},
])  # fmt: skip
def test_other_items_are_refused(items: Any) -> None:
    error = refusal({"type": "object", "properties": {"a": unique(items)}})
    assert (error.keyword, error.path) == ("uniqueItems", "/properties/a")
    assert "lenient leaves it out" in error.message


PLACES: dict[str, Any] = {
    "the root": (unique(STRING), ["x"]),
    "a key": (
        {"type": "object", "properties": {"b": {"type": "array"}, "a": unique(STRING)}}, {"b": [1, 1], "a": ["x"]},
    ),
    "another key": ({"type": "object", "additionalProperties": unique(STRING)}, {"a": ["x"], "b": ["x"]}),
    "a key by pattern": ({**CLOSED, "patternProperties": {"^x": unique(STRING)}}, {"xb": ["x"], "xa": ["x"]}),
    "an item": ({"type": "array", "items": unique(INT)}, [[1, 2], [], [2, 1]]),
    "one of the first items": ({"type": "array", "prefixItems": [STRING, unique(INT)]}, ["x", [1], [1, 1]]),
    "null or a set": ({"anyOf": [{"type": "null"}, unique(STRING)]}, ["x"]),
    "a tree": (
        {"$defs": {"n": {"type": "object", "properties": {"tags": unique(STRING), "of": {"type": "array", "items": {
            "$ref": "#/$defs/n"}}}, "additionalProperties": False}}, "$ref": "#/$defs/n"},
        {"of": [{"of": [{"tags": ["x"]}], "tags": ["x"]}], "tags": ["x"]},
    ),
    "beside a set that a grammar counts": (
        {"type": "object", "properties": {"a": unique({"enum": [1, "x"]}), "b": unique(STRING)}},
        {"a": [1], "b": ["x"]},
    ),
}  # fmt: skip


def doubled(value: Any) -> Any:
    """The value with its last array's last item twice."""
    if isinstance(value, dict):
        last = list(value)[-1]
        return {**value, last: doubled(value[last])}
    if value and isinstance(value[-1], list):
        return [*value[:-1], doubled(value[-1])]
    return [*value, value[-1]]


@pytest.mark.parametrize("name", list(PLACES))
def test_where_they_stand(name: str) -> None:
    schema, value = PLACES[name]
    values = [value, doubled(value), [], {}, None, ["x"], [["x", "x"]], {"a": ["x", "x"]}, {"b": ["x", "x"]}]
    assert same(schema, *values)


AMBIGUOUS: dict[str, Any] = {
    "a set or a list": {"anyOf": [unique(STRING), {"type": "array", "items": INT}]},
    "by a later key": {"anyOf": [
        {"type": "object", "properties": {"a": unique(STRING), "k": {"const": 1}}, "required": ["k"]},
        {"type": "object", "properties": {"a": {"type": "array"}, "k": {"const": 2}}, "required": ["k"]},
    ]},
    "a key by pattern and any other": {"type": "object", "patternProperties": {"^x": unique(STRING)}},
    "any value": {"anyOf": [
        {"type": "object", "properties": {"a": unique(STRING)}, "required": ["a"]},
        {"type": "object", "required": ["b"]},
    ]},
}  # fmt: skip


@pytest.mark.parametrize("name", list(AMBIGUOUS))
def test_places_that_keys_do_not_tell_apart_are_refused_and_lenient_leaves_uniqueness_out(name: str) -> None:
    schema = AMBIGUOUS[name]
    with pytest.raises(UnsupportedSchema, match="do not tell this array from one in another alternative"):
        compile_schema(schema, {}, follows=True)
    found = compile_schema(schema, {}, follows=True, lenient=True)
    assert found.unique == ()
    assert found.approximations


def test_nothing_is_followed_that_needs_it_not() -> None:
    for schema in (unique(STRING, maxItems=1), unique({"enum": ["a", "b"]}), {"type": "array", "items": STRING}):
        assert compile_schema(schema, {}, follows=True).unique == ()
    schema = {"type": "object", "properties": {f"k{i}": {"type": "object"} for i in range(50)}}
    schema["properties"]["a"] = unique(STRING)
    assert len(compile_schema(schema, {}, follows=True).unique) == 2


def test_who_does_not_follow_the_output_gets_a_refusal_that_says_so() -> None:
    with pytest.raises(UnsupportedSchema, match="in a tag or a tool call"):
        compile_schema(unique(STRING), {})


@given(st.sampled_from(["^[ab]{0,3}$", "^(a|bb)*$", "^(a|b(a|b)?)$", "^a{2,4}b*$", "^(ab|a)$", "^b$|^a+$"]),
       st.text("ab", max_size=3))  # fmt: skip
def test_texts_left(pattern: str, begun: str) -> None:
    lang = automata.language(patterns.read(pattern))
    state = 0
    for char in begun:
        letter = next(i for i, ranges in enumerate(lang.letters) if any(a <= ord(char) <= b for a, b in ranges))
        state = lang.moves[state][letter]
    texts = ["".join(text) for size in range(8) for text in itertools.product("ab", repeat=size)]
    found = sum(text.startswith(begun) and bool(re.search(pattern, text)) for text in texts)
    endless = any(len(text) == 7 and text.startswith(begun) and re.search(pattern, text) for text in texts)
    assert texts_left(lang)[state] == (-1 if endless else found)
