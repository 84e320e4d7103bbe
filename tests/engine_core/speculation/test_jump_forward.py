"""Whether a look for what is likely pays: what runs have brought against what they must."""

from __future__ import annotations

import pytest

from penstock.engine_core.speculation.acceptance import HOPED, Mean
from penstock.engine_core.speculation.jump_forward import PRESUMED, PROBED, REFRESHED, SECONDS, JumpForward
from penstock.engine_core.speculation.step_cost import KNOWN, StepCost


def cost(rows: int, seconds: float, times: int = 5) -> StepCost:
    """As after steps of so many rows."""
    found = StepCost()
    for _ in range(times):
        found.observe(rows, rows, seconds)
    return found


def test_a_mean_begins_with_a_hope_and_a_choice_with_that_of_all() -> None:
    of_all = Mean(HOPED)
    assert of_all.value == Mean(of_all).value == HOPED
    good = Mean(of_all)
    for _ in range(60):
        good.observe(4)
    assert good.value > 3.9
    newcomer = Mean(of_all)
    assert newcomer.value == pytest.approx(of_all.value)
    assert newcomer.value > 3.5
    for _ in range(30):
        newcomer.observe(0)
    assert newcomer.value < 0.5 < of_all.value


def test_a_row_alone_looks_for_nearly_nothing_and_many_rows_for_much() -> None:
    poor, good = Mean(HOPED), Mean(HOPED)
    for _ in range(50):
        poor.observe(0)
        good.observe(3)
    poor.observe(1)
    for rows, seconds, allowed in ((1, 4e-3, (True, True)), (64, 5e-3, (False, True)), (512, 5e-3, (False, False))):
        looks = JumpForward()
        looks.meet(rows, cost(rows, seconds))
        assert (looks.pays(poor), looks.pays(good)) == allowed
        assert looks.least == pytest.approx(SECONDS * rows / seconds)


def test_where_nothing_is_known_of_steps_something_is_presumed_until_it_is() -> None:
    looks = JumpForward()
    costs = StepCost()
    looks.meet(64, costs)
    assert looks.least == pytest.approx(SECONDS * 64 / PRESUMED)
    for _ in range(KNOWN):
        costs.observe(64, 64, 1e-3)
    looks.meet(64, costs)
    assert looks.least == pytest.approx(SECONDS * 64 / 1e-3)


def test_a_refused_row_is_let_through_now_and_then() -> None:
    looks, poor = JumpForward(), Mean(HOPED)
    for _ in range(300):
        poor.observe(0)
    looks.meet(64, cost(64, 5e-3))
    assert [looks.pays(poor) for _ in range(3 * PROBED)].count(True) == 3
    assert looks._refused == 3 * PROBED


def test_rows_that_are_refused_together_count_as_one_by_one_do() -> None:
    looks, poor = JumpForward(), Mean(HOPED)
    for _ in range(300):
        poor.observe(0)
    looks.meet(64, cost(64, 5e-3))
    asked = 0
    for _ in range(3 * PROBED // 100):
        if (row := looks.refuse(100)) >= 0:
            asked += 1
            assert row < 100
            assert looks.pays(poor)
    assert asked == 2


def test_what_a_step_costs_is_looked_up_for_another_size_and_now_and_then() -> None:
    looks = JumpForward()
    costs = cost(64, 5e-3)
    looks.meet(64, costs)
    before = looks.least
    for _ in range(9):
        costs.observe(64, 64, 10e-3)
    looks.meet(64, costs)
    assert looks.least == before
    for _ in range(REFRESHED):
        looks.meet(64, costs)
    assert looks.least == pytest.approx(before / 2)
    looks.meet(1, costs)
    assert looks.least == pytest.approx(SECONDS / PRESUMED)
