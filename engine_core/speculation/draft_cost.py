"""What drafting on the device costs, measured: seconds against turns, for about so many rows.

A turn runs the draft model once for all rows, so rows with fewer drafts than others cost what those cost. Medians of
recent drafting are kept per class of rows, half an octave each, and number of turns; between known numbers the cost
lies on a straight line, beyond them it grows with the turns. Where nothing is known it is nothing: it is tried and
thereby measured.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

from penstock.engine_core.speculation.cost import RECENT, STALE, half_octave


class DraftCostStatistics(msgspec.Struct, frozen=True):
    """What was measured."""

    draftings: int
    classes: int  # of rows and turns with a median


class Recent:
    """Owner of the recent times of one number of turns."""

    __slots__ = ("at", "median", "seconds")

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.median = 0.0
        self.at = 0  # the last drafting

    def tell(self, seconds: float, at: int) -> None:
        self.seconds.append(seconds)
        self.median, self.at = median(self.seconds), at


class DraftCost:
    """Owner of what was measured."""

    def __init__(self) -> None:
        self._classes: dict[int, dict[int, Recent]] = {}  # by class of rows, by turns
        self._draftings = 0

    def tell(self, rows: int, turns: int, seconds: float) -> None:
        """So many turns for so many rows took so long, with what the draft model had to catch up."""
        self._draftings += 1
        found = self._classes.setdefault(half_octave(rows), {})
        found.setdefault(turns, Recent()).tell(seconds, self._draftings)
        for key in [key for key, recent in found.items() if self._draftings - recent.at > STALE]:
            del found[key]

    def seconds(self, rows: int, turns: int) -> float:
        """Of so many turns for so many rows; by the nearest number of rows that is known."""
        if not self._classes or not turns:
            return 0.0
        wanted = half_octave(rows)
        known = self._classes[min(self._classes, key=lambda key: abs(key - wanted))]
        below = max((key for key in known if key <= turns), default=0)
        above = min((key for key in known if key >= turns), default=0)
        if below and above:
            low, high = known[below].median, known[above].median
            return low + (high - low) * (turns - below) / max(1, above - below)
        nearest = below or above
        return known[nearest].median * turns / nearest

    def statistics(self) -> DraftCostStatistics:
        return DraftCostStatistics(self._draftings, sum(map(len, self._classes.values())))
