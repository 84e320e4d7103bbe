"""What events of a step and of the one before it say of the device's time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from penstock.engine_core.execution.step_output import Launched, Output, StepTimes, step_times

EMPTY = Output(None, None, ())


@dataclass
class Event:
    """As torch.cuda.Event, at a given time."""

    milliseconds: float

    def elapsed_time(self, other: Event) -> float:
        return other.milliseconds - self.milliseconds


def launched(began: float, ended: float) -> Launched:
    events = cast(Any, Event(began)), cast(Any, Event(ended))
    return Launched(1, 1, None, EMPTY, EMPTY, events[0], events[1], events[1])


def pair(first: float, second: float) -> Any:
    return Event(first), Event(second)


def times(busy: float, waited: float, drafting: float = 0.0) -> StepTimes:
    return StepTimes(*(pytest.approx(value / 1e3) for value in (busy, waited, drafting)))


def test_a_cpu_has_no_events() -> None:
    assert step_times(Launched(1, 1, None, EMPTY, EMPTY, None, None), None) == StepTimes()


def test_the_first_step_waited_for_nobody() -> None:
    assert step_times(launched(10, 14), None) == times(4, 0)


def test_idle_time_lies_between_steps_and_is_never_negative() -> None:
    assert step_times(launched(10, 14), launched(5, 8)) == times(4, 2)
    assert step_times(launched(7, 14), launched(5, 8)) == times(7, 0), "the result was still on its way to the host"


def test_the_wait_for_masks_is_no_work() -> None:
    step = replace(launched(10, 20), halves=pair(13, 16))
    assert step_times(step, launched(5, 8)) == times(7, 5)


def test_drafting_behind_the_step_before_is_told_apart() -> None:
    before = replace(launched(5, 8), drafted=pair(7.5, 9.5))
    assert step_times(launched(10, 14), before) == times(4, 0.5, 2)
    assert step_times(replace(launched(10, 14), drafted=pair(14, 99)), before) == times(4, 0.5, 2)
