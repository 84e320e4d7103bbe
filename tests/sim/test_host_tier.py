"""Lives of models whose KV blocks go to the host's memory and come back: every position reads the keys of its own
prefix, whatever was copied, dropped, fetched and forgotten meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.engine_core.kv.host_tier import HostTierStatistics
from penstock.engine_core.scheduling.options import SpeculationOptions
from tests.sim.lives import World, random_lives, random_world
from tests.sim.simulation import Simulation

PLAIN = World(
    blocks=48, block_size=2, slots=4, budget=16, max_model_len=40, depth=2, tenants=2, host_blocks=300,
)  # fmt: skip
WORLDS = {
    "plain": PLAIN,
    "a small memory": replace(PLAIN, host_blocks=40),
    "one block": replace(PLAIN, host_blocks=1),
    "serial": replace(PLAIN, depth=1, block_size=4, policy="priority"),
    "preempted": replace(PLAIN, blocks=30, careless=True, slots=8),
    "restarts": replace(PLAIN, restarts=0.02, leaves=0.002),
    "stages": replace(PLAIN, stages=2, depth=3, guided=0.5, pooled=0.2, piece=4),
    "own drafts": replace(
        PLAIN, speculation=SpeculationOptions(method="draft_model", num_speculative_tokens=3), pace=0.0001, skill=0.9
    ),
    "guesses": replace(PLAIN, speculation=SpeculationOptions(method="ngram"), guided=1.0),
    "windows": replace(PLAIN, windows=(0, 7), blocks=96),
    "windows alone": replace(PLAIN, windows=(9,)),
    "states": replace(PLAIN, recurrent=True, places=12, host_places=20, state_piece=4),
    "images": replace(PLAIN, encoder_rows=24, lines=True),
    "whole images": replace(PLAIN, encoder_rows=24, mutual=True, budget=24, blocks=64),
}


def run(world: World, seed: int, lives: int) -> HostTierStatistics:
    rng = random.Random(seed)
    return Simulation(world, random_lives(rng, world, lives), rng).run().statistics.host_tier


@pytest.mark.parametrize("name", WORLDS)
def test_every_position_reads_its_own_prefix(name: str) -> None:
    world = WORLDS[name]
    seen = [run(world, seed, 150) for seed in range(2)]
    assert sum(stand.copied for stand in seen) > 20
    if world.depth > 1:  # with one step at a time all copies are done in time
        assert sum(stand.lost for stand in seen) > 5, "blocks were taken while they were copied"
    if world.host_blocks > 1:
        assert sum(stand.fetches for stand in seen) > 5
        assert sum(stand.fetched for stand in seen) > 20


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_300_lives_in_any_world(seed: int) -> None:
    rng = random.Random(seed)
    world = replace(random_world(rng), host_blocks=rng.choice((1, 9, 80, 800)))
    if seed % 3 == 1:
        windows = ((0, 4), (0, 7, 7), (0, 1, 16))[seed // 3 % 3]
        world = replace(world, windows=windows, blocks=world.blocks * len(windows))
    if seed % 3 == 2:
        world = replace(world, recurrent=True, places=rng.choice((1, 12)), host_places=5, state_piece=4)
    run(world, seed, 300)
