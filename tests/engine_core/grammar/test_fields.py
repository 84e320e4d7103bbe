"""Fields that nobody has read say the same as those that somebody has, and what is wrong with them."""

from __future__ import annotations

import json

import pytest

from penstock.engine_core.grammar.answers import format_of
from penstock.engine_core.grammar.fields import read_json, text_of
from penstock.engine_core.grammar.sources import source_of
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar
from tests.engine_core.grammar.vocabulary import tokens

TAG = {"format": {"type": "const_string", "value": "v"}}


def unread(kind: str, value: object) -> Grammar:
    return Grammar(kind=kind, unread=json.dumps(value).encode(), param="field")


@pytest.mark.parametrize(
    ("kind", "value", "source"),
    [
        ("regex", 'a"\\d', 'a"\\d'), ("grammar", 'root ::= "é"', 'root ::= "é"'), ("choice", ["a", "b"], None),
        ("json_schema", {"enum": [1, "é"]}, None), ("structural_tag", TAG, None), ("json_schema", True, None),
        ("json_schema", '{"enum": [1]}', '{"enum": [1]}'), ("structural_tag", json.dumps(TAG), json.dumps(TAG)),
    ],
)  # fmt: skip
def test_the_source_is_that_of_a_field_that_was_read(kind: str, value: object, source: str | None) -> None:
    grammar = unread(kind, value)
    text = json.dumps(value) if source is None else source
    assert text_of(grammar) == text
    read = Grammar(kind=kind, source=text, param="field")
    assert source_of(grammar, tokens()) == source_of(read, tokens())
    assert format_of(grammar) == format_of(read)


@pytest.mark.parametrize(
    ("kind", "text", "told", "code"),
    [
        ("regex", b"[1]", "expected `str`, got `array`", "invalid_type"),
        ("grammar", b'{"a": 1}', "expected `str`, got `object`", "invalid_type"),
        ("regex", b"1.5", "expected `str`, got `float`", "invalid_type"),
        ("regex", b"true", "expected `str`, got `bool`", "invalid_type"),
        ("regex", b'"\xff"', "not JSON", "invalid_json"),
        ("json_schema", b"{\xff}", "not JSON", "invalid_json"),
        ("choice", b'"a"', "not JSON", "invalid_json"),
        ("json_schema", b'{"a": }', "not JSON", "invalid_json"),
        ("choice", b"[1]", "choices are a list of strings", "invalid_grammar"),
        ("regex", b"[" * 100_000, "nested too deep", "invalid_grammar"),
    ],
)
def test_what_holds_no_source(kind: str, text: bytes, told: str, code: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        source_of(Grammar(kind=kind, unread=text, param="field"), tokens())
    assert caught.value.code == code


def test_a_format_of_it_names_the_field() -> None:
    with pytest.raises(InvalidRequest, match="field: expected `str`") as caught:
        format_of(unread("regex", [1]))
    assert (caught.value.param, caught.value.code) == ("field", "invalid_type")


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "{", '{"a" 1}', ""])
def test_no_json(text: str) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        read_json(text)
