"""How many drafts executors are asked for: by what came true, by what steps cost, and by trials now and then."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from penstock.engine_core.speculation.draft_model import ENOUGH, TRIAL_ROWS, TRIAL_STEPS, DeviceDrafts, Ints
from penstock.engine_core.speculation.step_cost import KNOWN, STALE, StepCost

MOST = 4
# A step of an 8B model on an H200 and a draft model of one of its layers, in seconds.
STEP, ROW, VERIFY, TURN = 4.0e-3, 2.0e-5, 0.25e-3, 0.38e-3


def verified(rows: int, drafts: int) -> float:
    return STEP + ROW * (rows + drafts) + (VERIFY if drafts else 0.0)


def guesses(rows: int, most: int = MOST) -> tuple[DeviceDrafts, Ints]:
    found, slots = DeviceDrafts(max(rows, 8), most), np.arange(rows)
    for slot in slots.tolist():
        found.enter(slot, wanted=True)
    return found, slots


def known_cost(rows: int) -> StepCost:
    cost = StepCost()
    for drafts in (0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256):
        for _ in range(9):
            cost.observe(rows, rows + drafts, verified(rows, drafts))
    return cost


def taught(found: DeviceDrafts, slots: Ints, accepted: int, times: int = 40) -> None:
    drafted = np.full(len(slots), MOST)
    for _ in range(times):
        found.observe(slots, drafted, np.full(len(slots), accepted))
        found.cost.observe(len(slots), MOST, MOST * TURN)


def room(slots: Ints, free: int = 100) -> Ints:
    return np.full(len(slots), free)


def test_nobody_is_drafted_for_where_executors_make_none_or_the_request_wants_none() -> None:
    found, slots = guesses(3, 0)
    assert found.choose_lengths(slots, room(slots), 100, StepCost(), 1).tolist() == [0, 0, 0]
    found, slots = guesses(3)
    found.enter(1, wanted=False)
    assert found.choose_lengths(slots, room(slots), 100, StepCost(), 1).tolist() == [MOST, 0, MOST]


def test_what_is_unknown_is_tried_within_the_room_and_the_step() -> None:
    found, slots = guesses(4)
    free = np.array([9, 2, 0, -3])
    assert found.choose_lengths(slots, free, 100, StepCost(), 1).tolist() == [MOST, 2, 0, 0]
    assert found.choose_lengths(slots, free, 5, StepCost(), 2).tolist() == [MOST, 1, 0, 0]
    assert found.choose_lengths(slots, free, 0, StepCost(), 3).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_drafts_that_come_true_are_drafted_whole_and_others_not_at_all(rows: int) -> None:
    for accepted, expected in ((MOST, MOST), (0, 0)):
        found, slots = guesses(rows)
        taught(found, slots, accepted)
        assert set(found.choose_lengths(slots, room(slots), 1000, known_cost(rows), 1).tolist()) == {expected}


def test_a_dear_draft_pays_where_a_step_takes_several_stages() -> None:
    """Five tokens for a step and 20 ms of drafting: too much for a step of 4 ms, not for one of 16."""
    found, slots = guesses(1)
    for _ in range(40):
        found.observe(slots, np.array([MOST]), np.array([MOST]))
        found.cost.observe(1, MOST, MOST * 5e-3)
    assert found.choose_lengths(slots, room(slots), 1000, known_cost(1), 1).tolist() == [0]
    assert found.choose_lengths(slots, room(slots), 1000, known_cost(1), 2, 4.0).tolist() == [MOST]


def test_rows_differ_and_turns_are_shared() -> None:
    """A turn for one row is paid for all: the others join it as far as their chances are worth verifying."""
    found, slots = guesses(8)
    for _ in range(KNOWN):
        found.cost.observe(8, MOST, MOST * TURN)
    good, bad = slots[:4], slots[4:]
    for _ in range(40):
        found.observe(good, np.full(4, MOST), np.full(4, MOST))
        found.observe(bad, np.full(4, MOST), np.zeros(4, np.int64))
    lengths = found.choose_lengths(slots, room(slots), 1000, known_cost(8), 1)
    assert lengths[:4].tolist() == [MOST] * 4
    assert lengths[4:].max() <= 1


def test_no_more_than_the_step_may_have_and_those_that_are_surest() -> None:
    found, slots = guesses(4)
    taught(found, slots[:2], MOST)
    taught(found, slots[2:], 2)
    assert found.choose_lengths(slots, room(slots), 10, known_cost(4), 1).tolist() == [MOST, MOST, 1, 1]
    assert found.choose_lengths(slots, room(slots), 3, known_cost(4), 2).sum() == 3


def test_a_new_choice_begins_with_what_all_have_taught() -> None:
    found, slots = guesses(1)
    taught(found, slots, 0, times=200)
    found.enter(5, wanted=True)
    assert found.choose_lengths(np.array([5]), np.array([9]), 100, known_cost(1), 1).tolist() == [0]
    assert found._of_all()[0] < 0.05
    taught(found, slots, MOST, times=600)
    found.enter(5, wanted=True)
    assert found.choose_lengths(np.array([5]), np.array([9]), 100, known_cost(1), 1).tolist() == [MOST]
    assert found._of_all()[1] > 0.9


def test_where_no_draft_could_pay_nothing_is_tried() -> None:
    """Steps that cost as much as they have positions: a draft is worth nothing even if it always comes true."""
    found, slots = guesses(8)
    taught(found, slots, 0)
    cost = StepCost()
    for drafts in (0, 8, 32):
        for _ in range(9):
            cost.observe(8, 8 + drafts, 1e-3 * (8 + drafts))
    for step in range(1000):
        assert not found.choose_lengths(slots, room(slots), 1000, cost, step).any()


def test_trials_are_rare_small_and_in_turn() -> None:
    found, slots = guesses(64)
    taught(found, slots, 0)
    cost, tried = known_cost(64), []
    for step in range(1, 2001):
        lengths = found.choose_lengths(slots, room(slots), 1000, cost, step)
        if lengths.any():
            assert lengths.max() == ENOUGH, "the chance of a second draft is taught, too"
            tried.append((step, lengths.nonzero()[0].tolist()))
    assert 10 <= len(tried) <= 2000 // TRIAL_STEPS
    assert all(len(rows) <= TRIAL_ROWS for _, rows in tried)
    assert len({row for _, rows in tried[: 64 // TRIAL_ROWS] for row in rows}) == 64, "who waited longest comes first"
    assert min(after - before for (before, _), (after, _) in pairwise(tried)) >= TRIAL_STEPS


class World:
    """Steps whose drafts come true at a set rate, applied as they come."""

    def __init__(self, rows: int, rate: Callable[[int], float], seed: int = 1) -> None:
        self.guesses, self.slots = guesses(rows)
        self.cost, self.rate = StepCost(), rate
        self.chance = np.random.default_rng(seed)
        self.available = np.zeros(rows, np.int64)
        self.seconds = self.drafting = 0.0
        self.held_up: list[float] = []  # what the next draftings take longer
        self.tokens = self.steps = 0

    def step(self) -> int:
        """One step; how many drafts it verified."""
        rows, drafted = len(self.slots), self.available
        self.steps += 1
        noise = 1 + 0.01 * self.chance.standard_normal()
        busy = noise * verified(rows, int(drafted.sum()))
        self.seconds += busy + self.drafting
        hits = self.chance.random((rows, MOST)) < self.rate(self.steps)
        accepted = np.minimum(np.cumprod(hits, axis=1).sum(1), drafted)
        self.tokens += rows + int(accepted.sum())
        self.cost.observe(rows, rows + int(drafted.sum()), busy)
        if self.drafting:
            self.guesses.cost.observe(int((drafted > 0).sum()), int(drafted.max()), self.drafting)
        some = drafted > 0
        if some.any():
            self.guesses.observe(self.slots[some], drafted[some], accepted[some])
        self.available = self.guesses.choose_lengths(self.slots, room(self.slots), 1000, self.cost, self.steps)
        self.drafting = TURN * int(self.available.max())
        if self.drafting and self.held_up:
            self.drafting += self.held_up.pop()
        return int(drafted.sum())

    def run(self, steps: int) -> World:
        for _ in range(steps):
            self.step()
        return self


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 1.0])
def test_the_time_per_token_is_near_the_best_there_is(rows: int, rate: float) -> None:
    world = World(rows, lambda _: rate).run(1000)
    best = min(
        (verified(rows, rows * length) + TURN * length) / (rows * sum(rate**place for place in range(length + 1)))
        for length in range(MOST + 1)
    )
    assert world.seconds / world.tokens < 1.06 * best
    if rate == 0.0:
        assert world.seconds / world.tokens < 1.02 * verified(rows, 0) / rows, "as if there were no drafts"


def test_drafts_of_which_one_never_pays_and_several_do_are_tried() -> None:
    """As of a mixture of experts at one row: a step that verifies anything runs other kernels and reads more experts.
    Were one draft tried alone, nothing would be learned of those that pay."""
    found, slots = guesses(1)
    taught(found, slots, 0)
    cost, step = StepCost(), 0
    for drafts in (0, 1, 2, MOST):
        for _ in range(9):
            cost.observe(1, 1 + drafts, STEP + (1.2 * STEP if drafts else 0.0))
    while not (lengths := found.choose_lengths(slots, room(slots), 1000, cost, step)).any():
        step += 1
        assert step < 2000
    assert lengths.tolist() == [ENOUGH]


def test_first_draftings_that_are_held_up_end_nothing_for_good() -> None:
    """Kernels are loaded by the first ones: were their times kept, no drafting would seem to pay, and none be timed."""
    world = World(1, lambda _: 0.9)
    world.held_up = [20 * STEP] * (KNOWN + 1)
    world.run(STALE + 300)
    assert sum(world.step() for _ in range(100)) > 300


def test_it_comes_back_when_drafts_come_true_again_and_goes_when_they_do_not() -> None:
    world = World(1, lambda step: 0.9 if 2000 < step < 4000 else 0.0).run(2000)
    assert sum(world.step() for _ in range(200)) > 350, "within two hundred steps"
    world.run(1700)
    assert sum(world.step() for _ in range(50)) > 150
    world.run(150)
    assert sum(world.step() for _ in range(200)) < 30
