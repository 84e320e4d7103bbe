"""Too few blocks: seniors are served, juniors are preempted, everybody gets the right tokens in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.protocol.messages import Finish
from tests.sim.executor import ints
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
    assert server.scheduler.idle


def test_a_queued_request_that_no_longer_fits_ends_with_an_error() -> None:
    server = Server(TIGHT)
    number = server.submit([3] * 10, max_tokens=5)
    server.scheduler._state.kv.pool.take(3)
    assert not server.scheduler.check().ok
    assert server.plan() is None
    assert server.seen(number).finish == Finish.ERROR
    assert server.scheduler.idle
