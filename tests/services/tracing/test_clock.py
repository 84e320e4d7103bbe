"""Wall time from one offset, and from the clocks of a machine elsewhere."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.tracing.clock import SAMPLES, VARIABLE, Clock, clock_of, found_offset


def test_monotonic_seconds_become_wall_time() -> None:
    clock = Clock(1_000_000_000_000)
    assert clock.nanoseconds(2.5) == 1_002_500_000_000


def test_the_offset_is_that_of_the_clocks() -> None:
    before = time.time_ns()
    told = Clock(found_offset(), leads=True).now()
    assert before - 50_000_000 < told < time.time_ns() + 50_000_000


def test_children_have_their_launchers_offset() -> None:
    assert clock_of({VARIABLE: "12345"}).offset == 12345
    assert clock_of({VARIABLE: "-7"}).offset == -7
    assert abs(clock_of({VARIABLE: "junk"}).offset - found_offset()) < 10**9
    assert abs(clock_of({}).offset - found_offset()) < 10**9


@given(st.integers(-(10**12), 10**12), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1))
def test_a_skew_is_known_up_to_half_of_the_shortest_round_trip(skew: int, ways: list[tuple[int, int]]) -> None:
    clock = Clock(0)
    now = 10**15
    for out, back in ways:
        now += 10**9
        clock.observe(now, now + out + skew, now + out + back)
    recent = ways[-SAMPLES:]
    assert abs(clock.correction - skew) <= min(out + back for out, back in recent) // 2 + 1
    assert clock.nanoseconds(1.0) == 10**9 + clock.correction


def test_only_recent_handshakes_count() -> None:
    clock = Clock(0)
    clock.observe(0, 500, 0)  # a perfect one, of a clock that has drifted since
    for number in range(SAMPLES):
        clock.observe(1000 * number, 1000 * number + 105, 1000 * number + 10)
    assert clock.correction == 100


def test_what_is_told_to_others_is_corrected() -> None:
    clock = Clock(0)
    assert clock.now() == 0, "it does not know yet by whom it goes"
    clock.welcome(5, 0, 7)  # from one that does not know either
    assert clock.now() == 0
    clock.observe(0, 10**15, 0)
    assert abs(clock.now() - clock.local() - 10**15) < 10**8
