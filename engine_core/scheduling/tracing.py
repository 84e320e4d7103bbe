"""Traces of sampled requests: one record for each stay in the queue and in a slot, and the facts of one step.

Nothing here is done for requests that are not traced, and nothing per token. Times are those that the scheduler was
last given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.running_batch import NEVER, Ints, Slots
from penstock.protocol.messages import Finish, TraceContext

MOST_SEQUENCES = 16  # of one request that are traced
PREEMPTED = "preempted"
YIELDED = "yielded"  # its slot went to a client that had none
RESTARTED = "restarted"  # the executors were lost


class PrefillChunk(msgspec.Struct, frozen=True, gc=False):
    """Positions of a prompt, or of what is recomputed, that one step ran."""

    step: int
    start: int
    count: int
    planned: float
    applied: float


@dataclass(slots=True, kw_only=True)
class Stay:
    """One wait of a sequence in the queue, and its stay in a slot if it got one."""

    trace: TraceContext
    request: int
    sequence: int
    prompt_tokens: int
    queued: float
    entered: float | None = None
    left: float = 0.0
    end: str = ""  # a finish in lower case, or why it goes back to the queue
    reused: int = 0  # positions that the prefix cache had
    chunks: list[PrefillChunk] = field(default_factory=list)
    decoding: float | None = None  # since when it has a token to go on from
    first: bool = False  # its very first token came in this stay
    tokens: int = 0  # output tokens of this stay
    accepted: int = 0  # drafts of this stay
    rejected: int = 0
    marks: list[tuple[float, int]] = field(default_factory=list)  # time, output tokens


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The step that was planned last."""

    step: int
    epoch: int
    rows: int  # that sample
    chunks: int
    tokens: int  # positions that it runs
    drafts: int
    masked: int
    running: int
    waiting: int
    blocks: int
    blocks_used: int
    traced: tuple[TraceContext, ...]  # of the requests in it


class RequestTraces:
    """Owner of the stays of traced requests. `mark_tokens`: output tokens between two marks, 0 for none."""

    def __init__(self, slots: int, mark_tokens: int) -> None:
        self.running: dict[int, Sequence] = {}  # traced sequences by slot
        self._mark_tokens = mark_tokens
        self._next_mark = np.full(slots, NEVER, np.int64)  # tokens at which a slot's trace has its next mark
        self._open: dict[Sequence, Stay] = {}
        self._ended: list[Stay] = []

    def traced(self, sequence: Sequence) -> bool:
        return sequence in self._open

    def queue(self, sequence: Sequence, now: float) -> None:
        if sequence.request.traced and sequence.index < MOST_SEQUENCES:
            message, (accepted, rejected) = sequence.request.message, sequence.drafted or (0, 0)
            self._open[sequence] = Stay(
                trace=message.trace, request=message.id, sequence=sequence.index, queued=now,
                prompt_tokens=sequence.request.prompt_tokens,
                tokens=-sequence.outputs, accepted=-accepted, rejected=-rejected,  # until it leaves
            )  # fmt: skip

    def enter(self, sequence: Sequence, now: float, reused: int) -> None:
        """The sequence has a slot; `reused` positions came from the prefix cache."""
        stay = self._open.get(sequence)
        if stay is not None:
            stay.entered = now
            stay.reused = reused
            self.running[sequence.slot] = sequence

    def chunk(self, sequence: Sequence, chunk: PrefillChunk, *, last: bool) -> None:
        """A chunk's result has come; `last`: its step samples. Called before its tokens are taken, which may end the
        sequence."""
        stay = self._open.get(sequence)
        if stay is None or stay.entered is None or stay.entered > chunk.planned:
            return  # planned in an earlier stay
        stay.chunks.append(chunk)
        if last:
            stay.decoding, stay.first = chunk.applied, not sequence.began
            if self._mark_tokens:
                self._next_mark[sequence.slot] = len(sequence.tokens) + 1 + self._mark_tokens

    def mark(self, settled: Ints, slots: Slots, now: float) -> None:
        """Tokens have come to these slots: record the time where a sequence reaches its next mark."""
        for slot in settled[slots.num_tokens[settled] >= self._next_mark[settled]].tolist():
            sequence = self.running[slot]
            self._open[sequence].marks.append((now, sequence.outputs))
            self._next_mark[slot] = len(sequence.tokens) + self._mark_tokens

    def leave(self, sequence: Sequence, end: Finish | str, now: float) -> None:
        """The sequence leaves its slot, or the queue; called while it still has it."""
        stay = self._open.pop(sequence, None)
        if stay is None:
            return
        if sequence.slot >= 0:
            del self.running[sequence.slot]
            self._next_mark[sequence.slot] = NEVER
        accepted, rejected = sequence.drafted or (0, 0)
        stay.left, stay.end = now, end.name.lower() if isinstance(end, Finish) else end
        stay.tokens += sequence.outputs
        stay.accepted += accepted
        stay.rejected += rejected
        self._ended.append(stay)

    def collect(self) -> list[Stay]:
        """Stays that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended
