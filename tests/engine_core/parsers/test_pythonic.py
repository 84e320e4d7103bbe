"""Calls in Python: a list that is the whole output."""

from __future__ import annotations

import pytest

from penstock.engine_core.parsers.formats import CallFormat
from penstock.engine_core.parsers.pythonic import CLOSING, LONGEST_NAME, OPENING, PythonicParser
from tests.engine_core.parsers.outputs import calls_of, content_of, parsed, parser

F = ("f", '{"a":"x"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("[f(a='x')]", "", [F]), ("\n[ f(a='x'), f(a=\"x\") ]\n", "", [F, F]), ("[f()]", "", [("f", "{}")]),
        (f"{OPENING}[f(a='x')]{CLOSING}", "", [F]), ("[get_weather(a=')')]", "", [("get_weather", '{"a":")"}')]),
        ("[f(a='x')] so", " so", [F]), ("[f(a='x'), 3]", ", 3]", [F]), ("[f(a='x')", "", [F]),
        ("[1, 2]",) * 2 + ([],), ("[nobody(a=1)]",) * 2 + ([],), ("[f(1)]",) * 2 + ([],), ("[f(a=b)]",) * 2 + ([],),
        ("so [f(a=1)]",) * 2 + ([],), ("[f(a='x'",) * 2 + ([],), (f"{OPENING}no",) * 2 + ([],), ("",) * 2 + ([],),
        ("[" + "f" * LONGEST_NAME + "(a=1)]",) * 2 + ([],), ("[a.b-c(x=1)]", "", [("a.b-c", '{"x":1}')]),
    ],
)  # fmt: skip
def test_texts(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([text], list(text)):
        pieces = parsed(parser(CallFormat.PYTHONIC), cuts)
        assert (content_of(pieces), calls_of(pieces)) == (content, calls)


def test_a_call_goes_out_when_it_is_complete() -> None:
    machine = PythonicParser(("f",))
    assert machine.push("[f(a=1") == []
    assert [piece.text for piece in machine.push("), ")] == ["f", '{"a":1}']
    assert not machine.open
