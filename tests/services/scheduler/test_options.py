"""What the scheduler is built with, from the options."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.config import Config, TraceConfig
from penstock.protocol.control import EngineStatus
from penstock.protocol.engine_config import ModelConfig, SchedulerConfig
from penstock.protocol.links import Role
from penstock.services.scheduler.options import ModelFacts, ahead, depth
from penstock.services.scheduler.server_loop import SchedulerLoop
from tests.services.scheduler.fakes import FakeExecutor, FakePort, without_grammars


class Bench:
    """A loop and its executor, which is ready."""

    def __init__(self, trace_tokens: int = 128, **options: Any) -> None:
        config = Config(model=ModelConfig(max_num_seqs=8), scheduler=SchedulerConfig(**options),
                        trace=TraceConfig(trace_tokens=trace_tokens))  # fmt: skip
        self.now = 1000.0
        self.tokens, steps = FakePort(Role.TOKENIZER), FakePort(Role.EXECUTOR)
        self.loop = SchedulerLoop(config, ModelFacts(256, 4096), self.tokens, steps, *without_grammars(), self.now)
        self.tokens.join()
        executor = FakeExecutor(steps)
        self.iterate()
        executor.ready()
        self.iterate()

    def iterate(self, seconds: float = 0.001) -> None:
        self.now += seconds
        self.loop.iterate(self.now, self.now)


@pytest.mark.parametrize(("stages", "overlap", "steps"), [(1, True, 2), (1, False, 1), (2, True, 3), (4, False, 4)])
def test_each_stage_has_a_step_and_with_overlap_one_more_waits(stages: int, overlap: bool, steps: int) -> None:
    config = Config(model=ModelConfig(pipeline_parallel_size=stages), scheduler=SchedulerConfig(overlap=overlap))
    assert depth(config) == steps
    assert ahead(config) == 1 + overlap


def test_options_reach_the_scheduler() -> None:
    given = {"scheduling_policy": "priority", "fairness": "off", "max_queued_tokens": 7, "max_queue_time": 3.0,
             "enable_prefix_caching": False}  # fmt: skip
    bench = Bench(trace_tokens=9, **given)
    assert bench.loop._scheduler is not None
    found = bench.loop._scheduler._state.options
    assert (found.policy, found.fairness, found.max_queued_tokens, found.max_queue_time) == ("priority", False, 7, 3.0)
    assert (found.prefix_caching, found.trace_tokens) == (False, 9)


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_heartbeats_come_at_their_interval(seconds: float) -> None:
    bench = Bench(status_interval=seconds)
    bench.tokens.take(EngineStatus)
    for _ in range(100):
        bench.iterate(0.1)
    assert len(bench.tokens.take(EngineStatus)) == pytest.approx(10 / seconds, abs=1)
