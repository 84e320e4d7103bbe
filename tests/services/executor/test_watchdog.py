"""How long a step may take, and whose time counts."""

from __future__ import annotations

import pytest

from penstock.services.executor.watchdog import LONGEST, RELUCTANT, SHORTEST, UNKNOWN, USUAL, WATCH_INTERVAL, Watchdog


def late_after(watchdog: Watchdog, limit: float = 1000.0, tick: float = WATCH_INTERVAL) -> float:
    """Seconds of ticks until it is late."""
    passed = 0.0
    while passed < limit:
        passed += tick
        if watchdog.tick(tick):
            return passed
    return float("inf")


def test_before_anything_is_measured_there_is_time() -> None:
    assert Watchdog().allowance(1) == UNKNOWN


@pytest.mark.parametrize(
    ("seconds", "allowed"),
    [
        (0.001, SHORTEST),
        (SHORTEST / USUAL * 1.2, SHORTEST * 1.2),
        (1.0, LONGEST),
        (LONGEST / RELUCTANT, LONGEST),
        (60.0, 60.0 * RELUCTANT),
    ],
)
def test_what_its_like_took_decides(seconds: float, allowed: float) -> None:
    watchdog = Watchdog()
    watchdog.tell(64, seconds)
    assert watchdog.allowance(64) == pytest.approx(allowed)
    assert watchdog.allowance(100) == pytest.approx(allowed)


def test_a_long_prefill_is_no_hang() -> None:
    """Measured at 8 positions: a step of 512 may take as much longer as it is larger."""
    watchdog = Watchdog()
    watchdog.tell(8, 0.5)
    assert watchdog.allowance(512) == pytest.approx(RELUCTANT * 0.5 * 64)
    watchdog.tell(512, 4.0)
    assert watchdog.allowance(512) == RELUCTANT * 4.0
    assert watchdog.allowance(300) == RELUCTANT * 4.0
    assert watchdog.allowance(8) == LONGEST


def test_a_slow_step_is_forgotten_by_and_by() -> None:
    """The first of its kind was compiled."""
    watchdog = Watchdog()
    watchdog.tell(1, 30.0)
    for _ in range(100):
        watchdog.tell(1, 0.01)
    assert watchdog.allowance(1) == SHORTEST


def test_only_the_step_at_hand_is_late() -> None:
    watchdog = Watchdog()
    watchdog.tell(1, 0.01)
    assert late_after(watchdog) == float("inf")
    watchdog.begin(1)
    assert late_after(watchdog) == pytest.approx(SHORTEST + WATCH_INTERVAL)
    watchdog.begin(1)
    assert not watchdog.tick(WATCH_INTERVAL)
    watchdog.rest()
    assert late_after(watchdog) == float("inf")


def test_time_in_which_nobody_ran_does_not_count() -> None:
    """Stopped for an hour within a step, or starved."""
    watchdog = Watchdog()
    watchdog.tell(1, 0.01)
    watchdog.begin(1)
    assert not watchdog.tick(3600.0)
    assert watchdog.elapsed == 2 * WATCH_INTERVAL
    assert late_after(watchdog, tick=60.0) == pytest.approx(60.0 * (SHORTEST / (2 * WATCH_INTERVAL)))
