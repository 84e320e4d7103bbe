"""Inputs of custom tools, taken out of their calls however the stream is cut."""

from __future__ import annotations

import json

import pytest

from penstock.engine_core.parsers.custom import CustomInputs
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

TEXT = 'one "two"\n\\three\t\x07 ü 😀 /'


def given(arguments: str, *, size: int = 0, name: str = "patch") -> str:
    """What is told of a call's arguments that come in pieces of this size, or whole."""
    inputs = CustomInputs({"patch"})
    cut = [arguments[at : at + size] for at in range(0, len(arguments), size)] if size else [arguments]
    pieces = [Piece(PieceKind.CALL, name), *(Piece(PieceKind.ARGUMENTS, part) for part in cut)]
    found = [each for piece in pieces for each in inputs.push([piece])]
    assert found[0] == pieces[0]
    assert all(piece.kind == PieceKind.ARGUMENTS and piece.text for piece in found[1:])
    return "".join(piece.text for piece in found[1:])


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (json.dumps({"input": TEXT}), TEXT),
        (json.dumps({"input": TEXT}, ensure_ascii=False), TEXT),
        ('{ "input" :\n"a\\/b" } ', "a/b"),
        ('{"input": ""}', ""),
        ('{"input": "cut of', "cut of"),
        ('{"input": "cut\\u00', "cut"),
        ('{"input": "\\ud83d', ""),
        ('{"input": "\\ud83dx"}', "\ufffdx"),
        ('{"input": "\\udc00\\ud83d\\n"}', "\ufffd\ufffd\n"),
        ('{"input": "\\q"}', "\\q"),
        ("{}", ""),
        ("", ""),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input', ""),
        ("plain text", "plain text"),
    ],
)
def test_the_text_is_told_however_it_is_cut(arguments: str, text: str, size: int) -> None:
    assert given(arguments, size=size) == text


@pytest.mark.parametrize("size", [0, 1])
def test_other_calls_are_as_they_were(size: int) -> None:
    assert given('{"input": "a"}', size=size, name="other") == '{"input": "a"}'


def test_calls_do_not_run_into_each_other() -> None:
    inputs = CustomInputs({"patch"})
    call, other = Piece(PieceKind.CALL, "patch"), Piece(PieceKind.CALL, "other")
    first = inputs.push([call, Piece(PieceKind.ARGUMENTS, '{"inp'), Piece(PieceKind.CONTENT, "x"), other])
    assert first == [call, Piece(PieceKind.CONTENT, "x"), other]
    assert inputs.push([Piece(PieceKind.ARGUMENTS, '{"input": "b"}')]) == [Piece(PieceKind.ARGUMENTS, '{"input": "b"}')]
    again = inputs.push([call, Piece(PieceKind.ARGUMENTS, '{"input": "c"}'), Piece(PieceKind.ARGUMENTS, "late")])
    assert again == [call, Piece(PieceKind.ARGUMENTS, "c")]
