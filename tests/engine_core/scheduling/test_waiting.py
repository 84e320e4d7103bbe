"""Who waits in the queue is told apart by what is missing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.scheduling.admission import REASONS
from tests.sim.lives import World
from tests.sim.server import Server


def world(blocks: int = 256, slots: int = 8, budget: int = 64) -> World:
    return World(blocks=blocks, block_size=4, slots=slots, budget=budget, max_model_len=64, depth=1)


def reasons(server: Server) -> dict[str, int]:
    found = server.scheduler.statistics()
    assert sum(found.reasons.values()) == found.waiting
    assert set(found.reasons) <= set(REASONS), "of which the metrics tell"
    return found.reasons


def test_nobody_waits() -> None:
    server = Server(world())
    assert reasons(server) == {}
    server.submit([3, 4])
    server.step()
    assert reasons(server) == {}


def test_who_has_just_come_waits_for_the_next_step() -> None:
    server = Server(world())
    server.submit([3, 4])
    server.submit([5, 6])
    assert reasons(server) == {"step": 2}


def test_a_budget_that_others_use_up_is_the_next_steps() -> None:
    server = Server(world(budget=8))
    server.submit(list(range(3, 19)))
    server.submit([40, 41])
    server.plan()
    assert reasons(server) == {"step": 1}


def test_no_slot() -> None:
    server = Server(world(slots=1))
    for first in range(3):
        server.submit([10 + first, 4, 5])
    server.plan()
    assert reasons(server) == {"slot": 2}


def test_no_blocks() -> None:
    server = Server(world(blocks=6))
    server.submit(list(range(3, 19)), max_tokens=4)
    server.submit(list(range(30, 46)), max_tokens=4)
    server.plan()
    assert reasons(server) == {"blocks": 1}


def test_a_prefix_that_somebody_else_computes() -> None:
    server = Server(world(budget=16))
    prompt = list(range(3, 23))
    server.submit(prompt)
    server.plan()
    server.apply()
    server.submit([*prompt, 40])
    server.submit([50, 51, 52])
    server.plan()
    assert reasons(server).get("prefix", 0) == 1


@given(st.lists(st.integers(1, 20), max_size=12), st.integers(0, 6))
def test_reasons_always_add_up(lengths: list[int], steps: int) -> None:
    server = Server(world(blocks=16, slots=2, budget=8))
    for number, length in enumerate(lengths):
        server.submit([3 + number] * length)
    for _ in range(steps):
        if server.scheduler.unfinished:
            server.step()
        reasons(server)
