"""Whether the present step takes longer than a step can, by what earlier steps took.

A thread of its own looks. It counts its own ticks, each for two intervals at most, so that a process that was stopped
or got no processor is not late when it goes on. Loading and waiting for masks do not count.
"""

from __future__ import annotations

WATCH_INTERVAL = 0.25  # seconds between looks
SHORTEST = 5.0  # seconds that every step may take: it may have to compile a variant of a kernel
LONGEST = 10.0  # seconds that a step may take unless similar ones took long before
UNKNOWN = 120.0  # seconds that a step may take before anything was measured
USUAL = 20.0  # times what similar steps took
RELUCTANT = 4.0  # the same where that is long
DECAY = 0.9  # of a measured time, at each later measurement of that size


class Watchdog:
    """The main thread announces steps, another one ticks. Each attribute is only replaced as a whole."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by the size of steps: their positions in binary digits
        self.elapsed = 0.0  # seconds that the present step has taken, and may take
        self.allowed = float("inf")

    def begin(self, positions: int) -> None:
        """A step of so many positions begins; it is the only one that is watched."""
        self.elapsed = 0.0
        self.allowed = self.allowance(positions)

    def rest(self) -> None:
        self.allowed = float("inf")

    def tell(self, positions: int, seconds: float) -> None:
        size = positions.bit_length()
        self._seconds[size] = max(seconds, DECAY * self._seconds.get(size, 0.0))

    def allowance(self, positions: int) -> float:
        """Seconds that a step of so many positions may take.

        Measured larger steps take longer; from a smaller one the estimate grows with the ratio of the sizes.
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
        """Count time that has passed. Returns whether the step is late."""
        self.elapsed += min(seconds, 2 * WATCH_INTERVAL)
        return self.elapsed > self.allowed
