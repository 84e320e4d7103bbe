"""Pieces as endpoints take them: in order, neighbours joined, calls numbered and named."""

from __future__ import annotations

from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece
from penstock.services.client.output_collector import Segment, Segments, parsed_output

C, R, CALL, A = PieceKind.CONTENT, PieceKind.REASONING, PieceKind.CALL, PieceKind.ARGUMENTS


def test_what_waits_is_taken_once_and_in_order() -> None:
    segments = Segments()
    segments.push((Piece(R, "a"), Piece(R, "b"), Piece(CALL, "f")))
    segments.push((Piece(A, "{"), Piece(A, "}"), Piece(CALL, "g"), Piece(A, "{}"), Piece(C, "so")))
    taken = segments.take("first")
    assert [(each.kind, each.text, each.call) for each in taken] == [
        (C, "first", -1), (R, "ab", -1), (CALL, "f", 0), (A, "{}", 0), (CALL, "g", 1), (A, "{}", 1), (C, "so", -1)
    ]  # fmt: skip
    assert segments.take("") == []
    segments.push((Piece(CALL, "h"),))
    assert segments.take("")[0].call == 2


def test_ids_are_the_calls_own() -> None:
    segments = Segments()
    segments.push((Piece(CALL, "f"), Piece(CALL, "f")))
    ids = {each.id for each in segments.take("")}
    assert len(ids) == 2
    assert all(each.startswith("call_") and len(each) == 29 for each in ids)


def test_the_whole_output_by_kind() -> None:
    segments = Segments()
    segments.push((Piece(R, "why"), Piece(C, "so"), Piece(CALL, "f"), Piece(A, '{"a":')))
    segments.push((Piece(CALL, "g"), Piece(C, "!")))
    taken = segments.take("")
    output = parsed_output(taken)
    assert (output.content, output.reasoning) == ("so!", "why")
    assert [(call.name, call.arguments) for call in output.calls] == [("f", '{"a":'), ("g", "")]
    assert [call.id for call in output.calls] == [each.id for each in taken if each.kind == CALL]
    assert parsed_output([Segment(C, "x")]).calls == ()
