"""A choice's output in the order in which it was written: what endpoints make their deltas and messages of."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import msgspec

from penstock.protocol.messages import Piece, PieceKind


class Segment(msgspec.Struct, frozen=True):
    """A stretch of it."""

    kind: int  # PieceKind
    text: str  # of a CALL the function's name
    call: int = -1  # which of the choice's calls, from 0
    id: str = ""  # of a CALL
    name: str = ""  # of the function that ARGUMENTS belong to


class Call(msgspec.Struct, frozen=True):
    """A whole tool call."""

    id: str
    name: str
    arguments: str  # as the model wrote them: JSON, unless it was cut off or the model erred


class Output(msgspec.Struct, frozen=True):
    """All of it, sorted by kind."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


class Segments:
    """What waits to be taken of one choice, beside text that came before it. Makes the calls' ids."""

    __slots__ = ("_calls", "_name", "waiting")

    def __init__(self) -> None:
        self._calls = 0
        self._name = ""  # of the last call's function
        self.waiting: list[Segment] = []

    def push(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.kind == PieceKind.CALL:
                self.waiting.append(Segment(piece.kind, piece.text, self._calls, "call_" + secrets.token_hex(12)))
                self._calls += 1
                self._name = piece.text
            elif piece.kind == PieceKind.ARGUMENTS:
                self.waiting.append(Segment(piece.kind, piece.text, self._calls - 1, name=self._name))
            else:
                self.waiting.append(Segment(piece.kind, piece.text))

    def take(self, text: str) -> list[Segment]:
        """`text` and what waits behind it, neighbours of a kind as one."""
        found = [Segment(PieceKind.CONTENT, text)] if text else []
        for segment in self.waiting:
            last = found[-1] if found else None
            if last is not None and last.kind == segment.kind != PieceKind.CALL:
                found[-1] = Segment(last.kind, last.text + segment.text, last.call, name=last.name)
            else:
                found.append(segment)
        self.waiting = []
        return found


def output_of(segments: Iterable[Segment]) -> Output:
    """The whole output of a choice whose segments these are."""
    texts: dict[int, list[str]] = {PieceKind.CONTENT: [], PieceKind.REASONING: []}
    calls: list[tuple[Segment, list[str]]] = []
    for segment in segments:
        if segment.kind == PieceKind.CALL:
            calls.append((segment, []))
        elif segment.kind == PieceKind.ARGUMENTS:
            calls[segment.call][1].append(segment.text)
        else:
            texts[segment.kind].append(segment.text)
    return Output(
        "".join(texts[PieceKind.CONTENT]),
        "".join(texts[PieceKind.REASONING]),
        tuple(Call(begun.id, begun.text, "".join(parts)) for begun, parts in calls),
    )
