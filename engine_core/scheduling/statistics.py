"""Counters of the scheduler, and the record that others read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from engine_core.kv.pool import PoolStatistics
from engine_core.kv.prefix import PrefixStatistics
from engine_core.scheduling.forecast import ForecastStatistics
from engine_core.speculation.acceptance import AcceptanceStatistics
from engine_core.speculation.cost import CostStatistics
from engine_core.speculation.draft_cost import DraftCostStatistics
from engine_core.speculation.guesses import GuessStatistics

WINDOW = 10.0  # seconds over which the drain rate is taken
SAMPLE = 0.25


class SchedulerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment. Totals count since start and survive a new epoch."""

    epoch: int
    step: int  # last applied
    in_flight: int
    running: int
    waiting: int
    slots: int
    pool: PoolStatistics
    prefix: PrefixStatistics
    forecast: ForecastStatistics
    requests: int  # alive
    prompt_tokens: int
    cached_tokens: int  # prompt tokens of first admissions that were not computed
    reused_tokens: int  # all positions that were not computed, also after preemption and among choices
    output_tokens: int
    surplus_tokens: int  # sampled and thrown away
    scheduled_tokens: int  # positions planned
    finished: int  # choices, by stop or length
    aborted: int
    failed: int
    rejected: int
    preemptions: int
    stale_results: int  # of another epoch
    condemned: int  # choices that ended because executors died of them
    drafts: int  # rows that carried any
    draft_tokens: int
    accepted_tokens: int  # of those, the ones that stand in an output
    accepted_at: tuple[int, ...]  # the same by place in the draft, from 0
    acceptance: AcceptanceStatistics
    cost: CostStatistics
    guesses: GuessStatistics  # of the executors' own drafts
    draft_cost: DraftCostStatistics
    drain_rate: float  # choices ended per second, recent


@dataclass(slots=True)
class Totals:
    """Counters since start, written by whoever sees the event."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    surplus_tokens: int = 0
    scheduled_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    rejected: int = 0
    preemptions: int = 0
    stale_results: int = 0
    condemned: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    ends: deque[tuple[float, int]] = field(default_factory=deque)  # (time, choices ended so far), every SAMPLE seconds

    @property
    def ended(self) -> int:
        return self.finished + self.aborted + self.failed

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
