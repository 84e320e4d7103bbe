"""When it pays to search for likely tokens under a grammar, which takes host time while a step's rows wait.

A search is worth the tokens that it gains, each of which is worth a row's share of a step: milliseconds for a row that
runs alone, microseconds among hundreds. So rows search as long as they have gained enough in steps like the last one.
One search in many is allowed for the others, so that a change is noticed.
"""

from __future__ import annotations

import numpy as np

from penstock.engine_core.speculation.acceptance import Mean
from penstock.engine_core.speculation.step_cost import StepCost, half_octave

SECONDS = 1e-4  # of the host for a run: its searches and its drafts' masks (12 to 23 us a row's step on an H200's host)
PRESUMED = 1e-3  # seconds of a step as long as none was measured: a burst of first requests waits for no search
REFRESHED = 32  # steps after which a step's cost is looked up again
PROBED = 2039  # refusals of which one is let through; a prime, so that it meets other rows each time


class JumpForward:
    """Owner of the least that a run must gain."""

    def __init__(self) -> None:
        self.least = 0.0  # tokens that a run must gain now
        self._size = -1  # class of the rows that it holds for
        self._steps = 0
        self._refused = 0

    def meet(self, rows: int, cost: StepCost) -> None:
        """The result of a step of `rows` rows has come."""
        self._steps += 1
        size = half_octave(rows)
        if size == self._size and self._steps % REFRESHED:
            return
        seconds = cost.seconds(rows, np.array([float(rows)]))
        self._size = -1 if seconds is None else size
        self.least = SECONDS * rows / (PRESUMED if seconds is None else float(seconds[0]))

    def pays(self, gain: Mean) -> bool:
        """Whether a row with this gain should search."""
        if gain.value >= self.least:
            return True
        self._refused += 1
        return self._refused % PROBED == 0

    def refuse(self, count: int) -> int:
        """So many rows gain too little and are not asked about. Returns which of them is to be asked about all the
        same, because it will be let through; -1 if none."""
        ahead = PROBED - 1 - self._refused % PROBED
        self._refused += min(count, ahead)
        return ahead if ahead < count else -1
