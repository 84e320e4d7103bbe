"""Turns of a pipeline's rows: what a plan runs, and that stages have something to do."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.engine_core.scheduling.drafting import stretch
from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.protocol.steps import NO_MICROBATCH, StepPlan
from tests.sim.executor import ints
from tests.sim.idle import is_idle
from tests.sim.lives import World, random_lives, random_world
from tests.sim.pipeline import Load, idle_share
from tests.sim.server import ROOMY, Server
from tests.sim.simulation import Simulation

TWO = replace(ROOMY, stages=2, depth=3, slots=16, budget=256, max_model_len=128)
THREE = replace(TWO, stages=3, depth=4)


def running(server: Server) -> list[list[int]]:
    """Decoding slots of the executors by micro-batch."""
    return [sorted(server.executor._decoding.get(number, ())) for number in range(server.world.stages)]


def fill(server: Server) -> list[StepPlan]:
    """Plan as many steps as the world has in flight."""
    plans = []
    while server.scheduler.in_flight < server.world.depth and (plan := server.plan()) is not None:
        plans.append(plan)
    return plans


def turn(server: Server) -> list[StepPlan]:
    server.apply()
    return fill(server)


def test_one_stage_has_one_micro_batch_whose_turn_it_always_is() -> None:
    server = Server(replace(ROOMY, depth=2))
    for first in range(6):
        server.submit([first, 7], max_tokens=9)
    plans = fill(server)
    for _ in range(12):
        plans += turn(server) if server.results else []
    assert {plan.microbatch for plan in plans} == {0}
    assert max(len(rows) for rows in running(server)) <= 6


@pytest.mark.parametrize("world", [TWO, THREE], ids=["two stages", "three"])
def test_rows_are_spread_evenly_and_take_turns(world: World) -> None:
    server = Server(world)
    for first in range(12):
        server.submit([first, 7, 8], max_tokens=40)
    plans = fill(server)
    for _ in range(4 * world.stages):
        plans += turn(server)
    assert [len(rows) for rows in running(server)] == [12 // world.stages] * world.stages
    order = [plan.microbatch for plan in plans[-2 * world.stages :]]
    assert order[: world.stages] == order[world.stages :]
    assert sorted(order[: world.stages]) == list(range(world.stages))


def test_a_step_takes_as_many_stages_as_have_nothing_else_to_run() -> None:
    """By which the time of drafting is weighed, that the last stage takes once for each step."""
    for rows, expected in ((0, 3.0), (1, 3.0), (2, 1.5), (3, 1.0), (9, 1.0)):
        server = Server(THREE)
        for first in range(rows):
            server.submit([first, 7, 8], max_tokens=40)
        fill(server)
        for _ in range(6 if rows else 0):
            turn(server)
        assert stretch(server.scheduler._state) == expected
    assert stretch(Server(ROOMY).scheduler._state) == 1.0


def test_a_row_has_at_most_two_steps_in_flight() -> None:
    server = Server(replace(TWO, stages=4, depth=5))
    server.submit([3, 4], max_tokens=30)
    assert len(fill(server)) == 2  # its prompt and a token behind it
    for _ in range(5):
        assert len(turn(server)) == 1
        assert server.scheduler.in_flight == 2


def test_a_lone_row_goes_on_before_its_token_is_here() -> None:
    """There is nothing else to run, and the token reaches the first stage before its result the scheduler."""
    server = Server(TWO)
    server.submit([3, 4], max_tokens=30)
    assert len(fill(server)) == 2
    for _ in range(6):
        assert len(turn(server)) == 1


def test_prompts_go_first_where_every_row_is_too_early() -> None:
    server = Server(replace(TWO, piece=4, budget=16))
    server.submit([3], max_tokens=30)
    assert len(fill(server)) == 2
    server.submit([token % 32 for token in range(40)], max_tokens=3)
    server.apply()
    plan = server.plan()
    assert plan is not None
    assert ints(plan.chunks, 4)


def test_a_plan_without_rows_names_nobody_and_changes_no_set() -> None:
    server = Server(replace(TWO, piece=4, budget=16))
    plans = []
    for first in range(3):
        server.submit([first, *range(20)], max_tokens=4)
    while (found := fill(server)) or server.results:
        plans += found
        server.apply()
    alone = [plan for plan in plans if plan.microbatch == NO_MICROBATCH]
    assert all(plan.chunks and not plan.decode_on and not plan.decode_off for plan in alone)
    assert is_idle(server.scheduler)


def test_rows_move_where_others_have_ended() -> None:
    server = Server(TWO)
    for first in range(8):
        server.submit([first, 7], max_tokens=60)
    fill(server)
    for _ in range(6):
        turn(server)
    first, second = running(server)
    assert (len(first), len(second)) == (4, 4)
    for slot in first[:3]:
        server.scheduler.abort(int(server.scheduler._state.slots.addresses.ids[slot]))
    for _ in range(8):
        turn(server)
    assert sorted(map(len, running(server))) == [2, 3]


def test_a_long_prompt_is_cut_so_that_stages_share_it() -> None:
    server = Server(replace(TWO, piece=10, budget=256))
    number = server.submit([token % 32 for token in range(100)], max_tokens=2)
    counts = [ints(plan.chunks, 4)[0][2] for plan in fill(server)]
    assert counts == [25, 19, 14]  # a quarter of what is left, so that two stages soon have one each
    server.run(depth=3)
    assert len(server.seen(number).tokens) == 2


def test_one_stage_cuts_nothing() -> None:
    server = Server(replace(ROOMY, budget=64, piece=4))
    server.submit([token % 32 for token in range(60)], max_tokens=2)
    plan = server.plan()
    assert plan is not None
    assert ints(plan.chunks, 4)[0][2] == 60


def test_a_steady_step_of_any_micro_batch_changes_no_set() -> None:
    server = Server(replace(TWO, block_size=16))
    for first in range(8):
        server.submit([first] * 3, max_tokens=60)
    fill(server)
    for _ in range(6):
        turn(server)
    for plan in [plan for _ in range(20) for plan in turn(server)]:
        assert not plan.starts
        assert plan.decode_on == plan.decode_off == plan.chunks == b""


@pytest.mark.sweep
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_random_lives_at_several_stages(stages: int, seed: int) -> None:
    rng = random.Random(1000 * stages + seed)
    world = random_world(rng)
    world = replace(world, stages=stages, depth=stages - 1 + rng.choice((1, 2)), piece=rng.choice((1, 5, 512)))
    Simulation(world, random_lives(rng, world, 60), rng).run()


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(60))
def test_many_random_lives_at_several_stages(stages: int, seed: int) -> None:
    rng = random.Random(seed)
    world = random_world(rng)
    world = replace(world, stages=stages, depth=stages - 1 + rng.choice((1, 2, 2, 3)), piece=rng.choice((1, 5, 512)))
    Simulation(world, random_lives(rng, world, 150), rng).run()


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_are_never_idle_where_there_are_rows_for_all(stages: int) -> None:
    """32 rows that decode, beyond the pipeline's fill: next to none of any stage's time is lost."""
    assert idle_share(Load(stages=stages, rows=32, tokens=60)) < 0.02


def test_one_micro_batch_would_leave_stages_idle() -> None:
    """The same measure sees what is there to see: a single row keeps one stage of four busy."""
    assert idle_share(Load(stages=4, rows=1, tokens=60)) == pytest.approx(0.75, abs=0.02)


def test_ends_at_random_leave_few_gaps() -> None:
    assert idle_share(Load(stages=4, rows=64, tokens=80, spread=60)) < 0.05


def test_a_prompt_keeps_several_stages_busy() -> None:
    """Cut into pieces it is through in about half of the time: (pieces + stages - 1) / pieces of a stage's work."""
    whole = Load(stages=4, rows=1, prompt=4096, tokens=1, piece=1 << 20)
    assert idle_share(whole) == pytest.approx(0.75, abs=0.02)
    assert idle_share(replace(whole, piece=256)) < 0.35


def test_drafts_do_not_change_whose_turn_it_is() -> None:
    world = replace(TWO, speculation=SpeculationOptions(method="ngram", num_speculative_tokens=3))
    server = Server(world)
    for first in range(8):
        server.submit([first, 7, 8], max_tokens=30, prediction=[1, 2, 3])
    plans = fill(server)
    while server.results:
        plans += turn(server)
    assert {plan.microbatch for plan in plans} - {NO_MICROBATCH} == {0, 1}
    assert np.isin([plan.microbatch for plan in plans], (NO_MICROBATCH, 0, 1)).all()
    assert is_idle(server.scheduler)
