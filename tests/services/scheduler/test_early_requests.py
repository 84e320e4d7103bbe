"""Requests for one of several models before it has been loaded at all."""

from __future__ import annotations

import pytest

from penstock.protocol.control import AbortAll, Controlled
from penstock.protocol.messages import Abort, Finish, Rejected
from tests.services.scheduler.test_server_loop_on_demand import OnDemand


def test_a_request_that_waits_for_the_first_load_may_be_aborted_and_its_client_may_leave() -> None:
    bench = OnDemand()
    for number in (1, 2, 3):
        bench.submit(number)
    other = bench.tokens.join(1)
    bench.iterate()
    assert bench.loop.unfinished == 3
    bench.tokens.arrives(bench.tokenizer, Abort(2))
    bench.tokens.arrives(other, Abort(7))
    bench.iterate()
    assert bench.loop.unfinished == 2
    bench.load()
    bench.run()
    assert bench.transcript.ends == {1: [Finish.LENGTH], 3: [Finish.LENGTH]}
    bench = OnDemand()
    bench.submit(1)
    bench.iterate()
    bench.tokens.leave(bench.tokenizer)
    bench.iterate()
    assert bench.loop.unfinished == 0


@pytest.mark.parametrize(("rid", "left"), [("", 0), ("b", 1)])
def test_requests_that_wait_for_the_first_load_are_aborted_with_all(rid: str, left: int) -> None:
    bench = OnDemand()
    bench.submit(1, rid="a")
    bench.submit(2, rid="b")
    bench.iterate(1.0)
    assert bench.status().waiting == 2
    bench.operator(AbortAll(5, rid))
    assert bench.answers() == {5: Controlled(5, asleep=True)}
    rejected = bench.tokens.take(Rejected, bench.tokenizer)
    assert [(one.id, one.status) for one in rejected] == [(1, 503), (2, 503)][left:]
    assert bench.loop.unfinished == left


def test_requests_wait_for_the_first_load_as_long_as_they_may() -> None:
    bench = OnDemand(max_queue_time=5.0)
    bench.submit(1)
    bench.iterate(1.0)
    bench.submit(2)
    bench.iterate(3.0)
    bench.iterate(3.0)
    (rejected,) = bench.tokens.take(Rejected, bench.tokenizer)
    assert (rejected.id, rejected.status, bench.loop.unfinished) == (1, 429, 1)
    assert "--max-queue-time" in rejected.message
