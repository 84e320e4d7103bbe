"""Pieces are merged by kind, and calls never are."""

from __future__ import annotations

from penstock.engine_core.parsers.scanning import content, leading_text, merged
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

C, R, CALL, A = PieceKind.CONTENT, PieceKind.REASONING, PieceKind.CALL, PieceKind.ARGUMENTS


def test_no_text_is_no_piece() -> None:
    assert content("") == []
    assert content("a") == [Piece(C, "a")]


def test_neighbours_of_a_kind_are_one_but_calls_are_not() -> None:
    pieces = [Piece(R, "a"), Piece(R, "b"), Piece(CALL, "f")]
    pieces += [Piece(CALL, "f"), Piece(A, "{"), Piece(A, "}"), Piece(C, "x")]
    expected = (Piece(R, "ab"), Piece(CALL, "f"), Piece(CALL, "f"), Piece(A, "{}"), Piece(C, "x"))
    assert merged(pieces) == expected
    assert merged(expected) == expected
    assert merged([]) == ()


def test_the_text_that_comes_first() -> None:
    pieces = [Piece(C, "a"), Piece(C, "b"), Piece(R, "r"), Piece(C, "c")]
    assert leading_text(pieces) == ("ab", (Piece(R, "r"), Piece(C, "c")))
    assert leading_text([Piece(CALL, "f")]) == ("", (Piece(CALL, "f"),))
    assert leading_text([]) == ("", ())
