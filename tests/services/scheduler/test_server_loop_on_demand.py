"""A scheduler of one of several models: its executors load and leave when they are told to, and requests wait."""

from __future__ import annotations

import json

import pytest

from penstock.engine_core.scheduling.executor_group import MISSING_LIMIT
from penstock.protocol.config import Config, RunConfig
from penstock.protocol.control import AskState, Controlled, FlushCache, Resume, SleepEngine, WakeEngine
from penstock.protocol.engine_config import ModelConfig, SchedulerConfig
from penstock.protocol.links import Role
from penstock.protocol.messages import Finish, Rejected
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import ExecutorAsleep
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import SchedulerLoop
from tests.services.scheduler.fakes import FakePort, Transcript, without_grammars
from tests.services.scheduler.test_server_loop_sleep import Bench, Sleeper

MODELS = json.dumps({"a": {}, "b": {}})


class OnDemand(Bench):
    """A loop whose executors wait, as each of several models' do at the start."""

    def __init__(
        self, size: int = 1, *, joins: bool = True, idle_timeout: float = 0.0, max_queue_time: float = 0.0
    ) -> None:
        self.now = 1000.0
        self.tokens, self.steps = FakePort(Role.TOKENIZER), FakePort(Role.EXECUTOR)
        config = Config(
            model=ModelConfig(max_num_seqs=4, max_num_batched_tokens=64, tensor_parallel_size=size),
            scheduler=SchedulerConfig(idle_timeout=idle_timeout, max_queue_time=max_queue_time),
            run=RunConfig(models=MODELS, for_model="a"),
        )
        self.loop = SchedulerLoop(config, ModelFacts(256, 4096), self.tokens, self.steps, *without_grammars(), self.now)
        self.tokenizer = self.tokens.join()
        self.executors = [Sleeper(self.steps, index) for index in range(size)]
        self.transcript = Transcript()
        if joins:
            for executor in self.executors:
                self.steps.arrives(executor.peer, ExecutorAsleep())
        self.iterate()

    def load(self) -> None:
        self.operator(WakeEngine(900))
        assert all(self.hear())
        for executor in self.executors:
            executor.loaded()
        self.iterate()
        self.iterate()
        assert self.answers()[900].error == ""


@pytest.mark.parametrize("size", [1, 2])
def test_requests_wait_until_somebody_has_it_loaded(size: int) -> None:
    bench = OnDemand(size)
    bench.submit(1)
    bench.iterate()
    bench.iterate(3600.0)
    assert bench.hear() == [False] * size, "the memory may be another model's"
    status = bench.status()
    assert (status.ready, status.asleep, status.loaded, status.demand) == (True, True, False, 1)
    bench.load()
    bench.run()
    assert bench.transcript.ends == {1: [Finish.LENGTH]}
    bench.iterate(1.0)
    status = bench.status()
    assert (status.asleep, status.sleeping, status.loaded, status.demand) == (False, False, True, 0)
    assert status.load_seconds > 0


def test_it_is_not_asleep_before_each_executor_has_said_so() -> None:
    bench = OnDemand(2, joins=False)
    assert not bench.status().asleep
    bench.steps.arrives(bench.executors[0].peer, ExecutorAsleep())
    bench.iterate(1.0)
    assert not bench.status().asleep
    bench.steps.arrives(bench.executors[1].peer, ExecutorAsleep())
    bench.iterate(1.0)
    assert bench.status().asleep


@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_what_runs_ends_or_goes_on_later_and_what_waits_waits(grace: float) -> None:
    bench = OnDemand()
    bench.load()
    bench.submit(1, max_tokens=9)
    bench.iterate()
    bench.step()
    said = len(bench.transcript.tokens[1])
    bench.operator(SleepEngine(1, grace))
    bench.submit(2)
    bench.iterate()
    while not (heard := bench.hear())[0]:
        bench.step()
    assert heard == [True]
    assert 2 not in bench.transcript.tokens, "none begins while it leaves"
    assert (len(bench.transcript.tokens[1]) == 9) is (grace > 0)
    assert len(bench.transcript.tokens[1]) >= said
    bench.iterate()
    bench.iterate(1.0)
    assert bench.answers()[1] == Controlled(1, requests=1 + (grace == 0), asleep=True)
    assert bench.status().demand == 1 + (grace == 0)
    bench.load()
    bench.run()
    assert bench.transcript.ends == {1: [Finish.LENGTH], 2: [Finish.LENGTH]}
    assert len(bench.transcript.tokens[1]) == 9


