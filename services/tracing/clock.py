"""Wall time for spans: monotonic seconds and one offset. Clocks of several hosts are kept in step by NTP."""

from __future__ import annotations

import time

LOOKS = 5


class Clock:
    """Turns one process's monotonic seconds into wall time."""

    def __init__(self, offset: int) -> None:
        self.offset = offset  # nanoseconds from monotonic to wall time

    def nanoseconds(self, monotonic: float) -> int:
        """Unix nanoseconds of a moment in monotonic seconds."""
        return round(monotonic * 1e9) + self.offset


def wall_offset() -> int:
    """Nanoseconds from monotonic to unix time, from the quickest of several readings."""
    looks = []
    for _ in range(LOOKS):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        looks.append((after - before, wall - (before + after) // 2))
    return min(looks)[1]
