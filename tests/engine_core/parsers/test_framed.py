"""Calls of JSON between markers."""

from __future__ import annotations

import pytest

from penstock.engine_core.parsers.formats import FORMS, CallFormat
from penstock.engine_core.parsers.framed import LONGEST_NAME, Frame, FramedParser
from penstock.protocol.messages import PieceKind
from tests.engine_core.parsers.outputs import calls_of, content_of, parsed, parser

HERMES, MISTRAL = FORMS[CallFormat.HERMES].reader, FORMS[CallFormat.MISTRAL].reader
assert isinstance(HERMES, Frame)
assert isinstance(MISTRAL, Frame)
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
def test_mistral(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([text], list(text)):
        pieces = parsed(parser(CallFormat.MISTRAL), cuts)
        assert (content_of(pieces), calls_of(pieces)) == (content, calls)


def test_open_calls() -> None:
    for text in (T + "f[ARGS]{", T + '[{"name": "f", "arguments": {'):
        machine = FramedParser(MISTRAL)
        machine.push(text)
        assert machine.open
        machine.push("}")
        assert not machine.open


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


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
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([text], list(text)):
        pieces = parsed(parser(CallFormat.HERMES), cuts)
        assert (content_of(pieces), calls_of(pieces)) == (content, calls)


def test_a_call_flows() -> None:
    machine = FramedParser(HERMES)
    cuts = ("Hi ", '<tool_call>{"name":"f","arguments":', '{"a"', ":1}")
    kinds = [[piece.kind for piece in machine.push(cut)] for cut in cuts]
    assert kinds == [[PieceKind.CONTENT], [], [PieceKind.CALL, PieceKind.ARGUMENTS], [PieceKind.ARGUMENTS]]
    assert not machine.open
    machine = FramedParser(HERMES)
    machine.push('<tool_call>{"name":"f","arguments":{"a"')
    assert machine.open
