"""A request that kills executors is found, ended and refused; its neighbours lose nothing but time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.engine_core.scheduling.lifecycle import KILLER, SUSPICIOUS
from penstock.engine_core.scheduling.validation import POISONED
from penstock.protocol.messages import Finish
from penstock.protocol.steps import StepPlan
from tests.sim.executor import ints
from tests.sim.idle import is_idle
from tests.sim.server import ROOMY, Server

POISON = 63  # the prompt that holds it kills, if not at once then later


class Ward:
    """A server whose executors die of certain requests."""

    def __init__(self, depth: int = 2, patience: int = 0, **world: int) -> None:
        self.server = Server(replace(ROOMY, **world))
        self.depth = depth
        self.patience = patience  # decode steps that a poisoned slot survives
        self.deaths = 0
        self.alone: list[bool] = []  # whether the request that killed ran alone, by death
        self._sick: dict[int, int] = {}  # slot → tokens that its choice had and still may get
        self._decoding: set[int] = set()

    def poisonous(self, plan: StepPlan) -> bool:
        """Whether an executor that runs this plan dies of it."""
        for start in plan.starts:
            tokens = [token for (token,) in ints(start.token_ids)]
            self._sick.pop(start.slot, None)
            if POISON in tokens[: start.prompt_tokens]:
                self._sick[start.slot] = start.prompt_tokens + self.patience - len(tokens)
        self._decoding |= {slot for (slot,) in ints(plan.decode_on)}
        self._decoding -= {slot for (slot,) in ints(plan.decode_off)}
        rows = self._decoding | {slot for slot, _, _, sample in ints(plan.chunks, 4) if sample}
        for slot in rows & self._sick.keys():
            self._sick[slot] -= 1
        return any(self._sick[slot] < 0 for slot in rows & self._sick.keys())

    def die(self) -> None:
        server = self.server
        self.deaths += 1
        self.alone.append(server.scheduler.statistics().running == 1)
        self._sick.clear()
        self._decoding.clear()
        server.results.clear()
        server.desk.clear()
        server.executor = server.new_executor(server.scheduler.epoch + 1)
        server.scheduler.restart(server.scheduler.epoch + 1, 0.0)

    def turn(self) -> None:
        """Keep the pipeline full, apply one result; or die."""
        server = self.server
        while server.scheduler.in_flight < self.depth:
            plan = server.scheduler.plan(0.0)
            if plan is None:
                break
            if self.poisonous(plan):
                self.die()
                return
            server.results += server.executor.run(plan)
            server.mask()
        if server.results:
            server.apply()

    def run(self) -> None:
        while self.server.scheduler.unfinished or self.server.scheduler.in_flight:
            self.turn()
        self.server.deliver()
        assert is_idle(self.server.scheduler)
        assert self.server.scheduler.check(thorough=True).ok

    def whole(self, number: int) -> None:
        """The request has every token it must have."""
        self.server.record.verify(self.server.lives[number], self.server.world, aborted=False, stopped=False)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("patience", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_it_ends_and_the_others_lose_nothing(depth: int, patience: int, n: int) -> None:
    ward = Ward(depth, patience)
    before = [ward.server.submit([token, 5], max_tokens=12) for token in (3, 4)]
    killer = ward.server.submit([7, POISON], max_tokens=12, n=n)
    after = [ward.server.submit([token, 6], max_tokens=12) for token in (5, 8, 9, 10)]
    ward.run()
    assert ward.alone[-1]
    assert not any(ward.alone[:-1])
    assert ward.deaths == SUSPICIOUS + 1
    for choice in range(n):
        seen = ward.server.seen(killer, choice)
        assert (seen.finish, seen.error) == (Finish.ERROR, KILLER)
    for number in before + after:
        ward.whole(number)
    assert ward.server.scheduler.statistics().poisoned == 1


def test_two_of_them_are_tried_one_after_the_other() -> None:
    ward = Ward()
    killers = [ward.server.submit([token, POISON], max_tokens=4) for token in (7, 8)]
    other = ward.server.submit([5], max_tokens=12)
    ward.run()
    assert ward.deaths == SUSPICIOUS + 2
    assert [ward.server.seen(killer).error for killer in killers] == [KILLER] * 2
    ward.whole(other)


def test_the_like_of_it_is_refused_and_anything_else_is_not() -> None:
    ward = Ward()
    ward.server.submit([7, POISON])
    ward.run()
    again = ward.server.submit([7, POISON])
    other = ward.server.submit([7, 62])
    ward.run()
    assert ward.server.seen(again).error is None
    rejected = ward.server.record.rejected[again]
    assert (rejected.status, rejected.message, rejected.code) == (400, POISONED, "condemned")
    ward.whole(other)
    assert ward.deaths == SUSPICIOUS + 1


def test_deaths_of_another_cause_quarantine_no_request() -> None:
    """Killed from outside every few steps: who gets further in between is never tried."""
    ward = Ward()
    numbers = [ward.server.submit([token], max_tokens=40) for token in (3, 4, 5)]
    for _ in range(8):
        for _ in range(6):
            ward.turn()
        assert not ward.server.scheduler._state.quarantine
        ward.die()
    ward.run()
    for number in numbers:
        ward.whole(number)


def test_the_innocent_are_acquitted_after_a_few_tokens() -> None:
    ward = Ward()
    numbers = [ward.server.submit([token], max_tokens=30) for token in (3, 4, 5)]
    late = ward.server.submit([6] * 40, max_tokens=5)
    for _ in range(SUSPICIOUS):
        ward.turn()
        ward.die()
    state = ward.server.scheduler._state
    assert len(state.quarantine) == 4
    most = 0
    while state.quarantine:
        ward.turn()
        most = max(most, ward.server.scheduler.statistics().running if state.quarantine else 0)
    assert most == 1
    assert max(len(ward.server.seen(number).tokens) for number in numbers) < 8
    ward.run()
    for number in [*numbers, late]:
        ward.whole(number)


def test_one_that_waits_for_its_trial_may_leave() -> None:
    ward = Ward()
    numbers = [ward.server.submit([token], max_tokens=30) for token in (3, 4, 5)]
    for _ in range(SUSPICIOUS):
        ward.turn()
        ward.die()
    ward.turn()
    scheduler = ward.server.scheduler
    scheduler.abort(numbers[0])
    scheduler.abort(numbers[2])
    ward.run()
    ward.whole(numbers[1])
    assert [ward.server.seen(number).finish for number in (numbers[0], numbers[2])] == [Finish.ABORT] * 2


def test_one_that_waited_only_is_no_suspect() -> None:
    ward = Ward(slots=1)
    ward.server.submit([7, POISON])
    waits = ward.server.submit([3])
    ward.run()
    assert ward.server.seen(waits).finish == Finish.LENGTH
    assert np.array(ward.alone).all()
    assert ward.server.lives[waits].message.n == 1
