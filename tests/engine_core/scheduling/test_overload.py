"""What comes to a full queue, or waits in it for too long, is told when to come again; who has begun goes on."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages import Rejected, Sampling, SubmitTokens, Written
from tests.sim.idle import is_idle
from tests.sim.lives import World
from tests.sim.server import Server

TIGHT = World(blocks=256, block_size=4, slots=1, budget=64, max_model_len=64, depth=1)


def new_server(world: World = TIGHT, **bounds: float) -> Server:
    server = Server(world)
    state = server.scheduler._state
    state.options = msgspec.structs.replace(state.options, **bounds)
    return server


def refused(server: Server) -> dict[int, Rejected]:
    server.deliver()
    return server.record.rejected


def check_books(server: Server) -> None:
    """The queue's sum is that of what stands in it."""
    queue = server.scheduler._state.queue
    assert queue.tokens == sum(choice.request.prompt_tokens for choice in queue)


def test_tokens_that_wait_are_bounded() -> None:
    server = new_server(max_queued_tokens=20)
    for _ in range(3):
        server.submit([3] * 10)
        check_books(server)
    third = refused(server)[3]
    assert (third.status, third.code) == (429, "overloaded")
    assert "20 tokens are waiting; at most 20" in third.message
    assert "--max-queued-tokens" in third.message
    server.plan()  # the first one has a slot and waits no more
    check_books(server)
    server.submit([3] * 10)
    assert set(refused(server)) == {3}
    server.scheduler.abort(2)
    check_books(server)
    server.submit([3] * 10)
    assert set(refused(server)) == {3}
    server.scheduler.forget(0)
    assert server.scheduler._state.queue.tokens == 0


def test_an_empty_queue_takes_any_prompt() -> None:
    server = new_server(max_queued_tokens=5)
    server.submit([3] * 50)
    server.submit([3])
    assert set(refused(server)) == {2}


def test_what_goes_on_after_a_crash_is_not_turned_away() -> None:
    server = new_server(max_queued_tokens=5, max_queue_time=1.0)
    server.submit([3] * 10)
    server.submit([3] * 10, written=(Written(np.array([7, 8], np.int32).tobytes()),), max_tokens=6)
    server.scheduler.expire(5.0)
    assert set(refused(server)) == {1}


def test_without_bounds_nobody_is_turned_away() -> None:
    server = new_server()
    for _ in range(50):
        server.submit([3] * 20)
    server.scheduler.expire(1e9)
    assert refused(server) == {}


@pytest.mark.parametrize("n", [1, 3])
def test_who_waits_for_too_long_is_told_so_and_who_runs_goes_on(n: int) -> None:
    server = new_server(max_queue_time=2.0)
    running = server.submit([3, 4])
    late = server.submit([5, 6], n=n)
    server.plan()
    state = server.scheduler._state
    fresh = server.submit([7, 8])
    state.requests[fresh].since = 1.5
    server.scheduler.expire(1.9)
    assert refused(server) == {}
    server.scheduler.expire(2.0)
    assert set(refused(server)) == {late}
    assert (refused(server)[late].status, refused(server)[late].code) == (429, "overloaded")
    assert "2 s" in refused(server)[late].message
    assert "--max-queue-time" in refused(server)[late].message
    assert set(state.requests) == {running, fresh}
    check_books(server)
    server.apply()
    while server.scheduler.unfinished:
        server.step()
    assert is_idle(server.scheduler)


def test_who_was_preempted_waits_as_long_as_it_takes() -> None:
    server = new_server(max_queue_time=1.0)
    number = server.submit([3, 4, 5])
    server.step()
    server.scheduler.restart(1, 0.0)
    check_books(server)
    assert len(server.scheduler._state.queue) == 1
    server.scheduler.expire(100.0)
    assert refused(server) == {}
    assert server.scheduler._state.requests.keys() == {number}


def test_when_to_come_again_is_what_half_of_the_queue_takes() -> None:
    server = new_server(max_queued_tokens=40)
    scheduler = server.scheduler
    for number in range(101, 105):  # four requests end within a second: four a second
        message = SubmitTokens(id=number, token_ids=np.array([3], np.int32).tobytes(), sampling=Sampling(max_tokens=1))
        scheduler.submit(message, 0, (number - 101) / 4)
        scheduler.abort(number)
    scheduler.plan(1.0)
    for _ in range(4):
        server.submit([3] * 10)
    scheduler._state.stats.totals.ends.clear()
    scheduler._state.stats.totals.ends.extend([(0.0, 0), (1.0, 4)])
    server.submit([3])
    assert refused(server)[5].retry_after == pytest.approx(4 / 2 / 4.0)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3), st.sampled_from("saxp")), max_size=25))
def test_the_sum_of_waiting_tokens_is_kept_whatever_happens(moves: list[tuple[int, int, str]]) -> None:
    server = new_server(max_queued_tokens=60, max_queue_time=2.0)
    now = 0.0
    for tokens, n, move in moves:
        now += 0.5
        if move == "s":
            number = server.submit([3] * tokens, n=n)
            if number in server.scheduler._state.requests:
                server.scheduler._state.requests[number].since = now
        elif move == "a":
            server.scheduler.abort(tokens)
        elif move == "x":
            server.scheduler.expire(now)
        else:
            server.step()
        check_books(server)
        assert server.scheduler._state.queue.tokens <= 60 + 2 * 30  # choices of a request that was taken
    server.deliver()
    for message in server.record.rejected.values():
        assert message.status == 429
        assert message.retry_after is not None
