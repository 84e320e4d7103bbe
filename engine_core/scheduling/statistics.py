"""Counters and histograms of the scheduler, and the records that metrics read."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from penstock.engine_core.histogram import Histogram, HistogramStatistics
from penstock.engine_core.kv.block_pool import PoolStatistics
from penstock.engine_core.kv.prefix_index import PrefixStatistics
from penstock.engine_core.scheduling.peak_estimate import ForecastStatistics
from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.speculation.acceptance import AcceptanceStatistics
from penstock.engine_core.speculation.draft_model import DeviceDraftStatistics
from penstock.engine_core.speculation.jump_forward import JumpForwardStatistics
from penstock.engine_core.speculation.step_cost import CostStatistics, DraftCostStatistics
from penstock.protocol.messages import Finish

WINDOW = 10.0  # seconds over which the drain rate is taken
SAMPLE = 0.25
FINISHED = (Finish.STOP, Finish.LENGTH)  # as their clients wanted
# Seconds: from a lone short prompt on a fast device to what an overloaded server does to a long one.
PHASE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
)  # fmt: skip


class SchedulerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment. Totals count since start and survive a new epoch."""

    epoch: int
    step: int  # last applied
    in_flight: int
    running: int
    waiting: int
    reasons: dict[str, int]  # waiting sequences, by what they wait for
    slots: int
    pool: PoolStatistics
    prefix: PrefixStatistics
    forecast: ForecastStatistics
    requests: int  # alive
    prompt_tokens: int
    cached_tokens: int  # prompt tokens of first admissions that were not computed
    prefix_lookups: int  # first admissions
    prefix_hits: int  # those of them that found something
    reused_tokens: int  # all positions that were not computed, also after preemption and among sequences
    output_tokens: int
    surplus_tokens: int  # sampled and thrown away
    scheduled_tokens: int  # positions planned
    finished: int  # sequences, by stop or length
    aborted: int
    failed: int
    finishes: dict[Finish, int]  # sequences by how they ended
    rejected: int
    preemptions: int
    yielded: int  # sequences whose slot went to a client that had none; these are no preemptions
    waiting_clients: int  # that have anything in the queue
    stale_results: int  # of another epoch
    poisoned: int  # sequences that ended because executors died of them
    drafts: int  # rows that carried any
    draft_tokens: int
    accepted_tokens: int  # of those, the ones that became output
    accepted_at: tuple[int, ...]  # the same by position in the draft, from 0
    acceptance: AcceptanceStatistics
    jump_forward: JumpForwardStatistics
    cost: CostStatistics
    device_drafts: DeviceDraftStatistics  # of the executors' own drafts
    draft_cost: DraftCostStatistics
    drain_rate: float  # sequences ended per second, recent
    durations: DurationStatistics
    lengths: LengthStatistics


@dataclass(slots=True)
class Totals:
    """Counters since start, written where the event happens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefix_lookups: int = 0
    prefix_hits: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    surplus_tokens: int = 0
    scheduled_tokens: int = 0
    finishes: Counter[Finish] = field(default_factory=Counter)  # sequences by how they ended
    rejected: int = 0
    preemptions: int = 0
    yielded: int = 0
    stale_results: int = 0
    poisoned: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    tick_at: float = -math.inf  # when the next sample is due
    ends: deque[tuple[float, int]] = field(
        default_factory=deque
    )  # (time, sequences ended so far), every SAMPLE seconds

    @property
    def ended(self) -> int:
        return self.finishes.total()

    @property
    def finished(self) -> int:
        return sum([self.finishes[finish] for finish in FINISHED])

    @property
    def aborted(self) -> int:
        return self.finishes[Finish.ABORT]

    @property
    def failed(self) -> int:
        return self.ended - self.finished - self.aborted

    def count_lookup(self, cached: int) -> None:
        """A request's first admission, and how many tokens of its prompt were cached."""
        self.prefix_lookups += 1
        self.prefix_hits += cached > 0
        self.cached_tokens += cached

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """One row's drafts, and how many of them were accepted."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1

    def tick(self, now: float) -> None:
        """Sample how many sequences have ended. Called at `tick_at` or later."""
        self.tick_at = now + SAMPLE
        self.ends.append((now, self.ended))
        while now - self.ends[0][0] > WINDOW:
            self.ends.popleft()

    @property
    def drain_rate(self) -> float:
        if len(self.ends) < 2:
            return 0.0
        (begin, before), (end, after) = self.ends[0], self.ends[-1]
        return (after - before) / (end - begin)


class DurationStatistics(msgspec.Struct, frozen=True):
    """Seconds of the phases of sequences that have been through them here, once each."""

    queue: HistogramStatistics  # arrival to first step
    prefill: HistogramStatistics  # first step to first token, or to the vector
    decode: HistogramStatistics  # first token to the end
    inference: HistogramStatistics  # first step to the end


class Durations:
    """How long sequences wait, prefill and decode. One resumed from another scheduler is counted in the queue alone. A
    preempted one keeps its start, so the lost time is part of the phase in which it was lost."""

    def __init__(self) -> None:
        self.now = 0.0  # as the caller said last
        self._queue = Histogram(PHASE)
        self._prefill = Histogram(PHASE)
        self._decode = Histogram(PHASE)
        self._inference = Histogram(PHASE)
        self._entered: dict[Sequence, float] = {}  # when a sequence first had a slot
        self._began: dict[Sequence, float] = {}  # when its first token came

    def enter(self, sequence: Sequence) -> None:
        """It has a slot; the first one counts."""
        if sequence not in self._entered:
            self._entered[sequence] = self.now
            self._queue.observe(self.now - sequence.request.since)

    def begin(self, sequence: Sequence) -> None:
        """Its first token is there."""
        assert sequence in self._entered, "what samples has had a slot"
        self._began[sequence] = self.now
        self._prefill.observe(self.now - self._entered[sequence])

    def end(self, sequence: Sequence, finish: Finish) -> None:
        """It has ended. Aborted ones are left out: they do not show how long such a request takes."""
        entered, began = self._entered.pop(sequence, None), self._began.pop(sequence, None)
        if entered is None or finish not in (Finish.STOP, Finish.LENGTH):
            return
        if sequence.request.pools:
            self._prefill.observe(self.now - entered)
        elif began is None:
            return
        else:
            self._decode.observe(self.now - began)
        self._inference.observe(self.now - entered)

    def statistics(self) -> DurationStatistics:
        phases = (self._queue, self._prefill, self._decode, self._inference)
        return DurationStatistics(*[phase.statistics() for phase in phases])


class LengthStatistics(msgspec.Struct, frozen=True):
    """Tokens of sequences that ended here, once each."""

    prompt: HistogramStatistics
    output: HistogramStatistics  # what makes a vector has none


class Lengths:
    """Tokens of sequences. Aborted ones are left out: they do not show how long such a request is."""

    def __init__(self) -> None:
        self._prompt = Histogram(TOKENS)
        self._output = Histogram(TOKENS)

    def end(self, sequence: Sequence, finish: Finish) -> None:
        """It is over."""
        if finish not in (Finish.STOP, Finish.LENGTH):
            return
        self._prompt.observe(sequence.request.prompt_tokens)
        if not sequence.request.pools:
            self._output.observe(sequence.outputs)

    def statistics(self) -> LengthStatistics:
        return LengthStatistics(self._prompt.statistics(), self._output.statistics())
