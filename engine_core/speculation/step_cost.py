"""Measured cost of a step and of drafting, and the number of drafts that pays.

A step's device seconds are kept against the positions that it runs beyond its rows' own. A device's time is flat while
it waits for memory and rises where its arithmetic is full; where that is depends on the model, the chip and the length
of the sequences, so nothing is assumed. Lower quartiles of recent steps are kept per class of rows and class of further
positions, half an octave each, with straight lines between them. A step without further positions is a class of its
own: it runs other kernels, so the first draft of a step may cost more than all the others. An unknown cost is taken for
the least it can be, so that it is tried and thereby measured.

A drafting turn runs the draft model once for all rows, so rows with fewer drafts cost as much as the row with most.
Its times are kept in the same way per class of rows and number of turns; beyond known numbers the cost grows with the
turns. Where it seems too dear nothing is drafted, so it is forgotten by the steps that went by, not by draftings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from statistics import fmean

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RECENT = 9  # steps of one class that say how long one takes
KNOWN = 3  # steps or draftings of one class before anything is known of it: a single one may have been held up
STALE = 2048  # steps, whatever they are, after which a class that did not occur again is forgotten


class Recent:
    """Owner of the recent seconds of one class."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.at = 0  # the last step

    @property
    def known(self) -> bool:
        return len(self.seconds) >= KNOWN

    @property
    def typical(self) -> float:
        """Their lower quartile: whatever holds a step up makes it longer, and the first of a kind often are."""
        return sorted(self.seconds)[len(self.seconds) // 4]

    def observe(self, seconds: float, at: int) -> None:
        self.seconds.append(seconds)
        self.at = at


class Samples(Recent):
    """Owner of the recent steps of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: deque[int] = deque(maxlen=RECENT)
        self.further: deque[int] = deque(maxlen=RECENT)

    @property
    def place(self) -> float:
        """Further positions, on average."""
        return fmean(self.further)


class StepCost:
    """Owner of what was measured. `measured`: False, and nothing is ever known, so every draft is sent."""

    def __init__(self, *, measured: bool = True) -> None:
        self._measured = measured
        self._classes: dict[int, dict[int, Samples]] = {}  # by class of rows, by class of further positions
        self._steps = 0

    def observe(self, rows: int, positions: int, seconds: float) -> None:
        """A step without chunks took `seconds`; `positions` are its rows and their drafts."""
        if not self._measured:
            return
        self._steps += 1
        further = positions - rows
        classes, key = self._classes.setdefault(half_octave(rows), {}), half_octave(further + 1)
        samples = classes.get(key)
        if samples is None:
            samples = classes[key] = Samples()
        samples.observe(seconds, self._steps)
        samples.positions.append(positions)
        samples.further.append(further)

    def plain(self, rows: int) -> float | None:
        """Seconds of a step with these rows and nothing further, if such steps are known."""
        samples = self._classes.get(half_octave(rows), {}).get(half_octave(1))
        if samples is None or not samples.known or self._steps - samples.at > STALE:
            return None
        return samples.typical

    def seconds(self, rows: int, positions: Floats) -> Floats | None:
        """Of steps with these rows and positions; None if nothing is known. # [n] → [n]"""
        classes = self._classes.get(half_octave(rows))
        if not classes:
            return None
        for key in [key for key, samples in classes.items() if self._steps - samples.at > STALE]:
            del classes[key]
        found = [classes[key] for key in sorted(classes) if classes[key].known]
        if not found:
            return None
        places = np.array([samples.place for samples in found])
        times = np.maximum.accumulate([samples.typical for samples in found])
        known = np.interp(positions - rows, places, times)  # beyond the last: no more than that
        least = fmean(found[0].positions)
        return np.where(positions - rows < places[0], np.minimum(times[0] * positions / least, times[0]), known)


def half_octave(count: int) -> int:
    """1, 2, 3, 4..5, 6..7, 8..11, 12..15, ... are a class each."""
    octave = count.bit_length() - 1
    return 2 * octave + ((count << 1 >> octave) & 1)


class DraftCost:
    """Owner of what was measured."""

    def __init__(self) -> None:
        self._classes: dict[int, dict[int, Recent]] = {}  # by class of rows, by turns
        self._known: dict[int, dict[int, Recent]] = {}  # of those
        self._step = 0

    def observe(self, rows: int, turns: int, seconds: float) -> None:
        """Drafting took `seconds`, with the positions that the draft model had to catch up."""
        key = half_octave(rows)
        found = self._classes.setdefault(key, {}).setdefault(turns, Recent())
        found.observe(seconds, self._step)
        if found.known:
            self._known.setdefault(key, {})[turns] = found

    def forget(self, step: int) -> None:
        """It is step `step`: what was not met for long is unknown again. This is looked at now and then."""
        if step - self._step < STALE // 16:
            return
        self._step = step
        for classes in (self._classes, self._known):
            for key, found in list(classes.items()):
                classes[key] = {turns: recent for turns, recent in found.items() if step - recent.at <= STALE}
                if not classes[key]:
                    del classes[key]

    def seconds(self, rows: int, turns: int) -> float:
        """Of `turns` turns for `rows` rows, by the nearest number of rows that is known; 0: nothing is."""
        if not self._known or not turns:
            return 0.0
        wanted = half_octave(rows)
        known = self._known[min(self._known, key=lambda key: abs(key - wanted))]
        below = max((key for key in known if key <= turns), default=0)
        above = min((key for key in known if key >= turns), default=0)
        if below and above:
            low, high = known[below].typical, known[above].typical
            return low + (high - low) * (turns - below) / max(1, above - below)
        nearest = below or above
        return known[nearest].typical * turns / nearest


def draft_lengths(
    rows: int, chances: Sequence[Sequence[float]], cost: StepCost, most: int, host: float = 0.0
) -> list[int]:
    """Lengths of the drafts of a step of `rows` rows, at most `most` in all. They must be worth `host` seconds more.

    chances: of each drafted row, that its draft is accepted up to each place; they fall along it. A step is expected to
    give one token for each row and each draft's chance of one. Drafts are taken by falling chance, so that each row
    keeps a beginning of its own, up to the number with the most tokens per second.
    """
    plain = cost.plain(rows)
    if plain is not None and sum(map(sum, chances)) * plain < host * rows:
        return [0] * len(chances)  # even if further positions cost nothing
    flat = np.fromiter(chain.from_iterable(chances), np.float64)
    order = np.argsort(-flat, kind="stable")[:most]
    if not len(order):
        return [0] * len(chances)
    seconds = cost.seconds(rows, rows + np.arange(len(order) + 1, dtype=np.float64))
    count = len(order)
    if seconds is not None:
        tokens = rows + np.concatenate((np.zeros(1), np.cumsum(flat[order])))
        seconds[1:] += host
        count = int(np.argmax(tokens / seconds))
    owners = np.repeat(np.arange(len(chances)), [len(row) for row in chances])
    lengths: list[int] = np.bincount(owners[order[:count]], minlength=len(chances)).tolist()
    return lengths
