"""The executor dies at every step of a run, alone and twice in a row: every life ends with the tokens it must have."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.engine_core.scheduling.lifecycle import SUSPICIOUS
from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.protocol.messages import Finish
from tests.sim.lives import Life, World, random_lives
from tests.sim.simulation import Outcome, Simulation

WORLDS = {
    "plain": World(blocks=64, block_size=4, slots=6, budget=24, max_model_len=40, depth=2),
    "tight": World(blocks=14, block_size=4, slots=6, budget=7, max_model_len=40, depth=2, prefix_caching=False),
    "serial": World(blocks=64, block_size=8, slots=6, budget=64, max_model_len=40, depth=1, policy="priority"),
    "guided": World(blocks=64, block_size=4, slots=6, budget=24, max_model_len=40, depth=2, guided=1.0),
    "drafts": World(
        blocks=64, block_size=4, slots=6, budget=24, max_model_len=40, depth=2, guided=0.3,
        speculation=SpeculationOptions(method="ngram", num_speculative_tokens=3), pace=0.0001,
    ),
    "states": World(
        blocks=64, block_size=4, slots=6, budget=24, max_model_len=40, depth=2, recurrent=True, places=2,
        host_places=3, state_piece=4,
    ),
    "host tier": World(
        blocks=24, block_size=2, slots=4, budget=16, max_model_len=40, depth=2, host_blocks=200, fairness=False,
    ),
    "own drafts": World(
        blocks=64, block_size=4, slots=6, budget=24, max_model_len=40, depth=2, skill=0.9,
        speculation=SpeculationOptions(method="draft_model", num_speculative_tokens=3), pace=0.0001,
    ),
}  # fmt: skip


def lives_of(world: World, count: int) -> list[Life]:
    """All kinds, but none that others end."""
    lives = random_lives(random.Random(8), world, count)
    return [replace(life, abort_after=None, stop_at=None) for life in lives]


def outcome(world: World, lives: list[Life], deaths: frozenset[int] = frozenset()) -> tuple[Outcome, int]:
    """What everybody saw, and how many plans there were. Each life's tokens are verified."""
    run = Simulation(world, lives, random.Random(3), deaths)
    found = run.run()
    return found, run.plans


def said(found: Outcome) -> dict[tuple[int, int], tuple[list[int], Finish]]:
    return {key: (seen.tokens, seen.finish) for key, seen in found.record.seen.items()}


@pytest.mark.parametrize("name", WORLDS)
def test_a_death_at_any_step_changes_no_token(name: str) -> None:
    world = WORLDS[name]
    lives = lives_of(world, 10)
    undisturbed, plans = outcome(world, lives)
    assert plans > 10
    for step in range(plans):
        found, _ = outcome(world, lives, frozenset((step,)))
        assert said(found) == said(undisturbed), step
        assert found.statistics.poisoned == 0


@pytest.mark.parametrize("name", WORLDS)
def test_neither_do_two_in_a_row(name: str) -> None:
    """The second one finds everybody at the place of the first: each is then run alone, and acquitted."""
    world = WORLDS[name]
    lives = lives_of(world, 10)
    undisturbed, plans = outcome(world, lives)
    assert SUSPICIOUS == 2
    for step in range(0, plans, 2):
        found, _ = outcome(world, lives, frozenset((step, step + 1)))
        assert said(found) == said(undisturbed), step
        assert found.statistics.poisoned == 0


@pytest.mark.long
@pytest.mark.parametrize("name", WORLDS)
def test_deaths_again_and_again(name: str) -> None:
    world = WORLDS[name]
    lives = lives_of(world, 60)
    undisturbed, plans = outcome(world, lives)
    for seed in range(200):
        rng = random.Random(seed)
        deaths = frozenset(step for step in range(3 * plans) if rng.random() < 0.04)
        apart = frozenset(step for step in deaths if not {step - 1, step - 2, step - 3} & deaths)
        found, _ = outcome(world, lives, apart)
        assert found.statistics.poisoned or said(found) == said(undisturbed)
