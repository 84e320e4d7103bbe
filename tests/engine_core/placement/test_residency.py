"""Which models are loaded: by memory, by turns, and in the order in which they began to wait."""

from __future__ import annotations

import pytest

from penstock.engine_core.placement.residency import LINGER, Decision, ModelView, Residency, State

TURN = 30.0
NOTHING = Decision()


def views(*given: tuple[str, int]) -> list[ModelView]:
    return [ModelView(State(state), requests) for state, requests in given]


def of(*shares: float, turn: float = TURN) -> Residency:
    """Models that take these shares of one device."""
    return Residency([{0: share} for share in shares], turn)


def test_models_that_fit_together_are_loaded_first_and_one_after_the_other() -> None:
    residency = of(0.5, 0.9, 0.45)
    assert residency.first() == (0, 2)
    assert residency.decide(views(("asleep", 1), ("asleep", 0), ("asleep", 1)), 0.0) == Decision(load=(0,))
    assert residency.decide(views(("loading", 1), ("asleep", 0), ("asleep", 1)), 1.0) == NOTHING
    assert residency.decide(views(("loaded", 1), ("asleep", 0), ("asleep", 1)), 2.0) == Decision(load=(2,))


def test_one_alone_may_take_the_whole_device() -> None:
    assert of(0.99).decide(views(("asleep", 1)), 0.0) == Decision(load=(0,))


def test_other_devices_are_other_memory() -> None:
    residency = Residency([{0: 0.9}, {1: 0.9}, {0: 0.9, 1: 0.9}], TURN)
    assert residency.first() == (0, 1)
    assert residency.decide(views(("asleep", 1), ("asleep", 1), ("asleep", 0)), 0.0) == Decision(load=(0, 1))
    loaded = views(("loaded", 0), ("loaded", 0), ("asleep", 1))
    assert residency.decide(loaded, 1.0) == NOTHING
    assert residency.decide(loaded, 1.0 + LINGER) == Decision(leave=(0, 1))


def test_an_idle_model_leaves_for_one_that_has_requests_and_for_no_other() -> None:
    residency = of(0.9, 0.9)
    residency.decide(views(("loaded", 0), ("asleep", 0)), 0.0)
    assert residency.decide(views(("loaded", 0), ("asleep", 0)), 1e6) == NOTHING
    assert residency.decide(views(("loaded", 0), ("asleep", 1)), 1e6) == Decision(leave=(0,))
    assert residency.decide(views(("leaving", 0), ("asleep", 1)), 1e6 + 1) == NOTHING
    assert residency.decide(views(("asleep", 0), ("asleep", 1)), 1e6 + 2) == Decision(load=(1,))


def test_a_short_gap_between_requests_costs_no_turn() -> None:
    residency = of(0.9, 0.9)
    residency.decide(views(("loaded", 1), ("asleep", 1)), 0.0)
    asked = views(("loaded", 0), ("asleep", 1))
    assert residency.decide(asked, 1.0) == NOTHING
    assert residency.decide(views(("loaded", 1), ("asleep", 1)), 1.0 + LINGER) == NOTHING
    assert residency.decide(asked, 2.0) == NOTHING
    assert residency.decide(asked, 2.0 + LINGER) == Decision(leave=(0,))


def test_a_busy_model_has_its_turn_and_no_more() -> None:
    residency = of(0.9, 0.9)
    residency.decide(views(("loaded", 5), ("asleep", 0)), 0.0)
    busy = views(("loaded", 5), ("asleep", 1))
    assert residency.decide(busy, 100.0) == NOTHING
    assert residency.decide(busy, 99.0 + TURN) == NOTHING
    assert residency.decide(busy, 100.0 + TURN) == Decision(leave=(0,))


def test_a_model_that_has_just_been_loaded_has_its_turn_whoever_waits_how_long() -> None:
    residency = of(0.9, 0.9)
    residency.decide(views(("loading", 1), ("asleep", 1)), 0.0)
    busy = views(("loaded", 1), ("asleep", 1))
    assert residency.decide(busy, 1000.0) == NOTHING
    assert residency.decide(busy, 999.0 + TURN) == NOTHING
    assert residency.decide(busy, 1000.0 + TURN) == Decision(leave=(0,))


def test_the_one_idle_longest_leaves_and_no_more_than_need_to() -> None:
    residency = of(0.3, 0.3, 0.3, 0.3)
    residency.decide(views(("loaded", 1), ("loaded", 1), ("loaded", 1), ("asleep", 0)), 0.0)
    residency.decide(views(("loaded", 1), ("loaded", 0), ("loaded", 1), ("asleep", 0)), 1.0)
    residency.decide(views(("loaded", 1), ("loaded", 0), ("loaded", 0), ("asleep", 0)), 2.0)
    assert residency.decide(views(("loaded", 0), ("loaded", 0), ("loaded", 0), ("asleep", 1)), 3.0) == Decision((1,))


def test_a_small_one_stays_where_it_would_not_have_helped() -> None:
    residency = of(0.1, 0.8, 0.8)
    residency.decide(views(("loaded", 0), ("loaded", 1), ("asleep", 0)), 0.0)
    asked = views(("loaded", 0), ("loaded", 0), ("asleep", 1))
    assert residency.decide(asked, 5.0) == NOTHING
    assert residency.decide(asked, 5.0 + LINGER) == Decision(leave=(1,))


def test_nobody_leaves_before_it_helps() -> None:
    residency = of(0.4, 0.4, 0.9)
    residency.decide(views(("loaded", 0), ("loaded", 1), ("asleep", 0)), 0.0)
    assert residency.decide(views(("loaded", 0), ("loaded", 1), ("asleep", 1)), 5.0) == NOTHING
    assert residency.decide(views(("loaded", 0), ("loaded", 1), ("asleep", 1)), 5.0 + TURN) == Decision(leave=(0, 1))


def test_what_is_freed_is_for_the_one_that_has_waited_longest() -> None:
    residency = of(0.9, 0.9, 0.05)
    residency.decide(views(("loaded", 1), ("asleep", 1), ("asleep", 0)), 0.0)
    assert residency.decide(views(("loaded", 1), ("asleep", 1), ("asleep", 1)), 1.0) == NOTHING
    assert residency.decide(views(("asleep", 1), ("asleep", 1), ("asleep", 1)), 2.0) == Decision(load=(1,))


def test_memory_counts_until_a_model_has_said_that_it_sleeps() -> None:
    for state in ("leaving", "loading"):
        assert of(0.9, 0.9).decide(views((state, 0), ("asleep", 1)), 0.0) == NOTHING
    assert of(0.9, 0.9).decide(views(("failed", 0), ("asleep", 1)), 0.0) == Decision(load=(1,))


def test_a_model_that_failed_is_not_loaded() -> None:
    assert of(0.9, 0.9).decide(views(("failed", 9), ("asleep", 0)), 0.0) == NOTHING


@pytest.mark.parametrize("state", ["asleep", "leaving"])
def test_requests_that_a_model_kept_while_it_left_wait_for_it(state: str) -> None:
    residency = of(0.9, 0.9)
    residency.decide(views((state, 1), ("loaded", 1)), 0.0)
    assert residency.waited(0, 7.0) == 7.0
    assert residency.waited(1, 7.0) == 0.0
