"""Lives with LoRA adapters: whatever is read, copied, emptied and lost, every life has its own adapter's tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.engine_core.scheduling.options import SpeculationOptions
from tests.sim.lives import World, random_lives
from tests.sim.server import ROOMY, Server
from tests.sim.simulation import Simulation

PLAIN = World(
    blocks=64, block_size=4, slots=8, budget=32, max_model_len=40, depth=2, tenants=3,
    adapters=("a", "b", "c", "d", "e"), adapter_places=2, adapter_memory=3,
)  # fmt: skip
WORLDS = {
    "plain": PLAIN,
    "one place": replace(PLAIN, adapter_places=1, adapter_memory=1, fairness=False),
    "tight": replace(PLAIN, blocks=14, budget=8, careless=True),
    "restarts": replace(PLAIN, restarts=0.02, leaves=0.01),
    "stages": replace(PLAIN, stages=2, depth=3, guided=0.3, pooled=0.2),
    "drafts": replace(PLAIN, speculation=SpeculationOptions(method="draft_model", num_speculative_tokens=3)),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("seed", range(3))
def test_every_life_has_its_own_adapters_tokens(name: str, seed: int) -> None:
    rng = random.Random(seed)
    run = Simulation(WORLDS[name], random_lives(rng, WORLDS[name], 60), rng)
    found = run.run().statistics.adapters
    assert found.copies > found.places, "places were used again"
    assert found.loads > WORLDS[name].adapter_memory, "memory was used again"
    assert (found.running, found.waiting, found.failures) == ({}, {}, 0)


def throughput(adapters: int) -> float:
    """Requests per virtual second of 16 places and 64 slots. 256 requests are open at any time, and draw from the
    adapters in proportion to 1, 1/2, 1/3 and so on. Times are an 8B's on an H200: a prompt takes 13 ms, and a step here
    is 16 of its."""
    made = Server(replace(ROOMY, slots=64, blocks=2048, budget=256, adapter_places=16, adapter_memory=256))
    drawn = random.Random(0).choices(range(adapters), [1 / (number + 1) for number in range(adapters)], k=1024)
    numbers: list[int] = []
    ended = 0
    while 256 + ended <= len(drawn):
        asked = drawn[len(numbers) : 256 + ended]
        numbers += [made.submit([1, 2], max_tokens=16, adapter=f"a{one}") for one in asked]
        made.load()
        plan = made.step()
        assert plan is not None
        rows = sum(made.scheduler.statistics().adapters.running.values())
        made.now += 16 * (0.0039 + rows * 0.000052) + 0.013 * len(plan.starts)
        ended = sum(bool(made.seen(number).finish) for number in numbers)
    return ended / made.now


def test_many_adapters_through_few_places_cost_little_while_requests_wait() -> None:
    assert throughput(256) > 0.9 * throughput(16)
