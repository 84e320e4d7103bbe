"""Bitmasks of the steps in flight, filled beside the loop, one step after the other; and those that no step waits for.
A step whose masks will be there sooner than a thread could begin with them has them filled at once.

The store belongs to one thread at a time: to that of steps while one of them is being filled, to the loop otherwise. A
guide that is lent to a mask beside the steps is nobody else's until that is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import NamedTuple

import msgspec

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.masks import FilledMasks, MaskStore
from penstock.engine_core.grammar.states import State
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.engine_core.histogram import Histogram, HistogramStatistics
from penstock.engine_core.scheduling.plan_builder import MaskWork
from penstock.protocol.steps import StepMasks
from penstock.services.metrics.definitions import PART
from penstock.services.scheduler.background_jobs import BackgroundJobs

SLOW = 0.01  # seconds of a step's masks, and
SLOW_ROW = 0.0001  # of each of its rows: after a slower step rows are filled and measured one by one


class BitmaskStatistics(msgspec.Struct, frozen=True):
    """Totals since start."""

    rows: int  # constrained rows of steps
    seconds: float
    steps: HistogramStatistics  # seconds of each step's masks


class Lent(NamedTuple):
    """A guide whose next mask is made beside the steps."""

    guide: Guide
    spot: State
    store: MaskStore


class BitmaskFiller:
    """Owner of the mask store of one epoch. `thread` runs one job at a time, so masks come in the order of steps.
    `threads` make those that no step waits for."""

    def __init__(self, tokens: GrammarTokens | None, thread: Executor, threads: Executor, fillers: int) -> None:
        self.jobs: BackgroundJobs[MaskWork, tuple[FilledMasks, float]] = BackgroundJobs(thread)
        self.beside: BackgroundJobs[Lent, tuple[bytearray, float]] = BackgroundJobs(threads)
        self._lent: dict[Guide, Future[tuple[bytearray, float]]] = {}
        self._coming: set[State] = set()  # whose masks these are
        self._made: list[tuple[Lent, bytearray]] = []  # wait for the store
        self._tokens = tokens
        self._fillers = fillers
        self._store: MaskStore | None = None
        self._ready: list[tuple[MaskWork, FilledMasks, float]] = []  # steps whose masks were filled at once
        self._rows = 0
        self._seconds = 0.0
        self._steps = Histogram(PART)
        self._was_slow = False  # the last step whose masks are done
        self._beside_slow = False  # the last mask that was made beside the steps
        self._applied = 0  # steps up to this one are over

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
        """Fill a step's masks; steps up to `applied` are over."""
        assert self._store is not None
        self._applied = applied
        lent = [self._lent[row.guide] for row in work.rows if row.guide in self._lent] if self._lent else []
        if not (self.jobs.running or lent):
            began = time.perf_counter()
            filled = self._store.soon(work.step, applied, work.rows)
            if filled is not None:
                self._ready.append((work, filled, told(filled, began)))
                return
        clock = time.process_time if self._was_slow else None
        self.jobs.start(work, timed_fill, self._store, work, applied, clock, lent)

    def prepare(self, guides: list[Guide]) -> None:
        """Make the next masks of these guides, beside the steps: they are `ready` when these have been collected."""
        for guide in guides:
            assert self._store is not None
            lent = Lent(guide, guide.spot, self._store)
            if not guide.lent and lent.spot not in self._coming:
                guide.lent = True
                self._coming.add(lent.spot)
                clock = time.process_time if self._beside_slow else None
                self._lent[guide] = self.beside.start(lent, timed_make, lent.store, guide, clock)

    def finished(self) -> list[StepMasks]:
        """Masks that are done. Raises the error of a whole step, which ends the process."""
        found: list[StepMasks] = []
        if not (self._ready or self._made or self.jobs.running or self.beside.running):
            return found
        for lent, made in self.beside.collect():
            mask, seconds = made.result()
            self._seconds += seconds
            self._beside_slow = seconds > SLOW
            lent.guide.lent = False
            del self._lent[lent.guide]
            self._made.append((lent, mask))
        done = [(work, *future.result()) for work, future in self.jobs.collect()]
        done, self._ready = self._ready + done, []
        for work, filled, seconds in done:
            found.append(step_masks(work, filled))
            self._rows += len(work.rows)
            self._seconds += seconds
            self._steps.observe(seconds)
            self._was_slow = seconds > SLOW + SLOW_ROW * len(work.rows)
        if not self.jobs.running:
            for lent, mask in self._made:
                self._coming.remove(lent.spot)
                if lent.store is self._store and not lent.guide.failed:
                    lent.store.keep(lent.spot, mask, self._applied)
            self._made.clear()
        return found

    def statistics(self) -> BitmaskStatistics:
        return BitmaskStatistics(self._rows, self._seconds, self._steps.statistics())


def timed_fill(
    store: MaskStore,
    work: MaskWork,
    applied: int,
    clock: Callable[[], float] | None,
    lent: Iterable[Future[tuple[bytearray, float]]],
) -> tuple[FilledMasks, float]:
    """Fill a step's masks, behind those that its guides are lent to."""
    wait(lent)
    began = time.perf_counter()
    filled = store.fill(work.step, applied, work.rows, clock)
    return filled, told(filled, began)


def told(filled: FilledMasks, began: float) -> float:
    """The seconds that masks took; the guides that waited for them are told."""
    seconds = time.perf_counter() - began
    for guide in filled.late:
        guide.took(seconds, filled.made)
    return seconds


def timed_make(store: MaskStore, guide: Guide, clock: Callable[[], float] | None) -> tuple[bytearray, float]:
    began = time.perf_counter()
    filled = store.make(guide, clock)
    guide.seconds = time.perf_counter() - began
    return filled, guide.seconds


def step_masks(work: MaskWork, filled: FilledMasks) -> StepMasks:
    return StepMasks(
        step=work.step,
        epoch=work.epoch,
        entries=filled.entries,
        slots=filled.slots,
        new_slots=filled.new_slots,
        bits=filled.bits,
    )
