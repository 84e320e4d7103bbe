"""How long the parts of a step take, as the scheduler sees them: what it does itself, and what executors say."""

from __future__ import annotations

import msgspec

from penstock.engine_core.histogram import Histogram, HistogramStatistics
from penstock.protocol.steps import StepResult
from penstock.services.metrics.definitions import PART

OWN = ("plan", "encode", "apply", "deliver")
DEVICE = ("device", "draft", "wait")


class StepTimeStatistics(msgspec.Struct, frozen=True):
    """Seconds since start."""

    parts: dict[str, HistogramStatistics]  # by part
    busy: float  # the device ran steps and drafted
    stalled: float  # it had nothing to run although requests ran


class StepTimes:
    """Clock of the steps. An observation costs well under a microsecond, and each part of a step has one.

    plan: deciding what it is. encode: the plan on its way to the executors. apply: what its result means. deliver: its
    tokens on their way to tokenizers. device, draft: what the executor says of the step and of the drafting before it.
    wait: what the device waited before it, or in it for masks; of the first step after a rest nobody waited for it.
    """

    def __init__(self) -> None:
        self._parts = {part: Histogram(PART) for part in (*OWN, *DEVICE)}
        self._first = 0  # the last step that was planned after a rest
        self._busy = self._stalled = 0.0

    def planned(self, step: int, plan: float, encode: float, *, rested: bool) -> None:
        """A plan has gone out; `rested`: nobody had anything to do before it."""
        self._parts["plan"].observe(plan)
        self._parts["encode"].observe(encode)
        if rested:
            self._first = step

    def applied(self, result: StepResult, seconds: float) -> None:
        """A result has been dealt with."""
        self._parts["apply"].observe(seconds)
        self._parts["device"].observe(result.busy)
        self._busy += result.busy + result.drafting
        if result.drafting:
            self._parts["draft"].observe(result.drafting)
        if result.step != self._first:
            self._parts["wait"].observe(result.waited)
            self._stalled += result.waited

    def delivered(self, seconds: float) -> None:
        """Tokens have gone out."""
        self._parts["deliver"].observe(seconds)

    def statistics(self) -> StepTimeStatistics:
        parts = {part: histogram.statistics() for part, histogram in self._parts.items()}
        return StepTimeStatistics(parts, self._busy, self._stalled)
