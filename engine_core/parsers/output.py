"""One choice's output on its way through its parsers: reasoning first, then calls and content."""

from __future__ import annotations

from typing import Protocol

from penstock.engine_core.parsers.custom import CustomInputs
from penstock.engine_core.parsers.pieces import content
from penstock.engine_core.parsers.reasoning import ReasoningParser
from penstock.protocol.messages import Piece, PieceKind


class CallParser(Protocol):
    """Tells calls from content. The concatenation of what it gives is the same for every way of cutting its text."""

    @property
    def open(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""

    def push(self, text: str) -> list[Piece]:
        """What is now certain."""

    def flush(self) -> list[Piece]:
        """What was held: the output is over. The last call."""


class OutputParser:
    """The parsers of one choice; each may be absent. Owned by the choice."""

    __slots__ = ("_calls", "_inputs", "_reasoning", "called")

    def __init__(
        self, reasoning: ReasoningParser | None, calls: CallParser | None, inputs: CustomInputs | None = None
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._inputs = inputs
        self.called = False  # a call has begun

    @property
    def thinking(self) -> bool:
        """Whether what comes is reasoning."""
        return self._reasoning is not None and self._reasoning.thinking

    @property
    def plain(self) -> bool:
        """Whether whatever comes is content."""
        return self._calls is None and (self._reasoning is None or self._reasoning.over)

    @property
    def complete(self) -> bool:
        """Whether there are calls and none is broken off."""
        return self.called and not (self._calls is not None and self._calls.open)

    def push(self, text: str) -> list[Piece]:
        """What is now certain."""
        out: list[Piece] = []
        if self._reasoning is not None and not self._reasoning.over:
            text = self._reasoning.push(text, out)
        return self._spoken(out, text)

    def flush(self) -> list[Piece]:
        """What was held: the output is over. The last call."""
        out: list[Piece] = []
        if self._reasoning is not None:
            self._spoken(out, self._reasoning.flush(out))
        if self._calls is not None:
            self._add(out, self._calls.flush())
        return out

    def _spoken(self, out: list[Piece], text: str) -> list[Piece]:
        if self._calls is None:
            out += content(text)
        elif text:
            self._add(out, self._calls.push(text))
        return out

    def _add(self, out: list[Piece], pieces: list[Piece]) -> None:
        self.called = self.called or any(piece.kind == PieceKind.CALL for piece in pieces)
        out += pieces if self._inputs is None else self._inputs.push(pieces)
