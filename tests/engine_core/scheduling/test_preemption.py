"""Too few blocks: seniors are served, juniors are preempted, everybody gets the right tokens in the end."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np
import pytest

from penstock.engine_core.scheduling.preemption import preempt_for_blocks
from penstock.engine_core.scheduling.request import Sequence
from penstock.protocol.messages import Finish
from tests.sim.executor import ints
from tests.sim.idle import is_idle
from tests.sim.server import ROOMY, Server

TIGHT = replace(ROOMY, blocks=7, block_size=2, slots=4, expected_share=0.0)


def verify(server: Server) -> None:
    for life in server.lives.values():
        server.record.verify(life, server.world, aborted=False, stopped=False)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_latest_arrival_is_preempted_and_the_first_never(depth: int) -> None:
    server = Server(TIGHT)
    numbers = [server.submit([token] * 3, max_tokens=10) for token in (3, 4, 5)]
    victims = set()
    while server.scheduler.unfinished or server.results:
        while server.scheduler.in_flight < depth and server.plan() is not None:
            pass
        queued = {choice.request.message.id for choice in server.scheduler._state.queue}
        victims |= {number for number in queued if server.seen(number).tokens}
        server.apply()
    assert server.scheduler.statistics().preemptions >= 2
    assert numbers[0] not in victims
    assert numbers[2] in victims
    verify(server)


@pytest.mark.parametrize("depth", [1, 2])
def test_of_many_rows_it_is_always_the_most_junior_that_is_preempted(depth: int) -> None:
    """Whatever is preempted came after everything that goes on running."""
    server = Server(replace(TIGHT, blocks=12, slots=6))
    for token in range(3, 9):
        server.submit([token] * 3, max_tokens=11)
    state, preempted = server.scheduler._state, 0
    while server.scheduler.unfinished or server.results:
        before = [choice for choice in state.slots.sequences if choice is not None]
        planned = server.scheduler.in_flight < depth and server.plan() is not None
        left = [choice for choice in before if choice.slot < 0]
        stayed = [choice for choice in before if choice.slot >= 0]
        preempted += len(left)
        assert not left or min(choice.rank for choice in left) > max(choice.rank for choice in stayed)
        if not planned or server.scheduler.in_flight == depth:
            server.apply()
    assert preempted >= 4
    verify(server)


def test_under_priority_the_lowest_is_preempted_even_if_it_came_first() -> None:
    server = Server(replace(TIGHT, policy="priority"))
    low = server.submit([3] * 3, max_tokens=10, priority=-1)
    server.step()
    server.submit([4] * 3, max_tokens=10, priority=4)
    while server.scheduler.statistics().preemptions == 0:
        server.step()
    assert [choice.request.message.id for choice in server.scheduler._state.queue] == [low]
    server.run(depth=2)
    verify(server)


def test_a_row_stands_still_until_the_fence_opens() -> None:
    server = Server(TIGHT)
    senior = server.submit([3] * 3, max_tokens=10)
    server.submit([4] * 3, max_tokens=10)
    while server.scheduler.statistics().preemptions == 0:
        plan = server.plan()
    held = server.scheduler.statistics().pool.held
    assert held == TIGHT.blocks, "what was given up is still touched by steps in flight"
    assert plan is None or not plan.starts
    while server.scheduler.in_flight:
        server.apply()
    assert server.scheduler.statistics().pool.held < held
    assert server.plan() is not None
    server.run(depth=3)
    assert len(server.seen(senior).tokens) == 10
    verify(server)


def test_the_most_junior_row_stands_still_and_is_not_preempted_for_itself() -> None:
    server = Server(TIGHT)
    server.submit([3] * 9, max_tokens=4)  # 5 blocks, room for a tenth position
    server.submit([4] * 4, max_tokens=4)  # 2 blocks, full
    server.step()
    plan = server.step()
    assert plan is not None
    assert [slot for (slot,) in ints(plan.decode_on)] == [0]
    assert server.scheduler.statistics().preemptions == 0
    server.run(2)
    verify(server)


def test_blocks_about_to_come_back_are_waited_for() -> None:
    server = Server(replace(TIGHT, blocks=4))
    server.submit([3] * 4, max_tokens=3)  # wants a third block next
    server.submit([4], max_tokens=5)
    server.submit([5], max_tokens=1)  # planned to its end with its first step
    server.plan()
    server.plan()
    assert server.scheduler.statistics().preemptions == 0
    server.run(2)
    verify(server)


def test_no_more_are_preempted_than_it_takes() -> None:
    server = Server(replace(TIGHT, blocks=4))
    server.submit([3] * 4, max_tokens=3)
    for token in (4, 5):
        server.submit([token], max_tokens=5)
    server.plan()
    server.plan()
    assert server.scheduler.statistics().preemptions == 1
    server.run(2)
    verify(server)


def test_one_longest_request_fills_the_whole_pool_and_ends() -> None:
    server = Server(replace(TIGHT, max_model_len=15))
    for token in (3, 4, 5, 6):
        server.submit([token], max_tokens=14)  # each needs all 7 blocks at its end
    server.run(depth=2)
    verify(server)


def test_a_prefilling_row_gives_way_too() -> None:
    server = Server(replace(TIGHT, budget=4, blocks=8))
    server.submit([3] * 3, max_tokens=12)
    server.step()
    server.submit([4] * 12, max_tokens=1)
    server.run(depth=2)
    assert server.scheduler.statistics().preemptions >= 1
    verify(server)


def test_what_no_longer_fits_a_smaller_pool_ends_with_an_error() -> None:
    server = Server(TIGHT)
    number = server.submit([3] * 3, max_tokens=12)  # 14 positions, all 7 blocks
    other = server.submit([4] * 3, max_tokens=4)
    server.step()
    tables = [choice.blocks for choice in server.scheduler._state.slots.sequences if choice is not None]
    pool = server.scheduler._state.kv.pool
    lost = pool.take(2)  # nobody holds them: leaked
    assert server.scheduler.check().blocks == tuple(lost)
    assert pool.check(tables, thorough=True).ok
    while server.scheduler.unfinished:
        if server.step() is None:
            break
    server.deliver()
    assert server.seen(number).finish == Finish.ERROR
    assert "KV cache" in str(server.seen(number).error)
    assert server.seen(other).finish == Finish.LENGTH
    assert is_idle(server.scheduler)


def test_a_queued_request_that_no_longer_fits_ends_with_an_error() -> None:
    server = Server(TIGHT)
    number = server.submit([3] * 10, max_tokens=5)
    server.scheduler._state.kv.pool.take(3)
    assert not server.scheduler.check().ok
    assert server.plan() is None
    assert server.seen(number).finish == Finish.ERROR
    assert is_idle(server.scheduler)


def only(server: Server, number: int) -> Sequence:
    """The one sequence of a request."""
    return server.scheduler._state.requests[number].sequences[0]


def decide(
    server: Server, short: Several[Sequence], available: int, prompt: tuple[Sequence, int, int] | None = None
) -> tuple[list[int], list[int]]:
    """The slots that decode and those whose prompts go on when so many blocks are left, the slots of `short` need one
    each, and a prompt (sequence, positions, blocks) needs several."""
    state = server.scheduler._state
    state.kv.pool.take(state.kv.pool.available - available)
    slots = np.array([sequence.slot for sequence in short], np.int64)
    chunks = [] if prompt is None else [prompt[:2]]
    needs = [] if prompt is None else [prompt[2]]
    batch, kept = preempt_for_blocks(state, state.slots.decoding(), slots, chunks, needs)
    return batch.slots.tolist(), [sequence.slot for sequence, _ in kept]


def decoding(count: int, **world: object) -> tuple[Server, list[Sequence]]:
    """A server with rows that hold one block each, in order of their arrival."""
    server = Server(replace(TIGHT, **world))  # type: ignore[arg-type]
    numbers = [server.submit([3 + number], max_tokens=8) for number in range(count)]
    server.step()
    return server, [only(server, number) for number in numbers]


def test_the_senior_row_has_the_last_block_whatever_its_slot() -> None:
    server = Server(TIGHT)
    gone = server.submit([3], max_tokens=1)
    senior = server.submit([4], max_tokens=8)
    server.step()
    assert server.seen(gone).finish == Finish.LENGTH
    junior = server.submit([5], max_tokens=8)
    server.step()
    rows = [only(server, junior), only(server, senior)]
    assert rows[0].slot < rows[1].slot
    assert decide(server, rows, available=1) == ([rows[1].slot], [])
    assert server.scheduler.statistics().preemptions == 0


def test_a_row_that_was_preempted_wants_nothing_more() -> None:
    server, rows = decoding(3)
    server.plan()  # in flight: what is given up comes back later
    decide(server, [rows[0], rows[2]], available=0)
    assert [row.slot >= 0 for row in rows] == [True, True, False]


def test_a_block_is_granted_once() -> None:
    server, rows = decoding(3)
    assert decide(server, rows[:2], available=1) == ([0, 1], [])
    assert rows[2].slot < 0


def test_blocks_that_came_back_at_once_do_not_count_as_coming_too() -> None:
    server, rows = decoding(2, policy="priority", budget=4, blocks=16)
    prompt = only(server, server.submit(list(range(3, 15)), max_tokens=1, priority=4))
    server.step()
    assert decide(server, [], 0, (prompt, 4, 2)) == ([], [2])
    assert [row.slot for row in rows] == [-1, -1]


def test_what_a_waiting_senior_is_promised_no_junior_takes() -> None:
    server, rows = decoding(2, policy="priority", budget=5, blocks=16)
    server.submit([9], max_tokens=1, priority=5)  # planned to its end with its first step: a block comes back
    prompt = only(server, server.submit(list(range(3, 15)), max_tokens=1, priority=4))
    server.plan()
    assert decide(server, rows[1:], 1, (prompt, 4, 2)) == ([0], [])
    assert server.scheduler.statistics().preemptions == 0


def test_a_preemption_makes_admission_more_careful() -> None:
    server, rows = decoding(2)
    forecast = server.scheduler._state.forecast
    before = forecast.share(2)
    decide(server, rows[:1], available=0)
    assert forecast.share(2) > before


def test_what_is_left_of_coming_blocks_counts_for_the_next_row() -> None:
    server, rows = decoding(3, blocks=16)
    server.submit([9, 8, 7], max_tokens=1)  # planned to its end with its first step: two blocks come back
    server.plan()
    assert decide(server, rows[:2], available=0) == ([2], [])
    assert server.scheduler.statistics().preemptions == 0
