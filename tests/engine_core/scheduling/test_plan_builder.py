"""The work of a step: the budget, running rows first, chunks, small diffs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from penstock.protocol.steps import StepPlan, choice_seed
from tests.sim.executor import ints
from tests.sim.idle import is_idle
from tests.sim.server import ROOMY, Server, chunks


def flat(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def test_nothing_to_do_is_no_plan() -> None:
    assert Server().plan() is None


def test_a_prompt_is_cut_to_the_budget_and_only_its_last_chunk_samples() -> None:
    server = Server(replace(ROOMY, budget=8))
    server.submit(list(range(20)))
    found = [chunks(server.step()) for _ in range(3)]
    assert [(start, count, sample) for ((_, start, count, sample),) in found] == [(0, 8, 0), (8, 8, 0), (16, 4, 1)]


def test_running_rows_come_first_and_chunks_fill_the_rest() -> None:
    server = Server(replace(ROOMY, budget=8))
    server.submit([3, 4], max_tokens=20)
    server.submit([5, 6, 7], max_tokens=20)
    server.step()
    long = server.submit([8] * 20)
    plan = server.step()
    assert flat(plan.decode_on) == sorted(flat(plan.decode_on))  # type: ignore[union-attr]
    assert len(flat(plan.decode_on)) == 2  # type: ignore[union-attr]
    assert [(start, count) for _, start, count, _ in chunks(plan)] == [(0, 6)]
    server.run()
    assert len(server.seen(long).tokens) == 4


def test_several_prompts_share_a_step_in_order() -> None:
    server = Server(replace(ROOMY, budget=10))
    for first in (3, 4, 5):
        server.submit([first] * 4)
    plan = server.step()
    assert [(start, count, sample) for _, start, count, sample in chunks(plan)] == [(0, 4, 1), (0, 4, 1), (0, 2, 0)]


def test_the_rest_of_a_prompt_and_a_newcomer_share_the_budget() -> None:
    server = Server(replace(ROOMY, budget=10))
    server.submit([3] * 16)
    server.submit([4] * 16)
    found = [[(start, count) for _, start, count, _ in chunks(server.step())] for _ in range(2)]
    assert found == [[(0, 10)], [(10, 6), (0, 4)]]


def test_a_steady_decode_step_costs_only_new_blocks() -> None:
    server = Server(replace(ROOMY, block_size=16))
    for first in range(8):
        server.submit([first] * 3, max_tokens=40)
    sizes = []
    for _ in range(30):
        plan = server.step()
        assert plan is not None
        assert plan.step < 3 or not (plan.starts or plan.decode_on or plan.decode_off or plan.chunks)
        sizes.append(len(msgspec.msgpack.encode(plan)))
    assert max(sizes[3:]) < 106  # 8 rows that take a block each at once, of eight bytes; an empty column takes two
    assert sorted(sizes)[15] < 40


def test_a_requests_data_crosses_once() -> None:
    server = Server(replace(ROOMY, budget=8))
    number = server.submit(list(range(20)), n=2, max_tokens=6)
    plans: list[StepPlan] = []
    while (plan := server.step()) is not None:
        plans.append(plan)
    starts = [start for plan in plans for start in plan.starts]
    assert len(starts) == 2
    assert [start.seed for start in starts] == [choice_seed(number, 0), choice_seed(number, 1)]
    assert all(flat(start.token_ids) == list(range(20)) and start.prompt_tokens == 20 for start in starts)


def test_a_length_stop_is_planned_no_further_at_any_depth() -> None:
    server = Server()
    server.submit([3, 4], max_tokens=3)
    assert [server.plan() is not None for _ in range(5)] == [True, True, True, False, False]
    while server.results:
        server.apply()
    assert is_idle(server.scheduler)
    assert server.scheduler.statistics().surplus_tokens == 0


def test_positions_and_blocks_are_planned_ahead_of_the_tokens() -> None:
    server = Server(replace(ROOMY, block_size=2))
    server.submit([3, 4, 5], max_tokens=6)
    plans = [server.plan() for _ in range(6)]  # nothing applied
    assert [len(ints(plan.blocks, 2)) for plan in plans if plan] == [0, 0, 1, 0, 1, 0]


def test_decode_set_changes_are_told_once() -> None:
    server = Server()
    short = server.submit([3, 4], max_tokens=3)
    server.submit([5, 6], max_tokens=9)
    plans = []
    while (plan := server.step()) is not None:
        plans.append((flat(plan.decode_on), flat(plan.decode_off)))
    assert plans[1] == ([0, 1], [])
    assert plans[3] == ([], [0])
    assert all(change == ([], []) for change in (plans[0], plans[2], *plans[4:]))
    assert len(server.seen(short).tokens) == 3


def test_step_numbers_rise_by_one() -> None:
    server = Server()
    server.submit([3], max_tokens=5)
    assert [server.step().step for _ in range(5)] == [1, 2, 3, 4, 5]  # type: ignore[union-attr]
