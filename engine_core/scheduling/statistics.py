"""Counters of the scheduler, and the record that others read."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from penstock.engine_core.kv.pool import PoolStatistics
from penstock.engine_core.kv.prefix import PrefixStatistics
from penstock.engine_core.scheduling.durations import DurationStatistics
from penstock.engine_core.scheduling.forecast import ForecastStatistics
from penstock.engine_core.scheduling.lengths import LengthStatistics
from penstock.engine_core.speculation.acceptance import AcceptanceStatistics
from penstock.engine_core.speculation.cost import CostStatistics
from penstock.engine_core.speculation.draft_cost import DraftCostStatistics
from penstock.engine_core.speculation.guesses import GuessStatistics
from penstock.engine_core.speculation.looks import LookStatistics
from penstock.protocol.messages import Finish

WINDOW = 10.0  # seconds over which the drain rate is taken
SAMPLE = 0.25
FINISHED = (Finish.STOP, Finish.LENGTH)  # as their clients wanted


class SchedulerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment. Totals count since start and survive a new epoch."""

    epoch: int
    step: int  # last applied
    in_flight: int
    running: int
    waiting: int
    reasons: dict[str, int]  # those who wait, by what they wait for
    slots: int
    pool: PoolStatistics
    prefix: PrefixStatistics
    forecast: ForecastStatistics
    requests: int  # alive
    prompt_tokens: int
    cached_tokens: int  # prompt tokens of first admissions that were not computed
    prefix_lookups: int  # first admissions
    prefix_hits: int  # those of them that found something
    reused_tokens: int  # all positions that were not computed, also after preemption and among choices
    output_tokens: int
    surplus_tokens: int  # sampled and thrown away
    scheduled_tokens: int  # positions planned
    finished: int  # choices, by stop or length
    aborted: int
    failed: int
    finishes: dict[Finish, int]  # choices by how they ended
    rejected: int
    preemptions: int
    yielded: int  # choices whose slot went to a client that had none; these are no preemptions
    waiting_clients: int  # that have anything in the queue
    stale_results: int  # of another epoch
    condemned: int  # choices that ended because executors died of them
    drafts: int  # rows that carried any
    draft_tokens: int
    accepted_tokens: int  # of those, the ones that stand in an output
    accepted_at: tuple[int, ...]  # the same by place in the draft, from 0
    acceptance: AcceptanceStatistics
    looks: LookStatistics
    cost: CostStatistics
    guesses: GuessStatistics  # of the executors' own drafts
    draft_cost: DraftCostStatistics
    drain_rate: float  # choices ended per second, recent
    durations: DurationStatistics
    lengths: LengthStatistics


@dataclass(slots=True)
class Totals:
    """Counters since start, written by whoever sees the event."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefix_lookups: int = 0
    prefix_hits: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    surplus_tokens: int = 0
    scheduled_tokens: int = 0
    finishes: Counter[Finish] = field(default_factory=Counter)  # choices by how they ended
    rejected: int = 0
    preemptions: int = 0
    yielded: int = 0
    stale_results: int = 0
    condemned: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    ends: deque[tuple[float, int]] = field(default_factory=deque)  # (time, choices ended so far), every SAMPLE seconds

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
        """A request's first admission, and the tokens of its prompt that were there."""
        self.prefix_lookups += 1
        self.prefix_hits += cached > 0
        self.cached_tokens += cached

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """One row's drafts, and how many of them stand."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1

    def tick(self, now: float) -> None:
        if not self.ends or now - self.ends[-1][0] >= SAMPLE:
            self.ends.append((now, self.ended))
            while now - self.ends[0][0] > WINDOW:
                self.ends.popleft()

    @property
    def drain_rate(self) -> float:
        if len(self.ends) < 2:
            return 0.0
        (begin, before), (end, after) = self.ends[0], self.ends[-1]
        return (after - before) / (end - begin)
