"""Random lives: each ends exactly once with exactly the tokens it must have, whatever happened around it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as change

from penstock.engine_core.scheduling.options import SpeculationOptions
from tests.sim.lives import World, random_lives, random_world
from tests.sim.simulation import Outcome, Simulation


def run(seed: int, lives: int, **fields: Any) -> Outcome:
    rng = random.Random(seed)
    world = replace(random_world(rng), **fields)
    return Simulation(world, random_lives(rng, world, lives), rng).run()


def seeds(each_time: int, count: int) -> list[Any]:
    """So many of `count` seeds run each time; the others are long."""
    return [pytest.param(seed, marks=pytest.mark.long if seed >= each_time else ()) for seed in range(count)]


@pytest.mark.parametrize("seed", seeds(24, 200))
def test_300_lives(seed: int) -> None:
    run(seed, 300)


def test_the_lives_are_lively() -> None:
    """The runs reach what they are meant to reach: an empty test would pass as well."""
    outcomes = [run(seed, 100, restarts=0.02) for seed in range(24)]
    seen = [outcome.statistics for outcome in outcomes]
    for name in ("aborted", "failed", "rejected", "surplus_tokens", "preemptions", "reused_tokens", "stale_results",
                 "yielded"):  # fmt: skip
        assert sum(getattr(stand, name) for stand in seen) >= 10, name
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert sum(getattr(stand, name) for stand in seen) >= 500, name
    assert sum(stand.draft_tokens - stand.accepted_tokens for stand in seen) >= 500
    assert max(len(stand.accepted_at) for stand in seen) >= 8
    assert sum(outcome.masks for outcome in outcomes) >= 1000
    assert sum(outcome.beside for outcome in outcomes) >= 100
    assert any(random_world(random.Random(seed)).leaves for seed in range(24))
    assert sum(stand.evicted_blocks for stand in seen) > 1000
    assert sum(stand.put_off for stand in seen) > 100


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_lives_of_which_half_want_vectors(seed: int) -> None:
    run(seed, 200, pooled=0.5, restarts=0.01)


@pytest.mark.parametrize("seed", seeds(12, 24))
def test_lives_with_recurrent_states(seed: int) -> None:
    rng = random.Random(seed + 1000)
    places, piece = rng.choice((0, 1, 3, 12, 50)), rng.choice((2, 4, 8, 16))
    host = rng.choice((0, 1, 5, 30))
    restarts = rng.choice((0.0, 0.01))
    run(seed, 200, recurrent=True, places=places, host_places=host, state_piece=piece, restarts=restarts)


def test_states_go_to_the_hosts_memory_and_come_back() -> None:
    fields = {"recurrent": True, "prefix_caching": True, "places": 2, "host_places": 12, "state_piece": 4}
    seen = [run(seed, 200, **fields).statistics.snapshots for seed in range(6)]
    assert sum(stand.spilled for stand in seen) > 200
    assert sum(stand.host_hits for stand in seen) > 50


WINDOWS = ((0, 4), (0, 7, 7), (0, 1, 16), (0, 0, 9))


@pytest.mark.parametrize("seed", seeds(12, 24))
def test_lives_of_models_with_windows(seed: int) -> None:
    windows = WINDOWS[seed % len(WINDOWS)]
    world = random_world(random.Random(seed))
    run(seed, 150, windows=windows, blocks=world.blocks * len(windows), restarts=0.005)


@pytest.mark.parametrize("seed", range(4))
def test_lives_of_models_that_have_windows_alone(seed: int) -> None:
    drafts = SpeculationOptions(method=("none", "ngram")[seed % 2], num_speculative_tokens=3)
    run(seed, 150, windows=(5,), speculation=drafts)


@pytest.mark.parametrize("seed", range(4))
def test_windows_preempt_nobody_whose_whole_allowance_is_expected(seed: int) -> None:
    """Without drafts, which take blocks that nobody reckoned with."""
    world = World(blocks=120, block_size=2, slots=24, budget=32, max_model_len=64, depth=2, windows=(0, 4),
                  growing=seed % 2 == 0, fairness=False)  # fmt: skip
    rng = random.Random(seed)
    plain = {"speculate": False, "prediction": b"", "automaton": None, "n": 1}
    lives = [replace(life, message=change(life.message, **plain)) for life in random_lives(rng, world, 200)]
    stand = Simulation(world, lives, rng).run().statistics
    assert stand.preemptions == 0
    assert stand.put_off > 50


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_10000_lives_in_one_run(depth: int) -> None:
    world = World(
        blocks=50,
        block_size=4,
        slots=24,
        budget=64,
        max_model_len=64,
        depth=depth,
        policy="priority",
        sources=3,
        restarts=0.001,
        leaves=0.0005,
        lazy=0.3,
        careless=True,
        speculation=SpeculationOptions(method="ngram"),
        guided=0.3,
    )
    rng = random.Random(7)
    outcome = Simulation(world, random_lives(rng, world, 10_000), rng).run()
    assert outcome.statistics.preemptions > 100