def test_grace_has_an_end() -> None:
    bench = OnDemand()
    bench.load()
    bench.submit(1, max_tokens=200)
    bench.iterate()
    bench.operator(SleepEngine(1, 10.0))
    for _ in range(10):
        bench.step()
    assert bench.hear() == [False]
    bench.iterate(10.0)
    for _ in range(3):
        bench.step()
    assert bench.hear() == [True]
    bench.load()
    bench.run()
    assert len(bench.transcript.tokens[1]) == 200


def test_a_new_scheduler_takes_what_it_finds() -> None:
    bench = OnDemand(joins=False)
    bench.executors[0].ready()
    bench.iterate()
    assert bench.hear() == [False], "it goes on with what is loaded"
    assert bench.status().loaded
    bench = OnDemand(2, joins=False)
    bench.steps.arrives(bench.executors[0].peer, ExecutorAsleep())
    bench.iterate()
    bench.executors[1].ready()
    bench.iterate()
    assert bench.hear() == [True, False], "one of them had been told before"


def test_an_executor_that_is_killed_loads_again_and_one_that_sleeps_does_not() -> None:
    bench = OnDemand()
    bench.load()
    bench.steps.leave(bench.executors[0].peer)
    bench.executors[0] = Sleeper(bench.steps)
    bench.steps.arrives(bench.executors[0].peer, ExecutorAsleep())
    bench.iterate()
    assert bench.hear() == [True], "its memory is its own still"
    bench.executors[0].loaded()
    bench.iterate()
    bench.operator(SleepEngine(1, 0.0))
    assert bench.hear() == [True]
    bench.steps.leave(bench.executors[0].peer)
    bench.executors[0] = Sleeper(bench.steps)
    bench.steps.arrives(bench.executors[0].peer, ExecutorAsleep())
    bench.iterate()
    bench.iterate()
    assert bench.hear() == [False]
    assert bench.answers()[1].asleep


def test_one_that_does_not_load_gives_its_memory_up_and_its_requests_end() -> None:
    bench = OnDemand()
    bench.load()
    bench.operator(SleepEngine(1, 0.0))
    bench.hear()
    bench.submit(1)
    bench.operator(WakeEngine(2))
    assert bench.hear() == [True]
    bench.iterate(MISSING_LIMIT + 10.0)
    bench.iterate(0.3)
    assert "do not become ready" in bench.answers()[2].error
    bench.transcript.read(bench.tokens.take(TokenBatch, bench.tokenizer))
    assert bench.transcript.ends == {1: [Finish.UNAVAILABLE]}
    assert bench.status().sleeping
    bench.executors[0].loaded()
    bench.iterate()
    assert bench.hear() == [True], "it comes too late, and sleeps"


def test_one_that_is_given_up_while_it_leaves_serves_once_it_is_loaded_again() -> None:
    bench = OnDemand()
    bench.load()
    bench.submit(1, max_tokens=200)
    bench.iterate()
    bench.operator(SleepEngine(1, 10.0))
    bench.step()
    bench.steps.leave(bench.executors[0].peer)
    bench.iterate()
    bench.iterate(MISSING_LIMIT + 10.0)
    bench.iterate(0.3)
    bench.executors[0] = Sleeper(bench.steps)
    bench.steps.arrives(bench.executors[0].peer, ExecutorAsleep())
    bench.iterate()
    bench.load()
    bench.submit(2)
    bench.iterate()
    bench.run()
    assert bench.transcript.ends == {1: [Finish.UNAVAILABLE], 2: [Finish.LENGTH]}


def test_the_same_before_anything_was_loaded() -> None:
    bench = OnDemand()
    bench.submit(1)
    bench.operator(WakeEngine(2))
    assert bench.hear() == [True]
    bench.iterate(MISSING_LIMIT + 10.0)
    bench.iterate(0.3)
    assert "do not become ready" in bench.answers()[2].error
    (rejected,) = bench.tokens.take(Rejected, bench.tokenizer)
    assert rejected.status == 503
    assert bench.loop.unfinished == 0


def test_the_operator_is_answered_before_anything_was_loaded() -> None:
    bench = OnDemand()
    for message in (AskState(1), SleepEngine(2), FlushCache(3), Resume(4)):
        bench.operator(message)
    assert bench.answers() == {number: Controlled(number, asleep=True) for number in (1, 2, 3, 4)}


def test_it_sleeps_by_itself_after_a_time_without_requests_and_is_not_woken_by_one() -> None:
    bench = OnDemand(idle_timeout=10.0)
    bench.load()
    bench.iterate(10.0)
    assert bench.hear() == [True]
    bench.submit(1)
    bench.iterate()
    bench.iterate()
    assert bench.hear() == [False]
    bench.load()
    bench.run()
    assert bench.transcript.ends == {1: [Finish.LENGTH]}
