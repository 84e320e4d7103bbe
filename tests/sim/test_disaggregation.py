"""Lives whose prompts are computed by one replica and whose outputs come from another one: every position reads the
keys of its own prefix, and every choice has all of its tokens once, whoever dies, and at whatever moment."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.engine_core.scheduling.options import SpeculationOptions
from tests.sim.cluster import Chances, Cluster, fitting
from tests.sim.lives import World, random_lives

PLAIN = World(blocks=64, block_size=2, slots=6, budget=16, max_model_len=40, depth=2, tenants=2, host_blocks=200)
WORLDS = {
    "plain": PLAIN,
    "a small memory": replace(PLAIN, host_blocks=24),
    "few blocks": replace(PLAIN, blocks=30, slots=8),
    "serial": replace(PLAIN, depth=1, block_size=4, policy="priority"),
    "guided": replace(PLAIN, guided=1.0, speculation=SpeculationOptions(method="ngram")),
    "own drafts": replace(
        PLAIN, speculation=SpeculationOptions(method="draft_model", num_speculative_tokens=3), pace=0.0001, skill=0.9
    ),
    "windows": replace(PLAIN, windows=(0, 7), blocks=128),
    "stages": replace(PLAIN, stages=2, depth=3, piece=4),
    "images": replace(PLAIN, encoder_rows=24, lines=True),
}
SHAPES = {"1+1": (2, 1), "2+1": (3, 2), "1+2": (3, 1)}
DEADLY = Chances(executor_dies=0.01, scheduler_dies=0.005)


def run(world: World, seed: int, lives: int, shape: str, chances: Chances | None = None, local: int = 0) -> Cluster:
    rng = random.Random(seed)
    replicas, prefill = SHAPES[shape]
    found = Cluster(
        world, fitting(world, random_lives(rng, world, lives)), rng, replicas=replicas, prefill=prefill,
        most_local=local, chances=chances,
    )  # fmt: skip
    found.run()
    return found


@pytest.mark.parametrize("name", WORLDS)
def test_prompts_and_outputs_apart(name: str) -> None:
    found = run(WORLDS[name], 1, 80, "1+1")
    handed = found.frontend.statistics().dispatch.handed_over
    assert handed > 40
    assert found.fetched > 20


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["plain", "a small memory", "guided"])
def test_whoever_dies(name: str, shape: str) -> None:
    found = run(WORLDS[name], 2, 80, shape, DEADLY, local=6)
    dispatch = found.frontend.statistics().dispatch
    assert found.deaths
    assert dispatch.moved
    assert dispatch.handed_over > 3
    assert dispatch.local
