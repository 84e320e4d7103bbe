"""What steps taught: between known points a straight line, beyond them the least it can be."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine_core.speculation.step_cost import KNOWN, RECENT, STALE, StepCost, draft_lengths, half_octave


def at(cost: StepCost, rows: int, *positions: float) -> list[float]:
    found = cost.seconds(rows, np.array(positions))
    assert found is not None
    return found.tolist()


def observe(cost: StepCost, rows: int, positions: int, seconds: float) -> None:
    """As often as it takes to be known."""
    for _ in range(KNOWN):
        cost.observe(rows, positions, seconds)


def test_nothing_is_known_at_first() -> None:
    cost = StepCost()
    assert cost.seconds(4, np.array([4.0])) is None
    observe(cost, 1, 1, 0.01)
    assert cost.seconds(64, np.array([64.0])) is None, "other rows, other sequences"
    assert cost._steps == KNOWN


def test_fixed_lengths_learn_nothing() -> None:
    cost = StepCost(measured=False)
    observe(cost, 1, 1, 0.010)
    assert cost.seconds(1, np.array([1.0])) is None
    assert draft_lengths(1, [[0.1] * 4], cost, 16) == [4], "an unlikely draft is sent as well"


def test_a_first_step_that_was_held_up_rules_nothing_out() -> None:
    """Its class is tried again before it is judged, and judged by what most of its steps took."""
    cost = StepCost()
    observe(cost, 1, 1, 0.010)
    cost.observe(1, 9, 5.0)
    assert at(cost, 1, 9) == pytest.approx([0.010])
    for _ in range(2):
        cost.observe(1, 9, 0.012)
    assert at(cost, 1, 9) == pytest.approx([0.012])


def test_lines_between_what_is_known() -> None:
    cost = StepCost()
    observe(cost, 8, 8, 0.010)
    observe(cost, 8, 32, 0.016)
    assert at(cost, 8, 8, 20, 32) == pytest.approx([0.010, 0.013, 0.016])


def test_the_first_draft_may_cost_more_than_all_the_others() -> None:
    """64 and 65 positions differ by little, but a step without drafts runs other kernels."""
    cost = StepCost()
    observe(cost, 64, 64, 0.005)
    observe(cost, 64, 65, 0.007)
    observe(cost, 64, 80, 0.0075)
    assert at(cost, 64, 64, 65, 80) == pytest.approx([0.005, 0.007, 0.0075])


def test_steps_of_about_as_many_rows_are_one_class() -> None:
    """What is compared are drafts, so that a plain step of more rows does not stand behind a drafted one of fewer."""
    cost = StepCost()
    observe(cost, 90, 90, 0.005)
    observe(cost, 64, 66, 0.007)
    assert at(cost, 70, 70, 72, 90) == pytest.approx([0.005, 0.007, 0.007])


def test_the_unknown_is_taken_for_cheap_so_that_it_is_tried() -> None:
    cost = StepCost()
    observe(cost, 8, 16, 0.010)
    assert at(cost, 8, 8, 16, 64) == pytest.approx([0.005, 0.010, 0.010])


def test_one_step_out_of_line_says_nothing() -> None:
    cost = StepCost()
    for seconds in (0.01, 0.01, 5.0, 0.01):
        cost.observe(1, 1, seconds)
    assert at(cost, 1, 1) == pytest.approx([0.01])


def test_more_positions_never_cost_less() -> None:
    cost = StepCost()
    observe(cost, 8, 8, 0.020)
    observe(cost, 8, 32, 0.010)
    assert at(cost, 8, 8, 32) == pytest.approx([0.020, 0.020])


def test_times_change_and_what_is_old_is_forgotten() -> None:
    cost = StepCost()
    observe(cost, 8, 32, 0.016)
    for _ in range(RECENT):
        cost.observe(8, 8, 0.010)
    for _ in range(STALE):
        cost.observe(8, 8, 0.020)
    assert at(cost, 8, 8, 32) == pytest.approx([0.020, 0.020])
    assert len(cost._classes[half_octave(8)]) == 1


def test_classes_are_half_an_octave_wide() -> None:
    classes = [half_octave(count) for count in range(1, 513)]
    assert classes == sorted(classes)
    assert len(set(classes)) == 18
    for count in range(1, 513):
        same = [other for other in range(1, 513) if classes[other - 1] == classes[count - 1]]
        assert max(same) < 1.5 * min(same) or len(same) == 1
