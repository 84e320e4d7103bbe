"""Parts of steps: what is observed, and what does not count."""

from __future__ import annotations

import pytest

from penstock.protocol.steps import StepResult
from penstock.services.scheduler.step_times import DEVICE, LONG_STEP, OWN, StepTimes


def result(step: int, **words: float) -> StepResult:
    return StepResult(step=step, epoch=1, token_ids=b"", **words)


def seen(times: StepTimes) -> dict[str, tuple[int, float]]:
    parts = times.statistics().parts
    return {part: (sum(found.counts), pytest.approx(found.total)) for part, found in parts.items()}


def test_each_part_has_its_histogram() -> None:
    times = StepTimes()
    assert set(seen(times)) == {*OWN, *DEVICE}
    times.planned(1, 0.001, 0.0001, after_idle=False)
    times.applied(result(1, busy=0.01, waited=0.002, drafting=0.003), 0.0005)
    times.delivered(0.0002)
    assert seen(times) == {
        "plan": (1, 0.001), "encode": (1, 0.0001), "apply": (1, 0.0005), "deliver": (1, 0.0002),
        "device": (1, 0.01), "draft": (1, 0.003), "wait": (1, 0.002),
    }  # fmt: skip
    assert times.statistics().busy == pytest.approx(0.013)
    assert times.statistics().stalled == pytest.approx(0.002)


def test_the_first_step_after_an_idle_time_has_no_wait() -> None:
    times = StepTimes()
    times.planned(7, 0.001, 0.0, after_idle=True)
    times.planned(8, 0.001, 0.0, after_idle=False)
    times.applied(result(7, busy=0.01, waited=60.0), 0.0)
    times.applied(result(8, busy=0.01, waited=0.5), 0.0)
    assert seen(times)["wait"] == (1, 0.5)
    assert times.statistics().stalled == 0.5


def test_a_step_without_drafting_says_nothing_of_it() -> None:
    times = StepTimes()
    times.applied(result(1, busy=0.01), 0.0)
    assert seen(times)["draft"] == (0, 0.0)


def test_a_step_is_as_old_as_the_last_result() -> None:
    times = StepTimes(5.0)
    assert times.age(7.0) == 2.0
    times.arrived(result(3, busy=LONG_STEP), epoch=1, now=8.0)
    assert (times.age(8.5), times.last_step, times.long, times.results) == (0.5, 3, True, 1)
    times.arrived(result(9), epoch=2, now=9.0)
    assert (times.last_step, times.long, times.results) == (3, False, 2), "of an epoch that is over"
    times.restart(10.0)
    assert times.age(10.0) == 0.0
