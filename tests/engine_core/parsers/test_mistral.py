"""Mistral's calls in both forms."""

from __future__ import annotations

import pytest

from penstock.engine_core.parsers.dialect import CallFormat
from penstock.engine_core.parsers.mistral import LONGEST_NAME, MistralParser
from tests.engine_core.parsers.outputs import calls_of, content_of, parsed, parser

T = "[TOOL_CALLS]"
F = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (T + 'f[ARGS]{"a": 1}', "", [F]), (T + 'f{"a": 1}', "", [F]),
        (f'Hi{T}f[CALL_ID]abc[ARGS]{{"a": 1}}', "Hi", [F]),
        (f'{T}f[ARGS]{{"a": 1}}{T}g[ARGS]{{}}', "", [F, ("g", "{}")]), (T + 'f[ARGS]{"a": 1} so', " so", [F]),
        (T + ' [{"name": "f", "arguments": {"a": 1}}]', "", [F]), (T + '{"name": "f", "arguments": {"a": 1}}', "", [F]),
        (T + '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "x"}]', "", [F, ("g", "{}")]),
        (T, T, []), (T + "]", T + "]", []), (T + "[3]", T + "[3]", []), (T + '[{"x": 1}]', T + '[{"x": 1}]', []),
        (T + "two words{}", T + "two words{}", []), ("[TOOL_C", "[TOOL_C", []),
        (T + "x" * LONGEST_NAME + "{}", T + "x" * LONGEST_NAME + "{}", []),
        (T + '[{"name": "f", "arguments": {"a": 1}}; x', "; x", [F]),
    ],
)  # fmt: skip
def test_texts(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([text], list(text)):
        pieces = parsed(parser(CallFormat.MISTRAL), cuts)
        assert (content_of(pieces), calls_of(pieces)) == (content, calls)


def test_open_calls() -> None:
    for text in (T + "f[ARGS]{", T + '[{"name": "f", "arguments": {'):
        machine = MistralParser()
        machine.push(text)
        assert machine.open
        machine.push("}")
        assert not machine.open
