"""Bitmasks of the steps in flight, filled beside the loop, one step after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor

import msgspec

from penstock.engine_core.grammar.masks import FilledMasks, MaskStatistics, MaskStore
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.engine_core.histogram import Histogram, HistogramStatistics
from penstock.engine_core.scheduling.plan_builder import MaskWork
from penstock.protocol.steps import StepMasks
from penstock.services.metrics.definitions import PART
from penstock.services.scheduler.background_jobs import BackgroundJobs

SLOW = 0.01  # seconds of a step's masks, and
SLOW_ROW = 0.0001  # of each of its rows: after a slower step rows are filled and measured one by one
NOTHING = MaskStatistics(0, 0, 0, 0, 0)


class BitmaskStatistics(msgspec.Struct, frozen=True):
    """Totals of this epoch's store, and of the time that filling it took since start."""

    store: MaskStatistics
    rows: int  # constrained rows of steps since start
    seconds: float
    slowest: float  # seconds of one step's masks
    steps: HistogramStatistics  # seconds of each step's masks


class BitmaskFiller:
    """Owner of the mask store of one epoch. `thread` runs one job at a time, so masks come in the order of steps."""

    def __init__(self, tokens: GrammarTokens | None, thread: Executor, fillers: int) -> None:
        self.jobs: BackgroundJobs[MaskWork, tuple[FilledMasks, float]] = BackgroundJobs(thread)
        self._tokens = tokens
        self._fillers = fillers
        self._store: MaskStore | None = None
        self._ready: list[tuple[MaskWork, FilledMasks, float]] = []  # steps whose masks were all in the store
        self._rows = 0
        self._seconds = self._slowest = 0.0
        self._steps = Histogram(PART)
        self._was_slow = False  # the last step whose masks are done

    def renew(self, places: int) -> None:
        """New executors with empty stores of `places` masks. Masks that are still being filled are for the old ones."""
        if self._store is not None:
            self._store.close()
        self._store = MaskStore(self._tokens, places, self._fillers) if self._tokens is not None and places else None

    @property
    def most(self) -> int:
        """Most masked entries of one step."""
        return 0 if self._store is None else self._store.most

    def start(self, work: MaskWork, applied: int) -> None:
        """Fill a step's masks; steps up to `applied` are over. Where all of them are in the store, that is done now."""
        assert self._store is not None
        if not self.jobs.running:
            began = time.perf_counter()
            filled = self._store.known(work.step, work.rows)
            if filled is not None:
                self._ready.append((work, filled, time.perf_counter() - began))
                return
        clock = time.process_time if self._was_slow else None
        self.jobs.start(work, timed_fill, self._store, work, applied, clock)

    def finished(self) -> list[StepMasks]:
        """Masks that are done. Raises the error of a whole step, which ends the process."""
        found = []
        done = [(work, *future.result()) for work, future in self.jobs.collect()]
        done, self._ready = self._ready + done, []
        for work, filled, seconds in done:
            found.append(step_masks(work, filled))
            self._rows += len(work.rows)
            self._seconds += seconds
            self._steps.observe(seconds)
            self._slowest = max(self._slowest, seconds)
            self._was_slow = seconds > SLOW + SLOW_ROW * len(work.rows)
        return found

    def statistics(self) -> BitmaskStatistics:
        store = NOTHING if self._store is None else self._store.statistics()
        return BitmaskStatistics(store, self._rows, self._seconds, self._slowest, self._steps.statistics())


def timed_fill(
    store: MaskStore, work: MaskWork, applied: int, clock: Callable[[], float] | None
) -> tuple[FilledMasks, float]:
    began = time.perf_counter()
    filled = store.fill(work.step, applied, work.rows, clock)
    return filled, time.perf_counter() - began


def step_masks(work: MaskWork, filled: FilledMasks) -> StepMasks:
    return StepMasks(
        step=work.step,
        epoch=work.epoch,
        entries=filled.entries,
        slots=filled.slots,
        new_slots=filled.new_slots,
        bits=filled.bits,
    )
