"""Random lives: each ends exactly once with exactly the tokens it must have, whatever happened around it."""

from __future__ import annotations

import random

import pytest

from tests.sim.lives import random_lives, random_world
from tests.sim.simulation import Simulation


@pytest.mark.parametrize("seed", range(200))
def test_300_lives(seed: int) -> None:
    rng = random.Random(seed)
    world = random_world(rng)
    Simulation(world, random_lives(rng, world, 300), rng).run()
