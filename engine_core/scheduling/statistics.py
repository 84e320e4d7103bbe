"""Counters and histograms of the scheduler, and the records that metrics read."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass

import msgspec

from penstock.engine_core.histogram import Histogram, HistogramStatistics
from penstock.engine_core.kv.block_pool import PoolStatistics
from penstock.engine_core.kv.host_tier import HostTierStatistics, StorageTierStatistics
from penstock.engine_core.kv.snapshots import SnapshotStatistics
from penstock.engine_core.scheduling.adapters import AdapterStatistics
from penstock.engine_core.scheduling.encoder_cache import EncoderStatistics
from penstock.engine_core.scheduling.request import Sequence
from penstock.protocol.messages import Finish

WINDOW = 10.0  # seconds over which the drain rate is taken
SAMPLE = 0.25
FINISHED = (Finish.STOP, Finish.LENGTH)  # as their clients wanted
# Seconds: from a lone short prompt on a fast device to what an overloaded server does to a long one.
PHASE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PER_TOKEN = (0.0005, 0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
)  # fmt: skip


class Totals(msgspec.Struct, kw_only=True):
    """Counters since start, which survive a new epoch. They are written where the event happens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens of first admissions that were not computed
    prefix_lookups: int = 0  # first admissions
    prefix_hits: int = 0  # those of them that found something
    reused_tokens: int = 0  # all positions that were not computed, also after preemption and among sequences
    output_tokens: int = 0
    surplus_tokens: int = 0  # sampled and thrown away
    scheduled_tokens: int = 0  # positions planned
    finishes: Counter[Finish] = msgspec.field(default_factory=Counter)  # sequences by how they ended
    rejected: int = 0
    preemptions: int = 0
    put_off: int = 0  # times that the next sequence did not fit
    yielded: int = 0  # sequences whose slot went to a client that had none; these are no preemptions
    stale_results: int = 0  # of another epoch
    poisoned: int = 0  # sequences that ended because executors died of them
    drafts: int = 0  # rows that carried any
    draft_tokens: int = 0
    accepted_at: list[int] = []  # drafts that became output, by position in the draft, from 0
    tick_at: float = -math.inf  # when the next sample is due
    ends: deque[tuple[float, int]] = msgspec.field(default_factory=deque)  # time, sequences ended; every SAMPLE seconds

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
        return self.ended - self.finished - self.aborted - self.finishes[Finish.PREFILLED]

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
        """Sample how many sequences have ended, if it is time."""
        if now < self.tick_at:
            return
        self.tick_at = now + SAMPLE
        self.ends.append((now, self.ended))
        while now - self.ends[0][0] > WINDOW:
            self.ends.popleft()

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_at)

    @property
    def drain_rate(self) -> float:
        """Sequences ended per second, recently."""
        if len(self.ends) < 2:
            return 0.0
        (begin, before), (end, after) = self.ends[0], self.ends[-1]
        return (after - before) / (end - begin)


class TransferStatistics(msgspec.Struct, frozen=True):
    """Requests whose prompts are computed at one replica, and whose outputs at another one. Totals since start, but for
    the first."""

    held: int  # now: blocks in the host's memory that are held for others
    handed_over: int  # requests that went on elsewhere
    fetches: int  # requests whose blocks were copied from another replica
    fetched: int  # those blocks
    stale: int  # fetches that read something else, so that all was computed again
    transfer: HistogramStatistics  # seconds of fetches


@dataclass(slots=True)
class HostTotals:
    """Since start: see HostTierStatistics."""

    copied: int = 0
    lost: int = 0
    fetched: int = 0
    fetches: int = 0


class TransferCounters:
    """Of one replica."""

    def __init__(self) -> None:
        self._transfer = Histogram(PHASE)
        self.handed_over = self._fetches = self._fetched = self._stale = 0

    def fetch(self, blocks: int, seconds: float, *, stale: bool) -> None:
        self._stale += stale
        if not stale:
            self._fetches += 1
            self._fetched += blocks
            self._transfer.observe(seconds)

    def statistics(self, held: int) -> TransferStatistics:
        return TransferStatistics(
            held, self.handed_over, self._fetches, self._fetched, self._stale, self._transfer.statistics()
        )


