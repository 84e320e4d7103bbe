"""Lives with images: whatever is encoded, shared, evicted and lost, every chunk reads the rows of its own images."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.engine_core.scheduling.options import SpeculationOptions
from tests.sim.lives import World, random_lives, random_world
from tests.sim.simulation import Simulation

PLAIN = World(
    blocks=64, block_size=4, slots=8, budget=32, max_model_len=64, depth=2, tenants=3, encoder_rows=24, lines=True,
)  # fmt: skip
MUTUAL = replace(PLAIN, mutual=True, lines=False)
WORLDS = {
    "plain": PLAIN,
    "one image": replace(PLAIN, encoder_rows=8, fairness=False, most_rows=4),
    "tight": replace(PLAIN, blocks=22, budget=8, careless=True),
    "restarts": replace(PLAIN, restarts=0.02, leaves=0.002),
    "stages": replace(PLAIN, stages=2, depth=3, guided=0.3, pooled=0.2, piece=4),
    "drafts": replace(PLAIN, speculation=SpeculationOptions(method="draft_model", num_speculative_tokens=3)),
    "no prefix caching": replace(PLAIN, prefix_caching=False, resumed=0.3),
    "states": replace(PLAIN, recurrent=True, places=12, host_places=4),
    "mutual": MUTUAL,
    "mutual, the least budget": replace(MUTUAL, budget=15, windows=(0, 8), blocks=128, guided=0.5),
    "mutual, stages and drafts": replace(
        MUTUAL, stages=2, depth=3, piece=2, budget=16,
        speculation=SpeculationOptions(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1),
    ),
    "mutual, tight": replace(MUTUAL, blocks=22, budget=16, careless=True, block_size=3, restarts=0.01),
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("seed", range(2))
def test_every_chunk_reads_its_own_images(name: str, seed: int) -> None:
    rng = random.Random(seed)
    world = WORLDS[name]
    run = Simulation(world, random_lives(rng, world, 60), rng)
    found = run.run().statistics.encoder
    assert found.held == 0
    assert found.encoded > 20
    assert found.hits > 8, "images were shared"
    assert found.evicted > 8, "rows were used again"
    assert found.failures == 0


@pytest.mark.long
@pytest.mark.parametrize("mutual", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_10000_lives(seed: int, mutual: bool) -> None:
    rng = random.Random(seed)
    world = random_world(rng)
    rows = rng.choice((8, 12, 24, 80))
    world = replace(world, encoder_rows=rows, lines=rng.random() < 0.5, mutual=mutual, most_rows=rng.choice((2, 5, 8)))
    if mutual:
        world = replace(world, budget=max(world.budget, world.slots + 12))
    Simulation(world, random_lives(rng, world, 200), rng).run()
