"""Whether steps wait for masks on behalf of rows that need none: both ways are tried, and the cheaper one is kept."""

from __future__ import annotations

MOST = 0.02  # of a step's time that rows without grammars may lose to masks
TRIAL = 16  # steps of the other way
FIRST, LONGEST = 64, 4096  # steps between two trials, which come half as often each time that one changes nothing


class Patience:
    """Owner of the choice. `waits`: the next steps wait for masks; otherwise the rows that need them sit out."""

    def __init__(self) -> None:
        self.waits = True
        self._kept = True  # the way that was found better
        self._idle = {True: 0.0, False: 0.0}  # share of steps in which the device had nothing to do, by way
        self._period = self._left = FIRST
        self._seconds = self._waited = 0.0

    def observe(self, waits: bool, busy: float, waited: float) -> None:
        """A step with rows of both kinds is over: the device worked on it so long, and had nothing to do before it or
        in it, in seconds."""
        if waits != self.waits or not busy:
            return  # it was planned before the last change; or nobody measures
        self._seconds += busy + waited
        self._waited += waited
        self._left -= 1
        if self._left:
            return
        self._idle[waits] = self._waited / self._seconds
        self._seconds = self._waited = 0.0
        if waits == self._kept:
            self.waits, self._left = not waits, TRIAL
            return
        kept, self._kept = self._kept, self._idle[True] - self._idle[False] <= MOST
        self._period = FIRST if kept != self._kept else min(2 * self._period, LONGEST)
        self.waits, self._left = self._kept, self._period
