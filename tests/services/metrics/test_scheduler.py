"""What the scheduler tells of itself, of its engine and of its executors (figures.py), and the counts of its loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine_core.scheduling.admission import REASONS
from penstock.protocol.figures import Census, ProcessFigures
from penstock.protocol.links import Role
from penstock.services.links.link import Self
from penstock.services.metrics.definitions import ENGINE, METRICS
from penstock.services.metrics.scheduler import Figures
from penstock.services.metrics.snapshot import INTERVAL, Vitals
from penstock.services.scheduler.step_times import DEVICE, OWN
from tests.services.metrics.figures import every
from tests.services.scheduler.test_server_loop import Bench

ME = Self(Role.SCHEDULER, 0, 9, 7)
SELDOM = {"engine_accepted_tokens_by_position"}  # told once there is something to tell


@pytest.fixture
def bench() -> Bench:
    return Bench()


def told(bench: Bench, run_dir: Path) -> tuple[ProcessFigures, ...]:
    """One census, as the first tokenizer gets it."""
    figures = Figures(Vitals(ME, run_dir, bench.loop.lag), bench.loop, bench.tokens, bench.steps, bench.now)
    figures.tick(bench.now + INTERVAL / 2, 0.0)
    assert not bench.tokens.take(Census)
    figures.tick(bench.now + INTERVAL, 5.0)
    (census,) = bench.tokens.take(Census, bench.tokenizer)
    return census.processes


def values(figures: ProcessFigures) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels): sample.value for sample in figures.samples}


def test_an_engine_tells_everything_in_the_catalogue(bench: Bench, tmp_path: Path) -> None:
    bench.ready()
    bench.submit(1, max_tokens=2)
    for _ in range(6):
        bench.turn()
        for plan in bench.executor.collect():
            bench.executor.answer(plan, busy=0.25)
    (own,) = told(bench, tmp_path)
    known = {metric.name: metric for metric in METRICS}
    for each in (*own.samples, *own.spreads):
        assert len(each.labels) == len(known[each.name].labels), each.name
    names = {each.name for each in (*own.samples, *own.spreads)}
    assert {metric.name for metric in ENGINE} - names <= SELDOM
    found = values(own)
    assert found[("engine_ready",)] == 1
    assert found[("engine_prompt_tokens",)] == 20
    assert found[("engine_output_tokens",)] == 2
    assert {labels[0]: value for (name, *labels), value in found.items() if name == "engine_ended"} == {
        "stop": 0, "length": 1, "abort": 0, "error": 0, "grammar": 0, "unavailable": 0,
    }, "all of them from the beginning, so that the first one is a rise"  # fmt: skip
    waits = {labels[0]: value for (name, *labels), value in found.items() if name == "waiting_requests"}
    assert waits == dict.fromkeys(("grammar", *REASONS), 0)
    assert found[("engine_device_busy_seconds",)] == pytest.approx(0.5, abs=0.3)
    assert 0.0 <= found[("engine_device_idle_ratio",)] <= 1.0
    spreads = {(each.name, *each.labels): each.statistics for each in own.spreads}
    assert {label for name, *labels in spreads if name == "step_part_seconds" for label in labels} == {
        *OWN, *DEVICE, "mask",
    }  # fmt: skip
    assert sum(spreads["step_part_seconds", "plan"].counts) >= 2
    assert sum(spreads["step_part_seconds", "wait"].counts) == sum(spreads["step_part_seconds", "apply"].counts) - 1
    assert sum(spreads[("engine_queue_seconds",)].counts) == 1
    assert spreads[("engine_request_prompt_tokens",)].total == 20
    assert spreads[("engine_request_output_tokens",)].total == 2


def test_before_there_is_an_engine_it_says_that_it_is_not_ready(bench: Bench, tmp_path: Path) -> None:
    bench.turn()
    (own,) = told(bench, tmp_path)
    assert values(own)[("engine_ready",)] == 0
    assert values(own)[("engine_kv_used_ratio",)] == 0.0
    assert ("engine_scheduled_tokens",) not in values(own)


def test_what_executors_tell_goes_on_until_they_leave(bench: Bench, tmp_path: Path) -> None:
    bench.ready()
    bench.steps.arrives(bench.executor.peer, Census((every(Role.EXECUTOR, executor_plans=7),)))
    bench.turn()
    roles = {figures.role: figures for figures in told(bench, tmp_path)}
    assert values(roles["executor"])[("executor_plans",)] == 7
    bench.steps.leave(bench.executor.peer)
    bench.turn()
    assert [figures.role for figures in told(bench, tmp_path)] == ["scheduler"]


def test_who_waits_is_told_by_what_for(tmp_path: Path) -> None:
    bench = Bench(size=1)
    bench.ready()
    for number in range(3):
        bench.submit(number + 1)
    bench.turn()
    found = values(told(bench, tmp_path)[0])
    assert found["waiting_requests", "slot"] == 2
    assert found["waiting_requests", "grammar"] == 0


def test_a_tokenizer_without_credit_gets_the_next_one(bench: Bench, tmp_path: Path) -> None:
    bench.tokenizer.credit = 0
    figures = Figures(Vitals(ME, tmp_path, bench.loop.lag), bench.loop, bench.tokens, bench.steps, bench.now)
    figures.tick(bench.now + INTERVAL, 0.0)
    assert not bench.tokens.take(Census)
    bench.tokenizer.credit = 5
    figures.tick(bench.now + 2 * INTERVAL, 0.0)
    assert len(bench.tokens.take(Census)) == 1


def test_a_late_tick_is_lag(bench: Bench) -> None:
    bench.turn()
    bench.turn(seconds=5.0)
    assert bench.loop.lag.statistics().total == pytest.approx(4.8, abs=0.01)
