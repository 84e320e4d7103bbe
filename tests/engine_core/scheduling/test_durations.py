"""How long the phases of requests take, on a clock that the test winds."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine_core.histogram import HistogramStatistics
from penstock.engine_core.scheduling.statistics import PHASE, SequenceStatistics
from penstock.protocol.messages import Pooling, Written
from tests.sim.lives import World
from tests.sim.server import Server

ONE_SLOT = World(blocks=256, block_size=4, slots=1, budget=64, max_model_len=64, depth=1)


def durations(server: Server) -> SequenceStatistics:
    return server.scheduler.statistics().sequences


def step(server: Server, planned: float, applied: float) -> None:
    """One step, planned and applied at these seconds."""
    plan = server.scheduler.plan(planned)
    assert plan is not None
    for result in server.executor.run(plan):
        server.scheduler.apply(result, applied)
        server.executor.applied(result.step)


def seen(statistics: HistogramStatistics) -> tuple[int, float]:
    """How many, and their sum."""
    return sum(statistics.counts), statistics.total


def test_each_phase_ends_where_the_next_begins() -> None:
    server = Server()
    server.submit([3, 4, 5], max_tokens=3)  # at 0 s
    step(server, 1.0, 3.0)
    step(server, 3.5, 4.0)
    assert seen(durations(server).decode) == (0, 0.0)
    step(server, 4.0, 8.0)
    found = durations(server)
    assert [seen(each) for each in (found.queue, found.prefill, found.decode, found.inference)] == [
        (1, 1.0), (1, 2.0), (1, 5.0), (1, 7.0)
    ]  # fmt: skip
    assert seen(found.per_token) == (1, 2.5), "two tokens came behind the first"


def test_one_token_is_a_decode_of_no_time() -> None:
    server = Server()
    server.submit([3], max_tokens=1)
    step(server, 0.25, 0.5)
    found = durations(server)
    assert (seen(found.prefill), seen(found.decode), seen(found.inference)) == ((1, 0.25), (1, 0.0), (1, 0.25))
    assert seen(found.per_token) == (0, 0.0)


def test_who_waits_for_a_slot_is_in_the_queue() -> None:
    server = Server(ONE_SLOT)
    server.submit([3, 4], max_tokens=2)
    server.submit([5, 6], max_tokens=2)
    for second in range(4):
        step(server, float(second), second + 0.5)
    assert seen(durations(server).queue) == (2, 2.0)


def test_the_aborted_say_nothing_of_how_long_such_a_request_takes() -> None:
    server = Server()
    number = server.submit([3, 4], max_tokens=9)
    step(server, 1.0, 2.0)
    server.scheduler.abort(number)
    found = durations(server)
    assert (seen(found.queue), seen(found.prefill)) == ((1, 1.0), (1, 1.0))
    assert (seen(found.decode), seen(found.inference)) == ((0, 0.0), (0, 0.0))


def test_a_preempted_request_keeps_its_beginnings() -> None:
    server = Server()
    server.submit([3, 4], max_tokens=2)
    step(server, 1.0, 2.0)
    server.scheduler.restart(1, 3.0)
    server.executor = server.new_executor(1)
    step(server, 5.0, 9.0)
    found = durations(server)
    assert [seen(each) for each in (found.queue, found.prefill, found.decode)] == [(1, 1.0), (1, 1.0), (1, 7.0)]


def test_what_began_elsewhere_counts_where_it_waits_here() -> None:
    server = Server()
    server.submit([3, 4], written=(Written(np.array([7], np.int32).tobytes()),), max_tokens=2)
    step(server, 1.0, 2.0)
    found = durations(server)
    assert seen(found.queue) == (1, 1.0)
    assert not any(sum(each.counts) for each in (found.prefill, found.decode, found.inference))


def test_a_vector_is_all_prefill() -> None:
    server = Server()
    server.submit([3, 4, 5], pooling=Pooling(kind="last"))
    step(server, 1.0, 4.0)
    found = durations(server)
    assert (seen(found.prefill), seen(found.inference), seen(found.decode)) == ((1, 3.0), (1, 3.0), (0, 0.0))


def test_each_choice_counts() -> None:
    server = Server()
    server.submit([3, 4, 5, 6, 7], n=3, max_tokens=1)
    while server.scheduler.unfinished:
        step(server, 1.0, 2.0)
    assert seen(durations(server).prefill) == (3, pytest.approx(3.0))


def test_bounds_ascend() -> None:
    assert list(PHASE) == sorted(set(PHASE))
