"""Python's literals as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from penstock.engine_core.parsers.values import as_json, keywords_json
from tests.engine_core.parsers.outputs import ARGUMENTS, VALUES, keywords


@given(VALUES)
def test_what_python_prints_is_read(value: object) -> None:
    found = as_json(repr(value))
    assert found is not None
    assert json.loads(found) == value


@given(ARGUMENTS)
def test_keywords(arguments: dict[str, object]) -> None:
    found = keywords_json(keywords(arguments))
    assert found is not None
    assert json.loads(found) == arguments


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it\\'s'", "it's"), ('"\\x41\\u00e9\\U0001F600\\q"', "Aé😀\\q"), ("(1, 2,)", [1, 2]), ("[1,]", [1]),
        ("true", True), ("null", None), ("1.", 1.0), ("-2e3", -2000.0),
        ('"\\ud800"', "\ufffd"), ("{'a': (1,)}", {"a": [1]}),
        ('"\\ud83d\\ude00"', "😀"), ('"é\\ud83dx\\ude00"', "é\ufffdx\ufffd"),
        ("(1)", 1), ("((1,))", [1]), ("((1), ('a'))", [1, "a"]), ("()", []), ("[((1, 2)), ({})]", [[1, 2], {}]),
        (".5", 0.5), ("-.5e1", -5.0), ("3.e2", 300.0), ("1.5e-3", 0.0015),
    ],
)  # fmt: skip
def test_forms(literal: str, value: object) -> None:
    found = as_json(literal)
    assert found is not None
    assert json.loads(found) == value


@pytest.mark.parametrize(
    "literal",
    [
        "", "x", "f(1)", "1 + 2", "[1", "{1, 2}", "'a' 'b'", "b'x'", "1_000", "[,]", "nan", ",", ",]", "1 2", "1 .5",
        "(1)(2)", "(1", "(1]", "[1)", "[1,)", "(1,]", "(,)", "(1,,)", "{,}", "]", "(1))", "(1 2)",
    ],
)  # fmt: skip
def test_what_is_no_literal(literal: str) -> None:
    assert as_json(literal) is None


@pytest.mark.parametrize("text", ["1", "a", "a=", "a=1, a=2", "a=1 b=2", "a=x", "*a", "a=1,, b=2", "a=$"])
def test_what_are_no_keywords(text: str) -> None:
    assert keywords_json(text) is None


def test_none_and_a_trailing_comma() -> None:
    assert keywords_json("") == "{}"
    assert keywords_json(" a = 1, ") == '{"a":1}'
