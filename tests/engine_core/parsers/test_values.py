"""What a schema makes of an argument's text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.parsers.values import ANY, kind_of, kinds_of, other_than_text, parameter_kinds, value_of
from tests.engine_core.parsers.outputs import VALUES, plain


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}), ({"type": ["integer", "null"]}, {"integer", "null"}), ({}, ANY), (True, ANY),
        ({"enum": ["a", 1, None, True, 1.5, [], {}]},
         {"string", "integer", "null", "boolean", "number", "array", "object"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}), ({"type": 5}, ANY),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/x"}]}, ANY), ({"$ref": "#/x"}, ANY), ({"anyOf": []}, ANY),
    ],
)  # fmt: skip
def test_kinds_of_a_schema(schema: object, kinds: set[str]) -> None:
    assert kinds_of(schema) == kinds


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", {"string"}, "5"), ("5", {"integer"}, 5), ("5", ANY, 5), ("5", {"number"}, 5),
        ("5", {"string", "null"}, "5"),
        ("5", {"string", "integer"}, 5), ("null", {"string", "null"}, None), ("null", {"string"}, "null"),
        ("True", {"boolean"}, True), ("true", {"boolean"}, True), ("None", {"null", "string"}, None),
        ("{'a': 1}", {"object"}, {"a": 1}), ('{"a": 1}', {"string"}, '{"a": 1}'), (" [1, 2] ", {"array"}, [1, 2]),
        ("Rome", {"integer"}, "Rome"), ("Rome", ANY, "Rome"), ('"Rome"', {"string"}, '"Rome"'), ("", ANY, ""),
        ("5.5", {"integer"}, 5.5), ("a\nb", {"string"}, "a\nb"), ("9" * 40, {"integer"}, int("9" * 40)),
    ],
)  # fmt: skip
def test_values(text: str, kinds: set[str], value: object) -> None:
    found = json.loads(value_of(text, frozenset(kinds)))
    assert found == value
    assert type(found) is type(value)


@settings(max_examples=200, deadline=None)
@given(value=VALUES)
def test_whatever_was_written_comes_back_where_its_kind_is_known(value: object) -> None:
    assert json.loads(value_of(plain(value), frozenset((kind_of(value),)))) == value


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20))
def test_any_text_is_some_value(text: str) -> None:
    for kinds in (ANY, frozenset(("integer",)), frozenset(("string", "object"))):
        json.loads(value_of(text, kinds))
    assert json.loads(value_of(text, frozenset(("string",)))) == text
    assert other_than_text("'" + "a" + "'") is None


def test_kinds_of_tools() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}},
             {"type": "function", "function": {"name": "g"}},
             {"type": "function", "function": {"name": "h", "parameters": True}}]  # fmt: skip
    assert parameter_kinds(tools) == {"f": {"a": frozenset(("string",)), "b": ANY}, "g": {}, "h": {}}
