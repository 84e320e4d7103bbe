"""Wall time from one offset."""

from __future__ import annotations

import time

from penstock.services.tracing.clock import Clock, wall_offset


def test_monotonic_seconds_become_wall_time() -> None:
    clock = Clock(1_000_000_000_000)
    assert clock.nanoseconds(2.5) == 1_002_500_000_000


def test_the_offset_is_that_of_the_clocks() -> None:
    before = time.time_ns()
    told = Clock(wall_offset()).nanoseconds(time.monotonic())
    assert before - 50_000_000 < told < time.time_ns() + 50_000_000
