"""Whether steps wait for masks: both ways are tried, and what costs the others less is kept."""

from __future__ import annotations

from penstock.engine_core.scheduling.mask_patience import FIRST, LONGEST, TRIAL, Patience


def waited_for(waits: float, sits: float, steps: int) -> tuple[Patience, list[bool]]:
    """So many steps of 1 s, whose wait is the first where they wait for masks and the second where they do not."""
    patience, ways = Patience(), []
    for _ in range(steps):
        ways.append(patience.waits)
        patience.observe(patience.waits, 1.0, waits if patience.waits else sits)
    return patience, ways


def test_steps_wait_for_masks_that_come_in_time() -> None:
    patience, ways = waited_for(0.01, 0.0, 20_000)
    assert patience.waits
    assert ways[: FIRST + TRIAL] == [True] * FIRST + [False] * TRIAL
    assert ways.count(False) < 20_000 // 100


def test_rows_sit_out_where_waiting_makes_steps_longer() -> None:
    patience, ways = waited_for(0.2, 0.0, 20_000)
    assert not patience.waits
    assert ways[FIRST:].count(True) < 20_000 // 100


def test_a_device_that_idles_either_way_is_no_reason_to_sit_out() -> None:
    assert waited_for(0.3, 0.3, 10_000)[0].waits


def test_it_is_noticed_when_masks_come_in_time_again() -> None:
    patience, _ = waited_for(0.2, 0.0, 1000)
    assert not patience.waits
    ways = []
    for _ in range(2 * LONGEST):
        ways.append(patience.waits)
        patience.observe(patience.waits, 1.0, 0.0)
    assert ways.count(False) < LONGEST


def test_steps_of_another_way_and_without_times_do_not_count() -> None:
    patience = Patience()
    for _ in range(FIRST):
        patience.observe(False, 1.0, 0.0)
        patience.observe(True, 0.0, 5.0)
    assert patience._left == FIRST
