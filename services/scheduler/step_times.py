"""How long the parts of a step take: the scheduler's own, and those that executors report."""

from __future__ import annotations

import msgspec

from penstock.engine_core.histogram import Histogram, HistogramStatistics
from penstock.protocol.steps import StepResult
from penstock.services.metrics.definitions import PART

LONG_STEP = 0.002  # seconds; the step behind one that took so long or longer can wait for its plan
OWN = ("plan", "encode", "apply", "deliver")
DEVICE = ("device", "draft", "wait")


class StepTimeStatistics(msgspec.Struct, frozen=True):
    """Seconds since start."""

    parts: dict[str, HistogramStatistics]  # by part
    busy: float  # the device ran steps and drafted
    stalled: float  # it had nothing to run although requests ran


class StepTimes:
    """Clock of the steps. An observation costs well under a microsecond, and each part of a step has one.

    plan: building the plan. encode: sending it to the executors. apply: taking the result. deliver: sending tokens to
    tokenizers. device, draft: what the executor reports of the step and of the drafting before it. wait: how long the
    device idled before the step, or in it for masks. The first step after an idle time has no wait.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.plans = self.results = 0
        self.last_step = 0  # the last one whose result this epoch's executors sent
        self._parts = {part: Histogram(PART) for part in (*OWN, *DEVICE)}
        self._first = 0  # the last step that was planned after an idle time
        self._busy = self._stalled = 0.0
        self._device = 0.0  # seconds of the last result's step on the device
        self._since = now  # monotonic seconds of the last result, or of what made the device busy after an idle time

    @property
    def long(self) -> bool:
        """Whether the last step was so long that its successor's plan can wait."""
        return self._device >= LONG_STEP

    def age(self, now: float) -> float:
        """Seconds that the oldest step in flight has been running, at most."""
        return now - self._since

    def restart(self, now: float) -> None:
        """The step in flight, or the first one to come, is as old as this moment."""
        self._since = now

    def planned(self, step: int, plan: float, encode: float, *, after_idle: bool) -> None:
        self.plans += 1
        self._parts["plan"].observe(plan)
        self._parts["encode"].observe(encode)
        if after_idle:
            self._first = step

    def applied(self, result: StepResult, seconds: float) -> None:
        self._parts["apply"].observe(seconds)
        self._parts["device"].observe(result.busy)
        self._busy += result.busy + result.drafting
        if result.drafting:
            self._parts["draft"].observe(result.drafting)
        if result.step != self._first:
            self._parts["wait"].observe(result.waited)
            self._stalled += result.waited

    def arrived(self, result: StepResult, epoch: int, now: float) -> None:
        self.results += 1
        self._device = result.busy
        self._since = now
        if result.epoch == epoch:
            self.last_step = result.step

    def delivered(self, seconds: float) -> None:
        self._parts["deliver"].observe(seconds)

    def statistics(self) -> StepTimeStatistics:
        parts = {part: histogram.statistics() for part, histogram in self._parts.items()}
        return StepTimeStatistics(parts, self._busy, self._stalled)
