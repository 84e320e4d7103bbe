from __future__ import annotations

import random

import pytest

from engine_core.speculation.acceptance import ALL, OWN, Acceptance, Odds


def test_odds_begin_at_their_prior_and_go_where_the_trials_are() -> None:
    odds = Odds(0.25)
    assert odds.chance == 0.25
    for _ in range(200):
        odds.tell(True)
    assert odds.chance > 0.85
    for _ in range(200):
        odds.tell(False)
    assert odds.chance < 0.06


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_odds_measure_a_chance(chance: float) -> None:
    rng, odds = random.Random(3), Odds(0.5, ALL)
    for _ in range(4000):
        odds.tell(rng.random() < chance)
    assert abs(odds.chance - chance) < 0.1


def test_a_new_choice_begins_with_what_all_choices_taught() -> None:
    of_all = Acceptance()
    one = Acceptance(of_all)
    for _ in range(300):
        one.tell(True, on_track=False)
        one.tell(False, on_track=True)
    another = Acceptance(of_all)
    assert another.first.chance > 0.95
    assert another.next.chance < 0.05
    assert OWN < ALL, "one choice forgets faster than all do"
    assert of_all.statistics().first == of_all.first.chance


def test_forced_runs_are_judged_for_everybody_together() -> None:
    of_all = Acceptance()
    one, another = Acceptance(of_all), Acceptance(of_all)
    for _ in range(500):
        one.tell_forced(False)
    assert another.chances(1, 0, 1, on_track=False)[0] < 0.2


def test_a_path_holds_as_far_as_all_of_it_does() -> None:
    one = Acceptance()
    one.first, one.next, one.forced = Odds(0.5), Odds(0.8), Odds(0.9)
    whole = [0.9, 0.81, 0.405, 0.324, 0.2592]
    assert one.chances(2, 0, 5, on_track=False) == pytest.approx(whole)
    for first in range(5):
        assert one.chances(2, first, 5, on_track=False) == pytest.approx(whole[first:])
    assert one.chances(0, 0, 2, on_track=True) == pytest.approx([0.8, 0.64])
    assert one.chances(0, 2, 3, on_track=True) == pytest.approx([0.512])
    assert one.chances(0, 0, 0, on_track=True) == []
