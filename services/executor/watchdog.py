"""Whether the step at hand takes longer than a step can: how long is measured, who looks is a thread of its own.

The thread counts its own ticks, none for more than two of them, so that a process that was stopped for a while, or got
no processor, is not late when it goes on. Loading and steps that wait for masks are nobody's step.
"""

from __future__ import annotations

import msgspec

TICK = 0.25  # seconds between looks
SHORTEST = 5.0  # seconds that every step may take: a form of a kernel may still have to be compiled
LONGEST = 10.0  # seconds that a step may take unless its like took long before
UNKNOWN = 120.0  # seconds that a step may take before anything was measured
USUAL = 20.0  # times what its like took
RELUCTANT = 4.0  # times that, where it is long
FADING = 0.9  # of a measured time that the next measurement of its like leaves


class WatchdogStatistics(msgspec.Struct, frozen=True):
    """Seconds that the step at hand took so far and may take; the slowest time measured by steps' sizes."""

    elapsed: float
    allowed: float
    measured: tuple[tuple[int, float], ...]  # size (positions in binary digits), seconds


class Watchdog:
    """The main thread tells of steps, another one ticks. Each attribute is replaced as a whole by one of them."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by the size of steps
        self._elapsed = 0.0
        self._allowed = float("inf")

    def begin(self, positions: int) -> None:
        """From now on a step of so many positions is waited for, and nothing else."""
        self._elapsed = 0.0
        self._allowed = self.allowance(positions)

    def rest(self) -> None:
        """No step is waited for."""
        self._allowed = float("inf")

    def tell(self, positions: int, seconds: float) -> None:
        """A step took so long."""
        size = positions.bit_length()
        self._seconds[size] = max(seconds, FADING * self._seconds.get(size, 0.0))

    def allowance(self, positions: int) -> float:
        """Seconds that a step of so many positions may take.

        A larger one that was measured took longer; from a smaller one it is at most as far as the sizes are apart.
        """
        size = positions.bit_length()
        larger = [seconds for measured, seconds in self._seconds.items() if measured >= size]
        smaller = max((measured for measured in self._seconds if measured < size), default=None)
        if larger:
            expected = min(larger)
        elif smaller is not None:
            expected = self._seconds[smaller] * 2.0 ** (size - smaller)
        else:
            return UNKNOWN
        return max(RELUCTANT * expected, min(LONGEST, max(SHORTEST, USUAL * expected)))

    def tick(self, seconds: float) -> bool:
        """So much time has passed; whether the step is late."""
        self._elapsed += min(seconds, 2 * TICK)
        return self._elapsed > self._allowed

    def statistics(self) -> WatchdogStatistics:
        return WatchdogStatistics(self._elapsed, self._allowed, tuple(sorted(self._seconds.items())))
