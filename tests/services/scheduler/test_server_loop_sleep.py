"""Executors sleep while nobody asks for anything, and wake for whoever does; each request ends exactly once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.engine_core.scheduling.executor_group import MISSING_LIMIT
from penstock.protocol.config import Config
from penstock.protocol.control import (
    AskState,
    Control,
    Controlled,
    EngineStatus,
    FlushCache,
    Pause,
    PauseMode,
    Resume,
    SleepEngine,
    WakeEngine,
)
from penstock.protocol.engine_config import ModelConfig, SchedulerConfig
from penstock.protocol.links import Role
from penstock.protocol.messages import Abort, Finish, Rejected, Sampling, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import ExecutorAsleep, Sleep, StepPlan, Wake
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import SchedulerLoop
from tests.services.scheduler.fakes import WINDOW, FakeExecutor, FakePort, Transcript, without_grammars

TIMEOUT = 10.0  # seconds


class Sleeper(FakeExecutor):
    """An executor that does what it is told as soon as it hears it, but for loading, which takes time."""

    loads = False
    kept = 0  # bytes of weights that it keeps

    def hear(self) -> bool:
        """Whether it has gone to sleep or begun to load; then it is another peer."""
        asleep, woken = self.port.take(Sleep, self.peer), self.port.take(Wake, self.peer)
        assert not (asleep and woken)
        if asleep or woken:
            self.port.leave(self.peer)
            self.plans.clear()
            self.loads = bool(woken)
        if asleep:
            self.peer = self.port.join(self.peer.index)
            self.kept = 0 if asleep[-1].discard else self.kept
            self.port.arrives(self.peer, ExecutorAsleep(self.kept))
        return bool(asleep or woken)

    def loaded(self) -> None:
        assert self.loads
        self.loads = False
        self.peer = self.port.join(self.peer.index)
        self.ready()


class Bench:
    """A loop between one tokenizer and the executors of a group, with a clock that tests turn."""

    def __init__(self, size: int = 1, timeout: float = TIMEOUT) -> None:
        self.now = 1000.0
        self.tokens, self.steps = FakePort(Role.TOKENIZER), FakePort(Role.EXECUTOR)
        config = Config(
            model=ModelConfig(max_num_seqs=4, max_num_batched_tokens=64, tensor_parallel_size=size),
            scheduler=SchedulerConfig(idle_timeout=timeout),
        )
        self.loop = SchedulerLoop(config, ModelFacts(256, 4096), self.tokens, self.steps, *without_grammars(), self.now)
        self.tokenizer = self.tokens.join()
        self.executors = [Sleeper(self.steps, index) for index in range(size)]
        self.transcript = Transcript()
        for executor in self.executors:
            executor.ready()
        self.iterate()

    def iterate(self, seconds: float = 0.001) -> None:
        self.now += seconds
        self.loop.iterate(self.now, 5000.0 + self.now)

    def submit(self, number: int, rid: str = "", **sampling) -> None:
        ids = np.arange(20, dtype=np.int32).tobytes()
        request = SubmitTokens(id=number, token_ids=ids, sampling=Sampling(**{"max_tokens": 5, **sampling}), rid=rid)
        self.tokens.arrives(self.tokenizer, request)

    def hear(self) -> list[bool]:
        return [executor.hear() for executor in self.executors]

    def status(self) -> EngineStatus:
        return self.tokens.take(EngineStatus, self.tokenizer)[-1]

    def operator(self, message: Control) -> None:
        self.tokens.arrives(self.tokenizer, message)
        self.iterate()

    def answers(self) -> dict[int, Controlled]:
        return {answer.id: answer for answer in self.tokens.take(Controlled, self.tokenizer)}

    def step(self) -> None:
        plans = [executor.collect() for executor in self.executors]
        assert all(found == plans[0] for found in plans)
        for plan in plans[0]:
            self.executors[0].answer(plan)
        self.iterate()
        self.transcript.read(self.tokens.take(TokenBatch, self.tokenizer))
        self.tokenizer.credit = WINDOW

    def run(self) -> None:
        for _ in range(100):
            if not self.loop.unfinished and not self.steps.arrivals:
                return
            self.step()
        raise AssertionError("requests do not end")

    def sleeps(self) -> None:
        self.iterate(TIMEOUT)
        assert all(self.hear())
        self.iterate()


@pytest.mark.parametrize("size", [1, 2])
def test_a_request_wakes_executors_that_sleep(size: int) -> None:
    bench = Bench(size)
    epoch = bench.loop.executors.epoch
    bench.sleeps()
    bench.iterate(3600.0)
    status = bench.status()
    assert (status.ready, status.sleeping, status.device != "") == (True, True, True)
    bench.submit(1)
    bench.iterate()
    assert all(bench.hear())
    bench.iterate(1.0)
    assert bench.loop.ready
    assert bench.steps.take(StepPlan) == []
    for executor in bench.executors:
        executor.loaded()
    bench.iterate()
    bench.run()
    assert bench.transcript.ends == {1: [Finish.LENGTH]}
    assert len(bench.transcript.tokens[1]) == 5
    assert not bench.status().sleeping
    assert bench.loop.executors.epoch == epoch + 1


def test_without_the_option_they_never_sleep() -> None:
    bench = Bench(timeout=0.0)
    bench.iterate(1e6)
    assert bench.hear() == [False]


def test_what_runs_keeps_them_awake_and_the_time_counts_from_its_end() -> None:
    bench = Bench()
    bench.iterate(TIMEOUT - 1.0)
    bench.submit(1)
    bench.iterate(0.5)
    bench.iterate(2 * TIMEOUT)
    assert bench.hear() == [False]
    bench.run()
    bench.iterate(TIMEOUT - 0.1)
    assert bench.hear() == [False]
    bench.iterate(0.2)
    assert bench.hear() == [True]


@pytest.mark.parametrize("heard", [True, False])
def test_a_request_that_comes_while_they_fall_asleep_is_served(heard: bool) -> None:
    bench = Bench()
    bench.iterate(TIMEOUT)
    if heard:
        assert bench.hear() == [True]
    bench.submit(1)
    bench.iterate()
    if not heard:
        assert bench.hear() == [True], "to sleep, since it was told first"
        bench.iterate()
    assert bench.hear() == [True]
    bench.executors[0].loaded()
    bench.iterate()
    bench.run()
    assert bench.transcript.ends == {1: [Finish.LENGTH]}


def test_one_that_is_started_again_meanwhile_is_sent_to_sleep() -> None:
    bench = Bench()
    bench.sleeps()
    bench.steps.leave(bench.executors[0].peer)
    bench.executors[0] = Sleeper(bench.steps)
    bench.executors[0].ready()
    bench.iterate()
    assert bench.hear() == [True]
    bench.iterate()
    assert bench.loop.executors.all_asleep


def test_one_that_cannot_be_told_begins_its_session_anew() -> None:
    bench = Bench()
    bench.executors[0].peer.credit = 0
    bench.iterate(TIMEOUT)
    assert bench.steps.peers == ()


def test_the_scheduler_after_one_that_was_killed_wakes_those_that_sleep() -> None:
    bench = Bench()
    bench.sleeps()
    sleeping = bench.executors[0]
    bench = Bench(size=1)
    bench.steps.leave(bench.executors[0].peer)
    sleeping.port = bench.steps
    sleeping.peer = bench.steps.join()
    bench.executors = [sleeping]
    bench.steps.arrives(sleeping.peer, ExecutorAsleep())
    bench.iterate()
    assert bench.hear() == [True]
    sleeping.loaded()
    bench.iterate()
    assert bench.loop.executors.complete


def test_an_abort_ends_a_request_that_waits_and_loading_goes_on() -> None:
    bench = Bench()
    bench.sleeps()
    bench.submit(1)
    bench.iterate()
    assert bench.hear() == [True]
    bench.tokens.arrives(bench.tokenizer, Abort(1))
    bench.iterate()
    assert bench.loop.unfinished == 0
    bench.executors[0].loaded()
    bench.iterate()
    assert bench.loop.executors.complete
    bench.sleeps()
    assert bench.loop.executors.all_asleep


def test_requests_do_not_wait_for_ever_for_one_that_does_not_wake() -> None:
    bench = Bench()
    bench.sleeps()
    bench.submit(1)
    bench.iterate()
    assert bench.hear() == [True]
    bench.iterate(MISSING_LIMIT)
    assert bench.loop.ready
    bench.iterate(2.0)
    bench.transcript.read(bench.tokens.take(TokenBatch, bench.tokenizer))
    assert bench.transcript.ends == {1: [Finish.UNAVAILABLE]}
    bench.iterate(0.3)
    assert not bench.loop.ready


def test_a_request_that_waits_is_waited_for_at_the_end() -> None:
    bench = Bench()
    bench.sleeps()
    bench.submit(1)
    bench.iterate()
    bench.loop.draining = True
    assert not bench.loop.drained
    assert bench.hear() == [True]
    bench.executors[0].loaded()
    bench.iterate()
    bench.run()
    assert bench.loop.drained


@pytest.mark.parametrize("size", [1, 2])
def test_the_operator_has_them_sleep_and_wake(size: int) -> None:
    bench = Bench(size, timeout=0.0)
    bench.operator(SleepEngine(1))
    assert bench.answers() == {}, "memory is not back yet"
    assert all(bench.hear())
    bench.iterate()
    bench.iterate()
    assert bench.answers() == {1: Controlled(1, asleep=True)}
    bench.operator(AskState(2))
    bench.operator(FlushCache(3))
    assert {number: found.asleep for number, found in bench.answers().items()} == {2: True, 3: True}
    bench.operator(WakeEngine(4))
    assert all(bench.hear())
    for executor in bench.executors[:-1]:
        executor.loaded()
    bench.iterate()
    bench.operator(AskState(5))
    assert {number: found.asleep for number, found in bench.answers().items()} == {5: False}
    bench.executors[-1].loaded()
    bench.iterate()
    bench.iterate()
    assert bench.answers() == {4: Controlled(4)}


@pytest.mark.parametrize("size", [1, 2])
def test_the_operator_has_them_keep_no_weights(size: int) -> None:
    bench = Bench(size, timeout=0.0)
    for executor in bench.executors:
        executor.kept = 100
    bench.operator(SleepEngine(1, discard=True))
    assert all(executor.port.take(Sleep, executor.peer) == [Sleep(discard=True)] for executor in bench.executors)


@pytest.mark.parametrize("late", [False, True])
def test_weights_that_are_kept_are_let_go_later(*, late: bool) -> None:
    """late: one of both has not fallen asleep when the operator asks for it."""
    bench = Bench(2)
    for executor in bench.executors:
        executor.kept = 100
    bench.iterate(TIMEOUT)
    first, second = bench.executors
    assert first.hear()
    if not late:
        assert second.hear()
        bench.iterate()
        bench.iterate()
        assert bench.status().kept_weight_bytes == 200
    bench.operator(SleepEngine(2, discard=True))
    if late:
        assert second.hear()
    bench.iterate()
    bench.iterate()
    assert 2 not in bench.answers(), "they are kept yet"
    for executor in bench.executors:
        assert bench.steps.take(Sleep, executor.peer) == [Sleep(discard=True)], "once"
        bench.steps.arrives(executor.peer, ExecutorAsleep())
    bench.iterate()
    bench.iterate()
    assert bench.answers()[2].asleep
    assert bench.status().kept_weight_bytes == 0


def test_the_operator_puts_no_request_aside() -> None:
    bench = Bench(timeout=0.0)
    bench.submit(1)
    bench.iterate()
    bench.operator(SleepEngine(1))
    assert "1 requests" in bench.answers()[1].error
    assert bench.hear() == [False]
    bench.run()
    assert bench.transcript.ends == {1: [Finish.LENGTH]}


def test_requests_that_a_pause_holds_sleep_and_go_on_behind_it() -> None:
    bench = Bench(timeout=0.0)
    bench.submit(1, max_tokens=9)
    bench.iterate()
    bench.step()
    said = len(bench.transcript.tokens[1])
    assert 0 < said < 9
    bench.operator(Pause(1, PauseMode.KEEP))
    while bench.loop.unfinished and 1 not in bench.answers():
        bench.step()
    bench.operator(SleepEngine(2))
    assert bench.hear() == [True]
    bench.iterate()
    bench.iterate(60.0)
    assert bench.answers()[2].asleep
    assert bench.hear() == [False]
    bench.operator(Resume(3))
    assert bench.hear() == [True]
    bench.executors[0].loaded()
    bench.iterate()
    bench.run()
    assert bench.transcript.ends == {1: [Finish.LENGTH]}
    assert len(bench.transcript.tokens[1]) == 9


def test_a_request_ends_a_sleep_of_the_operators() -> None:
    bench = Bench(timeout=0.0)
    bench.operator(SleepEngine(1))
    bench.hear()
    bench.iterate()
    bench.submit(1)
    bench.iterate()
    assert bench.hear() == [True]


def test_an_operator_who_wakes_in_vain_is_told() -> None:
    bench = Bench()
    bench.sleeps()
    bench.operator(WakeEngine(1))
    bench.hear()
    bench.iterate(MISSING_LIMIT + 2.0)
    bench.iterate()
    assert bench.answers()[1].error


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_around_the_timeout_each_request_ends_once(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(chance.choice((1, 2)))
    ends: dict[int, int] = {}
    slept = 0

    def look() -> None:
        for message in bench.tokens.take(Rejected, bench.tokenizer):
            ends[message.id] += 1
        bench.transcript.read(bench.tokens.take(TokenBatch, bench.tokenizer))
        bench.tokenizer.credit = WINDOW

    def turn(*, calm: bool) -> None:
        """Executors hear, load, or die."""
        nonlocal slept
        for place, executor in enumerate(bench.executors):
            if executor.loads:
                if calm or chance.random() < 0.3:
                    executor.loaded()
            elif calm or chance.random() < 0.8:
                slept += executor.hear()
            given_up = not (executor.loads or executor.peer in bench.steps.peers)
            if given_up or (not calm and chance.random() < 0.01):
                if executor.peer in bench.steps.peers:
                    bench.steps.leave(executor.peer)
                bench.executors[place] = Sleeper(bench.steps, place)
                bench.executors[place].ready()
        plans = [executor.collect() for executor in bench.executors if not executor.loads]
        for plan in plans[0] if plans else []:
            if plan.epoch == bench.loop.executors.epoch and not bench.executors[0].loads:
                bench.executors[0].answer(plan)

    for _ in range(400):
        if chance.random() < 0.1:
            ends[len(ends) + 1] = 0
            bench.submit(len(ends), max_tokens=chance.randint(1, 4))
        if ends and chance.random() < 0.02:
            bench.tokens.arrives(bench.tokenizer, Abort(chance.randint(1, len(ends))))
        turn(calm=False)
        bench.iterate(chance.choice((0.001, 0.001, 0.3, TIMEOUT - 0.01, TIMEOUT)))
        look()
    for _ in range(200):
        turn(calm=True)
        bench.iterate()
        look()
    assert bench.loop.unfinished == 0
    for number in ends:
        ends[number] += len(bench.transcript.ends.get(number, []))
    assert ends == dict.fromkeys(ends, 1)
    assert slept > 4
    assert bench.loop.statistics().faults == 0
