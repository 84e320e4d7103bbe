"""How long requests wait, compute and write, observed where each phase ends. Times are the caller's seconds."""

from __future__ import annotations

import msgspec

from penstock.engine_core.histogram import Histogram
from penstock.engine_core.scheduling.request import Choice
from penstock.protocol.figures import HistogramStatistics
from penstock.protocol.messages import Finish

# Seconds: from a lone short prompt on a fast device to what an overloaded server does to a long one.
PHASE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class DurationStatistics(msgspec.Struct, frozen=True):
    """Seconds of the phases of choices that have been through them here, once each."""

    queue: HistogramStatistics  # arrival to first step
    prefill: HistogramStatistics  # first step to first token, or to the vector
    decode: HistogramStatistics  # first token to the end
    inference: HistogramStatistics  # first step to the end


class Durations:
    """A choice that goes on from elsewhere began elsewhere: its queue is counted and nothing else. Preempted ones keep
    their beginnings, so what was lost is part of the phase that it was lost in."""

    def __init__(self) -> None:
        self.now = 0.0  # as the caller said last
        self._queue = Histogram(PHASE)
        self._prefill = Histogram(PHASE)
        self._decode = Histogram(PHASE)
        self._inference = Histogram(PHASE)

    def enter(self, choice: Choice) -> None:
        """It has a slot; the first one counts."""
        if choice.entered is None:
            choice.entered = self.now
            self._queue.observe(self.now - choice.request.since)

    def begin(self, choice: Choice) -> None:
        """Its first token is there."""
        assert choice.entered is not None, "who samples has had a slot"
        choice.spoke = self.now
        self._prefill.observe(self.now - choice.entered)

    def end(self, choice: Choice, finish: Finish) -> None:
        """It is over. Who was cut off says nothing of how long such a request takes."""
        if choice.entered is None or finish not in (Finish.STOP, Finish.LENGTH):
            return
        if choice.request.pools:
            self._prefill.observe(self.now - choice.entered)
        elif choice.spoke is None:
            return
        else:
            self._decode.observe(self.now - choice.spoke)
        self._inference.observe(self.now - choice.entered)

    def statistics(self) -> DurationStatistics:
        phases = (self._queue, self._prefill, self._decode, self._inference)
        return DurationStatistics(*[phase.statistics() for phase in phases])
