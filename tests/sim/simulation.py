"""A whole run: scheduler, fake executor, clients and a virtual clock, in one loop without threads."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.engine_core.scheduling.lifecycle import SUSPICIOUS
from penstock.engine_core.scheduling.peak_estimate import Forecast
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.engine_core.scheduling.statistics import SchedulerStatistics
from penstock.protocol.messages import StopHit
from penstock.protocol.steps import StepResult
from tests.sim.executor import FakeExecutor
from tests.sim.grammar import FakeGuide
from tests.sim.idle import is_idle
from tests.sim.lives import Life, World, scheduling_options
from tests.sim.masks import MaskDesk
from tests.sim.record import Record
from tests.sim.storage import Storage

CHECK_EVERY = 16  # turns


class Careless(Forecast):
    """Expects every choice to end with its next token."""

    def share(self, running: int) -> float:
        return 0.0


def check_accounts(scheduler: Scheduler) -> None:
    """What the slots' columns say of each KV group's blocks, against the tables."""
    state = scheduler._state
    slots, layout = state.slots, state.kv.layout
    tables = [sequence.blocks for sequence in slots.sequences if sequence is not None]
    held = [sum(block > 0 for table in tables for block in table[at :: layout.groups]) for at in range(layout.groups)]
    assert list(scheduler.statistics().group_blocks) == held
    for slot in slots.occupied().tolist():
        sequence = slots.sequences[slot]
        assert sequence is not None
        foreign = [0, 0]
        for place, block in enumerate(sequence.blocks):
            column, window = place // layout.groups, layout.windows[place % layout.groups]
            kinds = [kind for kind, (own, _) in enumerate(layout.kinds) if own == window]
            behind = int(slots.blocks.behind[kinds[0], slot]) if kinds else 0
            assert (block == 0) == (column < behind), "given back, or held"
            foreign[window > 0] += block > 0 and int(state.kv.owners[block]) != sequence.life
        assert int(slots.blocks.held[slot]) == sum(block > 0 for block in sequence.blocks)
        assert [int(slots.blocks.borrowed[slot]), int(slots.blocks.lent[slot])] == foreign


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    record: Record
    statistics: SchedulerStatistics
    turns: int
    masks: int  # entries that were masked
    beside: int  # masks that no step waited for


class Simulation:
    """One run. Aborts, stop strings, late deliveries and restarts happen at random moments of the loop; and the
    executor dies of the plans whose numbers stand in `deaths`, counted over all epochs from 0."""

    def __init__(
        self, world: World, lives: list[Life], rng: random.Random, deaths: frozenset[int] = frozenset()
    ) -> None:
        self.deaths = deaths
        self.plans = 0
        self.world, self.lives, self.rng = world, lives, rng
        self.clock, self.record = Clock(), Record()
        self.scheduler = Scheduler(replace(scheduling_options(world), epoch=1))
        if world.careless:
            self.scheduler._state.forecast = Careless(0.0)
        self.natures = {life.message.sampling.seed: life.nature for life in lives}
        self.storage = Storage(world.storage_trouble, world.kv_store)
        self.executor = FakeExecutor(world, 1, self.natures, self.storage)
        self.results: deque[StepResult] = deque()
        self.desk = MaskDesk()
        self.stale: list[StepResult] = []
        self.aborts: list[tuple[float, int]] = []
        self.by_id = {life.message.id: life for life in lives}
        self.aborted: set[int] = set()
        self.stopped: set[int] = set()
        self.submitted: set[int] = set()
        self.forgotten: set[int] = set()  # their source left before everything was delivered
        self.hits: deque[StopHit] = deque()
        self.turns = 0

    def run(self) -> Outcome:
        """Until every life is over and everything is delivered; then nothing may be left anywhere."""
        coming = deque(self.lives)
        while coming or self.scheduler.unfinished or self._moving:
            self._arrive(coming)
            self._interfere()
            planned = self._step()
            self._deliver(self.world.lazy)
            if not planned and not coming:
                self._deliver(0.0)
            if coming and not planned and not self.scheduler.unfinished:
                self.clock.now = max(self.clock.now, coming[0].arrival)
            self.clock.advance(self.rng.random())
            self.turns += 1
            if self.turns % CHECK_EVERY == 0:
                self._check()
        self._deliver(0.0)
        self._check()
        return self._close()

    @property
    def _moving(self) -> bool:
        """Whether blocks are on their way anywhere, or are about to be."""
        beside = self.executor.host.storage.busy or bool(self.scheduler.copy_messages())
        return beside or not self.scheduler.settled

    def _arrive(self, coming: deque[Life]) -> None:
        while coming and coming[0].arrival <= self.clock.now:
            life = coming.popleft()
            automaton = life.message.automaton
            guide = None if automaton is None else FakeGuide(automaton)
            self.scheduler.submit(life.message, life.source, self.clock.now, guide)
            self.submitted.add(life.message.id)
            if life.abort_after is not None:
                heapq.heappush(self.aborts, (self.clock.now + life.abort_after, life.message.id))

    def _interfere(self) -> None:
        while self.aborts and self.aborts[0][0] <= self.clock.now:
            _, number = heapq.heappop(self.aborts)
            self.aborted.add(number)
            self.scheduler.abort(number)
        while self.hits and self.rng.random() < 0.7:
            self.scheduler.stop_hit(self.hits.popleft())
        if self.rng.random() < self.world.leaves:
            source = self.rng.randrange(self.world.sources)
            self.scheduler.forget(source)
            gone = [number for number in self.submitted if self.by_id[number].source == source]
            self.forgotten |= {number for number in gone if not self.record.complete(self.by_id[number])}
        if self.rng.random() < self.world.restarts:
            self._die()

    def _die(self) -> None:
        """The executor is gone, and its successor is there."""
        epoch = self.executor.epoch + 1
        self.stale += self.results
        self.results.clear()
        self.executor = FakeExecutor(self.world, epoch, self.natures, self.storage)
        self.desk.clear()
        self.scheduler.restart(epoch, self.clock.now)
        self._check()

    def _step(self) -> bool:
        """Fill the pipeline, then apply one result. False when there was nothing at all to do."""
        busy = False
        while self.scheduler.in_flight < self.world.depth and (not busy or self.rng.random() < 0.8):
            plan = self.scheduler.plan(self.clock.now)
            if plan is None:
                break
            busy = True
            self.plans += 1
            if self.plans - 1 in self.deaths:
                self._die()
                break
            self.results += self.executor.run(plan)
            self.executor.hosts.take(self.scheduler)
            self.executor.encoders.take(self.scheduler)
            self.executor.host.take(self.scheduler, self.rng)
            self.desk.collect(self.scheduler)
            if self.plans % 2:
                self.desk.make_beside()
            if self.rng.random() < 0.1:
                self._interfere()
        while self.desk and (not self.results or self.rng.random() < 0.5):
            masks = self.desk.make()
            self.results += self.executor.mask(masks)
            busy = True
        busy |= self.executor.hosts.take(self.scheduler)
        if not busy or self.rng.random() < 0.2:
            busy |= self.executor.hosts.say(self.scheduler, self.clock.now, self.rng)
        busy |= self.executor.encoders.take(self.scheduler)
        if self.world.encoder_rows and (not busy or self.rng.random() < 0.2):
            busy |= self.executor.encoders.say(self.scheduler, self.clock.now, self.rng)
        busy |= self.executor.host.take(self.scheduler, self.rng)
        while self.world.host_blocks and (not busy or self.rng.random() < 0.8):
            if not self.executor.host.say(self.scheduler, self.clock.now, self.rng):
                break
            busy = True
        assert busy or self.results or not self.scheduler.unfinished, "nothing runs, nothing is in flight, lives wait"
        if self.results and (not busy or self.rng.random() < 0.9):
            result = self.results.popleft()
            if self.rng.random() < 0.5:
                self.scheduler.follow(result)
                self.desk.collect(self.scheduler)
            self.scheduler.apply(result, self.clock.now)
            self.executor.applied(result.step)
            self.desk.collect(self.scheduler)
            busy = True
        if self.stale and self.rng.random() < 0.5:
            self.scheduler.apply(self.stale.pop(), self.clock.now)
        return busy

    def _deliver(self, lazy: float) -> None:
        for source in self.scheduler.undelivered():
            if self.rng.random() < lazy:
                continue
            for message in self.scheduler.outputs(source, limit=self.rng.choice((1, 2, 100)) if lazy else 1 << 30):
                for number, choice in self.record.take(message):
                    life = self.by_id[number]
                    assert life.source == source
                    assert number not in self.forgotten
                    tokens = self.record.seen[number, choice].tokens
                    if choice or number in self.stopped or life.stop_at is None or len(tokens) < life.stop_at:
                        continue
                    self.stopped.add(number)
                    self.hits.append(StopHit(number, 0, life.stop_at))

    def _check(self) -> None:
        report = self.scheduler.check(thorough=True)
        assert report.ok, report
        pool = self.scheduler.statistics().pool
        assert pool.free + pool.idle + pool.held == pool.total == self.world.blocks
        check_accounts(self.scheduler)

    def _close(self) -> Outcome:
        stand = self.scheduler.statistics()
        assert (stand.running, stand.waiting, stand.requests, stand.in_flight) == (0, 0, 0, 0)
        assert stand.pool.held == 0
        assert is_idle(self.scheduler), "something is left in a map"
        convicted = self.world.restarts > 0 or len(self.deaths) > SUSPICIOUS
        for life in self.lives:
            number = life.message.id
            if number in self.forgotten:
                continue
            self.record.verify(life, self.world, number in self.aborted, number in self.stopped, convicted)
        choices = sum(
            not life.over(choice) for life in self.lives if not life.invalid for choice in range(life.message.n)
        )
        assert stand.finished + stand.aborted + stand.failed == choices
        assert stand.rejected == sum(life.invalid for life in self.lives)
        return Outcome(self.record, stand, self.turns, self.desk.made, self.desk.beside)
