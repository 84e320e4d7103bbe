from __future__ import annotations

from engine_core.scheduling.statistics import WINDOW, Totals


def test_the_drain_rate_needs_two_moments() -> None:
    totals = Totals()
    assert totals.drain_rate == 0.0
    totals.tick(1.0)
    assert totals.drain_rate == 0.0
    totals.finished, totals.aborted, totals.failed = 5, 3, 2
    totals.tick(3.0)
    assert totals.drain_rate == 5.0


def test_old_moments_are_dropped() -> None:
    totals = Totals()
    for second in range(100):
        totals.finished = second * 2
        totals.tick(float(second))
    assert totals.ends[-1][0] - totals.ends[0][0] <= WINDOW
    assert totals.drain_rate == 2.0
    totals.tick(1000.0)
    assert totals.drain_rate == 0.0
