"""Hermes' calls among text."""

from __future__ import annotations

import pytest

from penstock.engine_core.parsers.dialect import CallFormat
from penstock.engine_core.parsers.hermes import HermesParser
from penstock.protocol.messages import PieceKind
from tests.engine_core.parsers.outputs import calls_of, content_of, parsed, parser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [F]), (f"Let me see.\n{CALL}", "Let me see.", [F]), (f"{CALL}\n{CALL}\n", "", [F, F]),
        (f"{CALL}\nDone.", "\nDone.", [F]), (CALL.removesuffix("\n</tool_call>"), "", [F]),
        (CALL.removesuffix("_call>"), "", [F]), (CALL.removesuffix("</tool_call>") + "x", "\nx", [F]),
        ("<tool_call>", "<tool_call>", []), ("a <tool_ b", "a <tool_ b", []),
        ("a\n<tool_call>b", "a\n<tool_call>b", []),
        (f"<tool_call>\n{CALL}", "<tool_call>\n", [F]),
        ('<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []), ("tail\n\n", "tail\n\n", []),
        ('<tool_call>{"name": "f", "arguments": {"a": <x>}}</tool_call>', "", [("f", '{"a": <x>}')]),
    ],
)  # fmt: skip
def test_texts(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([text], list(text)):
        pieces = parsed(parser(CallFormat.HERMES), cuts)
        assert (content_of(pieces), calls_of(pieces)) == (content, calls)


def test_a_call_flows() -> None:
    machine = HermesParser()
    cuts = ("Hi ", '<tool_call>{"name":"f","arguments":', '{"a"', ":1}")
    kinds = [[piece.kind for piece in machine.push(cut)] for cut in cuts]
    assert kinds == [[PieceKind.CONTENT], [], [PieceKind.CALL, PieceKind.ARGUMENTS], [PieceKind.ARGUMENTS]]
    assert not machine.open
    machine = HermesParser()
    machine.push('<tool_call>{"name":"f","arguments":{"a"')
    assert machine.open
