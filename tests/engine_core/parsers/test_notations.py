"""Notations of their own as JSON. Whole outputs stand in test_formats.py."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.parsers.notations import notation, read_lines, read_quoted
from tests.engine_core.parsers.outputs import ARGUMENTS, CALLS, Call, lines, noted

QUOTE = '<|"|>'


@settings(max_examples=100, deadline=None)
@given(arguments=ARGUMENTS)
def test_what_was_written_comes_back(arguments: dict[str, object]) -> None:
    body = noted("", "", QUOTE)([("f", arguments)])
    ((name, found),) = read_quoted(body, {}, notation(QUOTE)) or [("", "")]
    assert (name, json.loads(found)) == ("f", arguments)


@pytest.mark.parametrize(
    "body",
    ["", "f{}", "call:f", "call:{}", "call:f{a}", "call:f{a:b}", "call:f{a:1 2}", "call:f{a:1,}", "call:f{}}",
     "call:f[]",     "call:f{a:True}", f"call:f{{a:{QUOTE}x}}", "call:f{a:" + "[" * 3000 + "}"],
)  # fmt: skip
def test_what_is_no_call(body: str) -> None:
    assert read_quoted(body, {}, notation(QUOTE)) is None


@settings(max_examples=100, deadline=None)
@given(calls=CALLS)
def test_calls_in_lines(calls: list[Call]) -> None:
    body = lines(calls).removeprefix("<function_calls>").removesuffix("</function_calls>")
    assert [(name, json.loads(arguments)) for name, arguments in read_lines(body, {}) or ()] == calls


@pytest.mark.parametrize("body", ["", "\n", "f", "f(", "f(a)", "f(a=b)", "f() g", "f())", "1()", "f(a=1, a=2)"])
def test_what_is_no_line_of_calls(body: str) -> None:
    assert read_lines(body, {}) is None


@given(size=st.integers(1020, 1030))
@settings(max_examples=11, deadline=None)
def test_a_call_longer_than_what_is_looked_at_at_once(size: int) -> None:
    long = json.dumps({"a": "x" * size}, separators=(",", ":"))
    assert read_lines(f"f(a='{'x' * size}')g()", {}) == [("f", long), ("g", "{}")]
