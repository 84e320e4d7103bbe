from __future__ import annotations

import random

import pytest

from penstock.engine_core.speculation.acceptance import ALL, OWN, Acceptance, Mean


def test_odds_begin_at_their_prior_and_go_where_the_trials_are() -> None:
    odds = Mean(Mean(0.25))
    assert odds.value == 0.25
    for _ in range(200):
        odds.observe(True)
    assert odds.value > 0.85
    for _ in range(200):
        odds.observe(False)
    assert odds.value < 0.06


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_odds_measure_a_chance(chance: float) -> None:
    rng, odds = random.Random(3), Mean(0.5)
    for _ in range(4000):
        odds.observe(rng.random() < chance)
    assert abs(odds.value - chance) < 0.1


def test_a_new_choice_begins_with_what_all_choices_taught() -> None:
    of_all = Acceptance()
    one = Acceptance(of_all)
    for _ in range(300):
        one.first.observe(True)
        one.next.observe(False)
    another = Acceptance(of_all)
    assert another.first.value > 0.95
    assert another.next.value < 0.05
    assert OWN < ALL, "one choice forgets faster than all do"


def test_forced_runs_are_judged_for_everybody_together() -> None:
    of_all = Acceptance()
    one, another = Acceptance(of_all), Acceptance(of_all)
    for _ in range(500):
        one.forced.observe(False)
    assert another.chances(1, 0, 0, 1, on_track=False)[0] < 0.2


def test_likely_runs_are_a_choices_own_matter_and_begin_as_those_of_all_were() -> None:
    of_all = Acceptance()
    good, bad = Acceptance(of_all), Acceptance(of_all)
    for _ in range(50):
        good.likely.observe(True)
        bad.likely.observe(False)
    assert good.chances(0, 1, 0, 1, on_track=False)[0] > 0.9
    assert bad.chances(0, 1, 0, 1, on_track=False)[0] < 0.1
    assert 0.3 < Acceptance(of_all).likely.value == of_all.likely.value < 0.7
    assert of_all.first.value == of_all.next.value == 0.5


def test_a_path_holds_as_far_as_all_of_it_does() -> None:
    one = Acceptance()
    one.first, one.next, one.forced, one.likely = Mean(0.5), Mean(0.8), Mean(0.9), Mean(0.7)
    for likely, whole in (
        (0, [0.9, 0.81, 0.405, 0.324, 0.2592]),
        (1, [0.9, 0.81, 0.567, 0.2835, 0.2268]),
        (2, [0.9, 0.81, 0.567, 0.3969, 0.19845, 0.15876]),
    ):
        for first in range(len(whole)):
            found = one.chances(2, likely, first, len(whole), on_track=False)
            assert found == pytest.approx(whole[first:])
    assert one.chances(0, 0, 0, 2, on_track=True) == pytest.approx([0.8, 0.64])
    assert one.chances(0, 0, 2, 3, on_track=True) == pytest.approx([0.512])
    assert one.chances(0, 0, 0, 0, on_track=True) == []
