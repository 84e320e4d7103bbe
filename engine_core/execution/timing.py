"""How long the device took over a step, by events in its stream."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine_core.execution.results import Launched


@dataclass(frozen=True)
class StepTimes:
    """Seconds; all zero on a CPU, where nobody here has a clock."""

    busy: float = 0.0  # from the step's beginning to its result, without the wait for masks
    waited: float = 0.0  # before the step, and in it for masks
    drafting: float = 0.0  # behind the step before


def step_times(launched: Launched, last: Launched | None) -> StepTimes:
    """Of a step that is over; `last` is the one before it."""
    if launched.began is None or launched.ended is None:
        return StepTimes()
    busy: float = launched.began.elapsed_time(launched.ended) / 1e3
    waited = 0.0
    if launched.halves is not None:
        computed, went_on = launched.halves
        waited = computed.elapsed_time(went_on) / 1e3
    if last is None or last.ended is None:
        return StepTimes(busy - waited, waited)
    before, drafting = last.ended, 0.0
    if last.drafted is not None:
        began, before = last.drafted
        drafting = began.elapsed_time(before) / 1e3
    return StepTimes(busy - waited, waited + max(0.0, before.elapsed_time(launched.began) / 1e3), drafting)
