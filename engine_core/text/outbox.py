"""What waits for one api process: rows of text, merged per choice while the link takes none, and other answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import msgspec

from penstock.engine_core.parsers.scanning import content, merged
from penstock.engine_core.text.choice import Delta
from penstock.protocol.columns import pack
from penstock.protocol.control import EngineStatus
from penstock.protocol.message import Message
from penstock.protocol.outputs import ParsedRow, Piece, TextBatch, TextExtra

VECTOR_BYTES = 4 << 20  # of a message, well within what a link takes


class Seat:
    """Where a choice's row stands in the batch being made. Owned by the outbox, kept by the choice's request."""

    __slots__ = ("choice", "request", "row", "rows")

    def __init__(self, request: int, choice: int) -> None:
        self.request = request
        self.choice = choice
        self.rows: Rows | None = None
        self.row = 0


class Rows:
    """A TextBatch being made."""

    __slots__ = ("choices", "extras", "finish", "ids", "pieces", "text", "token_ids", "tokens")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.choices: list[int] = []
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.token_ids: list[Sequence[int]] = []  # of each row
        self.finish: list[int] = []
        self.extras: dict[int, TextExtra] = {}
        self.pieces: dict[int, list[Piece]] = {}  # what follows a row's text

    def add(self, seat: Seat, delta: Delta, token_ids: Sequence[int]) -> None:
        """A row of its own, or more of the choice's row. `token_ids` are the delta's."""
        if seat.rows is self:
            row = seat.row
            if row in self.pieces:
                self.pieces[row] += content(delta.text)
            else:
                self.text[row] += delta.text
            if delta.pieces:
                self.pieces.setdefault(row, []).extend(delta.pieces)
            self.tokens[row] += delta.tokens
            self.token_ids[row] = [*self.token_ids[row], *token_ids]
            self.finish[row] = delta.finish
            if delta.extra is not None:
                earlier = self.extras.get(row)
                self.extras[row] = delta.extra if earlier is None else merge_extras(earlier, delta.extra)
            return
        seat.rows = self
        seat.row = len(self.ids)
        if delta.extra is not None:
            self.extras[seat.row] = delta.extra
        if delta.pieces:
            self.pieces[seat.row] = list(delta.pieces)
        self.ids.append(seat.request)
        self.choices.append(seat.choice)
        self.text.append(delta.text)
        self.tokens.append(delta.tokens)
        self.token_ids.append(token_ids)
        self.finish.append(delta.finish)

    def pack(self) -> TextBatch:
        """The batch."""
        return TextBatch(
            ids=pack("q", self.ids),
            choices=pack("H", self.choices),
            text=tuple(self.text),
            tokens=pack("i", self.tokens),
            token_ids=pack("i", chain.from_iterable(self.token_ids)),
            finish=pack("B", self.finish),
            extras=tuple(msgspec.structs.replace(extra, row=row) for row, extra in self.extras.items()),
            parsed=tuple(ParsedRow(row, merged(pieces)) for row, pieces in self.pieces.items()),
        )


def merge_extras(first: TextExtra, second: TextExtra) -> TextExtra:
    """The extra of two deltas of one choice, in order."""
    return TextExtra(
        row=0,
        prompt_tokens=first.prompt_tokens if first.prompt_tokens is not None else second.prompt_tokens,
        image_tokens=first.image_tokens or second.image_tokens,
        prompt_token_ids=first.prompt_token_ids if first.prompt_token_ids is not None else second.prompt_token_ids,
        cached_tokens=first.cached_tokens if first.cached_tokens is not None else second.cached_tokens,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs if first.prompt_logprobs is not None else second.prompt_logprobs,
        approximations=first.approximations or second.approximations,
        vector=first.vector if first.vector is not None else second.vector,
        stop_reason=second.stop_reason,
        drafted=second.drafted,
        reasons=first.reasons or second.reasons,
        reasoning_tokens=second.reasoning_tokens,
        weights=first.weights + second.weights,
        error=second.error,
    )


class Outbox:
    """Everything for one api process, in order. What does not fit the link stays; of statuses each replica's newest."""

    def __init__(self) -> None:
        self._rows = Rows()
        self._ready: deque[Message] = deque()
        self._statuses: dict[int, EngineStatus] = {}  # by replica
        self._vectors = 0  # bytes of them in the rows so far

    def add(self, seat: Seat, delta: Delta, token_ids: Sequence[int] = ()) -> None:
        """`token_ids` are those that the delta accounts for."""
        self._rows.add(seat, delta, token_ids)
        if delta.extra is not None and delta.extra.vector is not None:
            self._vectors += len(delta.extra.vector)
            if self._vectors >= VECTOR_BYTES:
                self._close()

    def post(self, message: Message) -> None:
        """A message of its own, after all rows so far."""
        self._close()
        self._ready.append(message)

    def report(self, status: EngineStatus) -> None:
        self._statuses[status.replica] = status

    def next(self) -> Message | None:
        """What goes out next; the same until `sent`."""
        if not self._ready:
            self._close()
            if not self._ready and self._statuses:
                self._ready.append(self._statuses.pop(next(iter(self._statuses))))
        return self._ready[0] if self._ready else None

    def sent(self) -> None:
        self._ready.popleft()

    def waiting(self) -> int:
        """Rows and messages that have not gone out."""
        return len(self._rows.ids) + len(self._ready)

    def _close(self) -> None:
        if self._rows.ids:
            self._ready.append(self._rows.pack())
            self._rows = Rows()
            self._vectors = 0
