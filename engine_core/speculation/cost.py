"""What a step costs, measured: device seconds against the positions that it runs beyond its rows' own, for about so
many rows.

A device's time is flat while it waits for memory and rises where its arithmetic is full; where that is depends on the
model, the chip and how long the sequences are, so nothing is supposed. Medians of recent steps are kept per class of
rows and class of further positions, half an octave each, with straight lines between them. A step without further
positions is a class of its own: it runs other kernels, so the first draft of a step may cost more than all the others.
Where nothing is known the cost is taken for the least it can be, so that the unknown is tried and thereby measured.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RECENT = 9  # steps of one class that its median is taken of
KNOWN = 3  # steps of one class before which nothing is known: one alone may have been held up by anything
STALE = 2048  # steps after which a class that was not met again is forgotten


class CostStatistics(msgspec.Struct, frozen=True):
    steps: int  # measured
    classes: int  # of rows and further positions with a median


class Samples:
    """Owner of the recent steps of one class."""

    __slots__ = ("further", "positions", "seconds", "step")

    def __init__(self) -> None:
        self.positions: deque[int] = deque(maxlen=RECENT)
        self.further: deque[int] = deque(maxlen=RECENT)
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.step = 0  # the last one


class StepCost:
    """Owner of what was measured. `measured`: False, and nothing is ever known, so every draft is sent."""

    def __init__(self, *, measured: bool = True) -> None:
        self._measured = measured
        self._classes: dict[int, dict[int, Samples]] = {}  # by class of rows, by class of further positions
        self._steps = 0

    def tell(self, rows: int, positions: int, seconds: float) -> None:
        """A step without chunks took so long: `positions` are its rows and their drafts."""
        if not self._measured:
            return
        self._steps += 1
        further = positions - rows
        samples = self._classes.setdefault(half_octave(rows), {}).setdefault(half_octave(further + 1), Samples())
        samples.positions.append(positions)
        samples.further.append(further)
        samples.seconds.append(seconds)
        samples.step = self._steps

    def seconds(self, rows: int, positions: Floats) -> Floats | None:
        """Of steps with so many rows and positions; None if nothing is known. # [n] → [n]"""
        classes = self._classes.get(half_octave(rows))
        if not classes:
            return None
        for key in [key for key, samples in classes.items() if self._steps - samples.step > STALE]:
            del classes[key]
        found = [classes[key] for key in sorted(classes) if len(classes[key].seconds) >= KNOWN]
        if not found:
            return None
        places = np.array([sum(samples.further) / len(samples.further) for samples in found])
        times = np.maximum.accumulate([median(samples.seconds) for samples in found])
        known = np.interp(positions - rows, places, times)  # beyond the last: no more than that
        least = sum(found[0].positions) / len(found[0].positions)
        return np.where(positions - rows < places[0], np.minimum(times[0] * positions / least, times[0]), known)

    def statistics(self) -> CostStatistics:
        return CostStatistics(self._steps, sum(map(len, self._classes.values())))


def half_octave(count: int) -> int:
    """1, 2, 3, 4..5, 6..7, 8..11, 12..15, ... are a class each."""
    octave = count.bit_length() - 1
    return 2 * octave + ((count << 1 >> octave) & 1)
