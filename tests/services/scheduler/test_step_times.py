"""Parts of steps: what is observed, and what does not count."""

from __future__ import annotations

import pytest

from penstock.protocol.steps import StepResult
from penstock.services.scheduler.step_times import DEVICE, OWN, StepTimes


def result(step: int, **words: float) -> StepResult:
    return StepResult(step=step, epoch=1, token_ids=b"", **words)


def seen(times: StepTimes) -> dict[str, tuple[int, float]]:
    parts = times.statistics().parts
    return {part: (sum(found.counts), pytest.approx(found.total)) for part, found in parts.items()}


def test_each_part_has_its_histogram() -> None:
    times = StepTimes()
    assert set(seen(times)) == {*OWN, *DEVICE}
    times.planned(1, 0.001, 0.0001, rested=False)
    times.applied(result(1, busy=0.01, waited=0.002, drafting=0.003), 0.0005)
    times.delivered(0.0002)
    assert seen(times) == {
        "plan": (1, 0.001), "encode": (1, 0.0001), "apply": (1, 0.0005), "deliver": (1, 0.0002),
        "device": (1, 0.01), "draft": (1, 0.003), "wait": (1, 0.002),
    }  # fmt: skip
    assert times.statistics().busy == pytest.approx(0.013)
    assert times.statistics().stalled == pytest.approx(0.002)


def test_nobody_waited_for_the_first_step_after_a_rest() -> None:
    times = StepTimes()
    times.planned(7, 0.001, 0.0, rested=True)
    times.planned(8, 0.001, 0.0, rested=False)
    times.applied(result(7, busy=0.01, waited=60.0), 0.0)
    times.applied(result(8, busy=0.01, waited=0.5), 0.0)
    assert seen(times)["wait"] == (1, 0.5)
    assert times.statistics().stalled == 0.5


def test_a_step_without_drafting_says_nothing_of_it() -> None:
    times = StepTimes()
    times.applied(result(1, busy=0.01), 0.0)
    assert seen(times)["draft"] == (0, 0.0)