class SequenceStatistics(msgspec.Struct, frozen=True):
    """Seconds of the phases that sequences have been through here, and tokens of those that ended, once each."""

    queue: HistogramStatistics  # arrival to first step
    prefill: HistogramStatistics  # first step to first token, or to the vector
    decode: HistogramStatistics  # first token to the end
    inference: HistogramStatistics  # first step to the end
    per_token: HistogramStatistics  # decode, by the tokens behind the first
    prompt_tokens: HistogramStatistics
    output_tokens: HistogramStatistics  # what makes a vector has none


class SequenceHistograms:
    """How long sequences wait, prefill and decode, and how many tokens they have. One resumed from another scheduler is
    counted in the queue alone. A preempted one keeps its start, so the lost time is part of the phase in which it was
    lost."""

    def __init__(self) -> None:
        self._queue, self._prefill, self._decode, self._inference = (Histogram(PHASE) for _ in range(4))
        self._per_token = Histogram(PER_TOKEN)
        self._prompt_tokens, self._output_tokens = Histogram(TOKENS), Histogram(TOKENS)
        self._entered: dict[Sequence, float] = {}  # when a sequence first had a slot
        self._began: dict[Sequence, float] = {}  # when its first token came

    def enter(self, sequence: Sequence, now: float) -> None:
        """It has a slot; the first one counts."""
        if sequence not in self._entered:
            self._entered[sequence] = now
            self._queue.observe(now - sequence.request.since)
            if sequence.request.message.transfer is not None and sequence.outputs == 1:  # it goes on from elsewhere
                self._began[sequence] = sequence.request.since

    def begin(self, sequence: Sequence, now: float) -> None:
        assert sequence in self._entered, "what samples has had a slot"
        self._began[sequence] = now
        self._prefill.observe(now - self._entered[sequence])

    def end(self, sequence: Sequence, finish: Finish, now: float) -> None:
        """It has ended. Aborted ones are left out: they do not show how long such a request takes, or is."""
        entered, began = self._entered.pop(sequence, None), self._began.pop(sequence, None)
        if finish not in FINISHED:
            return
        self._prompt_tokens.observe(sequence.request.prompt_tokens)
        if not sequence.request.pools:
            self._output_tokens.observe(sequence.outputs)
        if entered is None or (began is None and not sequence.request.pools):
            return
        if began is None:
            self._prefill.observe(now - entered)
        else:
            self._decode.observe(now - began)
            if sequence.outputs > 1:
                self._per_token.observe((now - began) / (sequence.outputs - 1))
        self._inference.observe(now - entered)

    def statistics(self) -> SequenceStatistics:
        every = (
            self._queue, self._prefill, self._decode, self._inference, self._per_token, self._prompt_tokens,
            self._output_tokens,
        )  # fmt: skip
        return SequenceStatistics(*[histogram.statistics() for histogram in every])


class SchedulerStatistics(Totals, frozen=True, kw_only=True):  # type: ignore[misc]  # msgspec lets it be frozen
    """One moment, with the totals so far."""

    epoch: int
    step: int  # last applied
    in_flight: int
    running: int
    waiting: int
    reasons: dict[str, int]  # waiting sequences, by what they wait for
    slots: int
    pool: PoolStatistics
    evicted_blocks: int  # of the prefix cache, since start
    snapshots: SnapshotStatistics | None  # None: the model has no recurrent layers
    host_tier: HostTierStatistics
    storage_tier: StorageTierStatistics
    transfers: TransferStatistics
    adapters: AdapterStatistics
    encoder: EncoderStatistics
    group_blocks: tuple[int, ...]  # in the tables of running sequences, of each KV group
    requests: int  # alive
    waiting_clients: int  # that have anything in the queue
    sequences: SequenceStatistics
