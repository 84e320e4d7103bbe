"""Outputs that are not yet delivered to one source, in columns, merged where the link takes none."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.protocol.messages import Finish, Prefilled, Rejected
from penstock.protocol.outputs import Logprobs, TokenBatch, TokenExtra

NOTHING = TokenExtra(row=0)
MERGE_AT = 64  # undelivered steps of one source before they are merged into one


class Rows(msgspec.Struct, frozen=True, eq=False):
    """Columns of a token batch to be."""

    ids: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.uint16]
    counts: npt.NDArray[np.int32]
    finish: npt.NDArray[np.uint8]
    tokens: npt.NDArray[np.int32]  # [sum of counts]
    extras: dict[int, TokenExtra] = {}  # by row, which they do not name yet


def note(extras: dict[int, TokenExtra], row: int, **fields: object) -> None:
    """Add fields to the extra of a row."""
    extras[row] = msgspec.structs.replace(extras.get(row, NOTHING), **fields)


def merged_extras(first: TokenExtra, later: TokenExtra) -> TokenExtra:
    """The extra of two rows of one sequence: what the first one says, and joined log-probabilities."""
    said = {name: value for name, value in msgspec.structs.asdict(first).items() if value is not None}
    if later.logprobs is not None:
        said["logprobs"] = joined([scores for scores in (first.logprobs, later.logprobs) if scores is not None])
    if later.drafted is not None:
        said["drafted"] = later.drafted  # counted from the sequence's beginning
    said["weights"] = first.weights + later.weights
    return msgspec.structs.replace(later, **said)


def joined(parts: Sequence[Logprobs]) -> Logprobs | None:
    """Consecutive positions of one sequence as one. All parts of a sequence have the same width."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Logprobs(
        width=parts[0].width,
        token_ids=b"".join([part.token_ids for part in parts]),
        values=b"".join([part.values for part in parts]),
        ranks=b"".join([part.ranks for part in parts]),
    )


def end_row(
    request: int, number: int, finish: Finish, error: str | None = None, drafted: tuple[int, int] | None = None
) -> Rows:
    return end_rows([(request, number, finish, TokenExtra(row=0, error=error, drafted=drafted))])


def end_rows(ended: Sequence[tuple[int, int, Finish, TokenExtra]]) -> Rows:
    """Terminal rows without tokens: of each its request, its sequence's number, why it ends, and its extra."""
    ids, numbers, finish, extras = zip(*ended, strict=True)
    return Rows(
        np.array(ids, np.int64),
        np.array(numbers, np.uint16),
        np.zeros(len(ended), np.int32),
        np.array(finish, np.uint8),
        np.zeros(0, np.int32),
        {row: extra for row, extra in enumerate(extras) if extra != NOTHING},
    )


def merged(parts: Sequence[Rows]) -> Rows:
    """One row per (id, sequence): tokens in order of the parts, the finish of the last, extras merged."""
    if len(parts) == 1:
        return parts[0]
    ids = np.concatenate([part.ids for part in parts])
    numbers = np.concatenate([part.numbers for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    finish = np.concatenate([part.finish for part in parts])
    tokens = np.concatenate([part.tokens for part in parts])
    order = np.lexsort((numbers, ids))  # stable: rows of one sequence stay in order
    ids, numbers = ids[order], numbers[order]
    first = np.ones(len(ids), bool)
    first[1:] = (ids[1:] != ids[:-1]) | (numbers[1:] != numbers[:-1])
    heads = np.flatnonzero(first)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
    sizes = counts[order].astype(np.int64)
    shift = np.repeat(starts[order] - (np.cumsum(sizes) - sizes), sizes)
    extras: dict[int, TokenExtra] = {}
    if any(part.extras for part in parts):
        place = np.empty(len(order), np.int64)
        place[order] = np.cumsum(first) - 1  # row after the merge, by row before it
        base = 0
        for part in parts:
            for row in sorted(part.extras):
                target, extra = int(place[base + row]), part.extras[row]
                extras[target] = merged_extras(extras[target], extra) if target in extras else extra
            base += len(part.ids)
    return Rows(
        ids[heads],
        numbers[heads],
        np.add.reduceat(counts[order], heads).astype(np.int32),
        np.maximum.reduceat(finish[order], heads),
        tokens[np.arange(len(tokens)) + shift],
        extras,
    )


class Outbox:
    """Owner of one source's undelivered rows and rejections."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []  # of steps, in their order
        self._vectors: deque[Rows] = deque()  # rows with vectors, which are large: those of one step to a message
        self._rejected: deque[Rejected] = deque()
        self._prefilled: deque[Prefilled] = deque()

    def __bool__(self) -> bool:
        return bool(self.rows or self._vectors or self._rejected or self._prefilled)

    def put_vectors(self, rows: Rows) -> None:
        """The only rows of their sequences."""
        self._vectors.append(rows)

    def reject(self, message: Rejected) -> None:
        self._rejected.append(message)

    def tell(self, message: Prefilled) -> None:
        """It goes behind all rows so far."""
        self._prefilled.append(message)

    def take(self, limit: int) -> list[TokenBatch | Rejected | Prefilled]:
        """At most `limit` messages: rejections first, then vectors, then all other rows as one batch, then who goes on
        elsewhere. They count as delivered. Rows that are left are merged."""
        out: list[TokenBatch | Rejected | Prefilled] = []
        while self._rejected and len(out) < limit:
            out.append(self._rejected.popleft())
        while self._vectors and len(out) < limit:
            out.append(token_batch(self._vectors.popleft()))
        if self.rows and len(out) < limit:
            out.append(token_batch(merged(self.rows)))
            self.rows.clear()
        elif len(self.rows) >= MERGE_AT:
            self.rows[:] = [merged(self.rows)]
        while self._prefilled and len(out) < limit:
            out.append(self._prefilled.popleft())
        return out


class Outboxes(dict[int, Outbox]):
    """The outbox of each source, made at its first use."""

    def __missing__(self, source: int) -> Outbox:
        found = self[source] = Outbox()
        return found


def token_batch(rows: Rows) -> TokenBatch:
    """The rows as the link carries them."""
    return TokenBatch(
        ids=rows.ids.tobytes(),
        choices=rows.numbers.tobytes(),
        counts=rows.counts.tobytes(),
        token_ids=rows.tokens.tobytes(),
        finish=rows.finish.tobytes(),
        extras=tuple([msgspec.structs.replace(rows.extras[row], row=row) for row in sorted(rows.extras)]),
    )
