"""What so many turns of drafting are taken to cost."""

from __future__ import annotations

import pytest

from penstock.engine_core.speculation.step_cost import KNOWN, RECENT, STALE, DraftCost


def told(*measured: tuple[int, int, float], times: int = KNOWN) -> DraftCost:
    cost = DraftCost()
    for rows, turns, seconds in measured:
        for _ in range(times):
            cost.observe(rows, turns, seconds)
    return cost


def test_what_is_unknown_costs_nothing_and_so_is_tried() -> None:
    assert DraftCost().seconds(8, 4) == 0.0
    cost = told((8, 4, 2.0), times=KNOWN - 1)
    assert cost.seconds(8, 4) == 0.0, "nor does so little say anything"
    cost.observe(8, 4, 2.0)
    assert cost.seconds(8, 4) == 2.0
    assert cost.seconds(8, 0) == 0.0, "no turns at all"


def test_beyond_what_is_known_the_cost_grows_with_the_turns() -> None:
    cost = told((8, 2, 2.0))
    assert [cost.seconds(8, turns) for turns in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 4.0]


def test_between_known_turns_lies_a_straight_line() -> None:
    cost = told((8, 1, 3.0), (8, 4, 6.0))
    assert [cost.seconds(8, turns) for turns in (1, 2, 3, 4)] == [3.0, 4.0, 5.0, 6.0]
    assert cost.seconds(8, 8) == 12.0


def test_rows_have_classes_and_the_nearest_that_is_known_answers() -> None:
    cost = told((1, 4, 1.0), (64, 4, 5.0))
    assert cost.seconds(1, 4) == cost.seconds(2, 4) == cost.seconds(4, 4) == 1.0
    assert cost.seconds(60, 4) == cost.seconds(200, 4) == 5.0
    assert len(cost._classes) == 2


def test_recent_times_count_and_none_that_was_held_up() -> None:
    cost = told(*[(8, 4, 9.0)] * 20, *[(8, 4, 1.0)] * RECENT, times=1)
    assert cost.seconds(8, 4) == 1.0
    for _ in range(RECENT // 2):
        cost.observe(8, 4, 100.0)
    assert cost.seconds(8, 4) == 1.0, "those that were disturbed change nothing"
    cost = told((8, 4, 50.0), (8, 4, 20.0), (8, 4, 1.0), times=1)
    assert cost.seconds(8, 4) == 1.0, "as the first ones often are"


def test_what_was_not_met_for_long_is_forgotten() -> None:
    """By steps: what seems dear is not met again."""
    cost = told((8, 1, 5.0))
    cost.forget(STALE // 2)
    for _ in range(KNOWN):
        cost.observe(8, 4, 4.0)
    assert cost.seconds(8, 1) == 5.0
    cost.forget(STALE + 1)
    assert cost.seconds(8, 1) == pytest.approx(1.0)
    assert [len(turns) for turns in cost._classes.values()] == [1]
    cost.forget(2 * STALE)
    assert cost.seconds(8, 1) == 0.0
    assert not cost._classes
