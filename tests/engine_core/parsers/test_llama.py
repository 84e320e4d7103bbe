"""Llama's calls: JSON at the beginning that names a function, or behind the marker."""

from __future__ import annotations

import pytest

from penstock.engine_core.parsers.formats import CallFormat
from penstock.engine_core.parsers.llama import MARKER, LlamaParser
from tests.engine_core.parsers.outputs import calls_of, content_of, parsed, parser

CALL = '{"name": "f", "parameters": {"a": 1}}'
F = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [F]), (f"\n{CALL}\n", "", [F]), (f"{CALL}; {CALL}", "", [F, F]), (f"{CALL}\n{CALL}", "", [F, F]),
        (MARKER + CALL, "", [F]), (f"Look: {MARKER}{CALL}", "Look:", [F]), (f"{CALL} and so", " and so", [F]),
        (f"Look: {CALL}", f"Look: {CALL}", []), ('{"name": "nobody", "parameters": {}}',) * 2 + ([],),
        ('{"answer": 5}', '{"answer": 5}', []), (f"{MARKER}print(1)", f"{MARKER}print(1)", []),
        (f"a {MARKER} {MARKER}{CALL}", f"a {MARKER} ", [F]), ("", "", []), ("  ", "  ", []),
        ('{"name": "f", "param', '{"name": "f", "param', []), (f"{CALL}; ", "", [F]),
    ],
)  # fmt: skip
def test_texts(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([text], list(text)):
        pieces = parsed(parser(CallFormat.LLAMA), cuts)
        assert (content_of(pieces), calls_of(pieces)) == (content, calls)


def test_an_open_call() -> None:
    machine = LlamaParser(("f",))
    machine.push('{"name": "f", "parameters": {"a"')
    assert machine.open
    machine.push(": 1}}")
    assert not machine.open
