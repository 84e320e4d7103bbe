"""Lives of models whose KV blocks go to disk and come back, over the deaths of executors: every position reads the keys
of its own prefix, whatever the disk does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.engine_core.kv.host_tier import StorageTierStatistics
from penstock.engine_core.scheduling.options import SpeculationOptions
from tests.sim.lives import World, random_lives, random_world
from tests.sim.simulation import Simulation

PLAIN = World(
    blocks=48, block_size=2, slots=4, budget=16, max_model_len=40, depth=2, tenants=2, host_blocks=60, disk_blocks=300,
)  # fmt: skip
WORLDS = {
    "plain": PLAIN,
    "a small disk": replace(PLAIN, disk_blocks=100),
    "one place": replace(PLAIN, disk_blocks=1),
    "few of the host's": replace(PLAIN, host_blocks=9),
    "broken": replace(PLAIN, storage_trouble=0.1),
    "restarts": replace(PLAIN, restarts=0.02, leaves=0.002),
    "restarts of a broken one": replace(PLAIN, restarts=0.02, storage_trouble=0.1, depth=1),
    "a shared store": replace(PLAIN, kv_store=True, restarts=0.02),
    "a shared store that fails": replace(PLAIN, kv_store=True, restarts=0.02, storage_trouble=0.1),
    "a shared store and windows": replace(PLAIN, kv_store=True, windows=(0, 7), blocks=96),
    "windows": replace(PLAIN, windows=(0, 7), blocks=96),
    "states": replace(PLAIN, recurrent=True, places=12, host_places=60, state_piece=4),
    "own drafts": replace(
        PLAIN, speculation=SpeculationOptions(method="draft_model", num_speculative_tokens=3), pace=0.0001, skill=0.9
    ),
}


def run(world: World, seed: int, lives: int) -> StorageTierStatistics:
    rng = random.Random(seed)
    return Simulation(world, random_lives(rng, world, lives), rng).run().statistics.storage_tier


LONG = ("one place", "few of the host's", "a shared store and windows", "restarts of a broken one", "own drafts")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in WORLDS]
)
def test_every_position_reads_its_own_prefix(name: str) -> None:
    world = WORLDS[name]
    seen = [run(world, seed, 150) for seed in range(2)]
    assert sum(stand.stored for stand in seen) > 20
    if world.disk_blocks > 1:
        assert sum(stand.loads for stand in seen) > 5
        assert sum(stand.loaded for stand in seen) > (5 if world.kv_store and world.storage_trouble else 20)
        assert (sum(stand.lookups for stand in seen) > 20) == world.kv_store
    assert (sum(stand.failed for stand in seen) > 20) == (world.storage_trouble > 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_300_lives_in_any_world(seed: int) -> None:
    rng = random.Random(seed)
    world = replace(
        random_world(rng), host_blocks=rng.choice((1, 9, 80)), disk_blocks=rng.choice((1, 9, 800)),
        storage_trouble=rng.choice((0.0, 0.3)), kv_store=bool(seed % 2),
    )  # fmt: skip
    if seed % 3 == 1:
        windows = ((0, 4), (0, 7, 7), (0, 1, 16))[seed // 3 % 3]
        world = replace(world, windows=windows, blocks=world.blocks * len(windows))
    if seed % 3 == 2:
        world = replace(world, recurrent=True, places=rng.choice((1, 12)), host_places=5, state_piece=4)
    run(world, seed, 300)
