"""Every request ends once, whatever arrives, and the map of their states is empty afterwards."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import OrderedDict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import EngineFailure, InvalidRequest, Overloaded, Unavailable
from penstock.protocol.images import ImageFile
from penstock.protocol.messages import (
    Abort,
    Client,
    Detokenize,
    Finish,
    Rejected,
    Sampling,
    SubmitText,
    Tokenize,
    Written,
)
from penstock.services.client.engine_client import HOLD, LOAD_SECONDS, MOST_DEATHS, EngineClient
from penstock.services.client.output_collector import OutputCollector
from penstock.services.client.replicas import ReplicaSet
from penstock.services.links.link import Arrival, Joined, Left
from penstock.services.metrics.requests import Timings
from penstock.services.tracing.tracer import Operations
from tests.services.client.fake_engine import FakeLink, Row, answering, batch, new_peer, silent, status, words
from tests.services.tracing.tracing import SAMPLED, Bench

NOW = 100.0
OWNER = Client("tenant", "name")


def engine_client(*ports: FakeLink, limit: int = 8, index: int = 3, processes: int = 1, **options: Any) -> EngineClient:
    """An engine client at a stopped clock, with an engine that is ready."""
    made = EngineClient(ports, index, 5, limit, status_limit=2.0, processes=processes, **options)
    for port in ports:
        port.deliver = lambda arrivals: made.receive(arrivals, NOW)
    ports[0].arrive(status())
    return made


def ids(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def collector(prompts: int = 1, n: int = 1) -> OutputCollector:
    return OutputCollector(prompts, n, stream=True, timings=Timings(), now=NOW)


def submit(made: EngineClient, count: int = 1, n: int = 1) -> tuple[OutputCollector, list[SubmitText]]:
    waiting = collector(count, n)
    made.submit([SubmitText(prompt="a", sampling=Sampling(), n=n, client=OWNER)] * count, waiting, NOW)
    return waiting, [made._requests[number].request for number in waiting.request_ids]


async def called(call: Tokenize | Detokenize) -> tuple[FakeLink, EngineClient, asyncio.Future[Any]]:
    """A call that a tokenizer has and does not answer."""
    port = FakeLink(silent)
    made = engine_client(port)
    asking = asyncio.ensure_future(made.call(call))
    await asyncio.sleep(0)
    return port, made, asking


@pytest.mark.parametrize("ordered", [False, True])
def test_a_priority_is_for_those_who_heed_it(ordered: bool) -> None:
    port = FakeLink(silent)
    made = engine_client(port, ordered=ordered)
    requests = [SubmitText(prompt="a", sampling=Sampling(), priority=priority) for priority in (0, -1)]
    made.submit(requests[:1], collector(), NOW)
    if ordered:
        made.submit(requests[1:], collector(), NOW)
    else:
        with pytest.raises(InvalidRequest, match="--scheduling-policy") as caught:
            made.submit(requests, collector(2), NOW)
        assert (caught.value.param, caught.value.code) == ("priority", "unsupported")
    assert [request.priority for request in port.of(SubmitText)] == ([0, -1] if ordered else [0])


def test_ids_are_ours_and_differ() -> None:
    made = engine_client(FakeLink(silent))
    ids = [request.id for _ in range(5) for request in submit(made)[1]]
    assert len(set(ids)) == 5
    assert {number >> 56 for number in ids} == {3}


def test_requests_are_spread_over_the_tokenizers() -> None:
    ports = [FakeLink(silent, index) for index in range(3)]
    made = engine_client(*ports, limit=64)
    for _ in range(9):
        submit(made)
    assert [len(port.of(SubmitText)) for port in ports] == [3, 3, 3]


@pytest.mark.parametrize(
    ("tokenizers", "processes", "shares"),
    [(1, 4, ["0", "0", "0", "0"]), (2, 4, ["0", "1", "0", "1"]), (4, 2, ["02", "13"]), (3, 2, ["02", "1"])],
)
def test_tokenizers_are_shared_out_among_api_processes(tokenizers: int, processes: int, shares: list[str]) -> None:
    found = []
    for index in range(processes):
        ports = [FakeLink(silent, number) for number in range(tokenizers)]
        made = engine_client(*ports, limit=64, index=index, processes=processes)
        for _ in range(6):
            submit(made)
        found.append("".join(str(number) for number, port in enumerate(ports) if port.of(SubmitText)))
    assert found == shares


def test_an_image_goes_to_the_tokenizer_that_decoded_it_whichever_process_has_it() -> None:
    found: dict[bytes, set[int]] = {}
    for index in range(4):
        for data in (b"a", b"b", b"c", b"d"):
            ports = [FakeLink(silent, number) for number in range(4)]
            made = engine_client(*ports, limit=64, index=index, processes=4)
            request = SubmitText(prompt="a", sampling=Sampling(), client=OWNER, images=(ImageFile(data=data),))
            made.submit([request], collector(), NOW)
            found.setdefault(data, set()).update(at for at, port in enumerate(ports) if port.of(SubmitText))
    assert all(len(ports) == 1 for ports in found.values())
    assert len(set.union(*found.values())) > 1


def test_another_share_is_used_when_its_own_takes_no_more() -> None:
    ports = [FakeLink(silent, index) for index in range(2)]
    made = engine_client(*ports, limit=64, index=0, processes=2)
    assert ports[0].peer is not None
    ports[0].peer.credit = 1
    for _ in range(3):
        submit(made)
    assert [len(port.of(SubmitText)) for port in ports] == [1, 2]
    ports[1].lose()
    with pytest.raises(Overloaded):
        submit(made)


def test_a_full_tokenizer_is_passed_over_and_all_full_is_429() -> None:
    ports = [FakeLink(silent, index) for index in range(2)]
    made = engine_client(*ports)
    assert ports[0].peer is not None
    assert ports[1].peer is not None
    ports[0].peer.credit = 0
    submit(made)
    submit(made)
    assert len(ports[1].of(SubmitText)) == 2
    ports[1].peer.credit = 1
    with pytest.raises(Overloaded):
        submit(made, count=2)
    assert made.statistics().unfinished == 2  # the first half of the third was taken back
    assert made.statistics().refused == 1
    assert made.statistics().aborts_owed == 1


def test_the_span_of_a_request_that_found_no_room_has_an_end() -> None:
    """Its first prompt was handed over and is aborted, its second one found no credit."""
    port, bench = FakeLink(silent), Bench()
    made = engine_client(port, operations=Operations(bench.tracer, "demo"))
    assert port.peer is not None
    port.peer.credit = 1
    waiting = collector(2)
    asked = [SubmitText(prompt="a", sampling=Sampling(), trace=SAMPLED) for _ in range(2)]
    with pytest.raises(Overloaded):
        made.submit(asked, waiting, NOW)
    operation, *prompts = bench.spans()
    assert (operation.name, operation.start, operation.end) == ("text_completion demo", NOW, NOW)
    assert operation.error == "the server is busy; try again later"
    assert operation.attributes["error.type"] == "overloaded"
    assert len(prompts) == 2
    assert waiting.operation is None


def test_admission_is_bounded_and_says_when_to_come_back() -> None:
    port = FakeLink(silent)
    made = engine_client(port, limit=3)
    submit(made, count=3)
    with pytest.raises(Overloaded) as caught:
        submit(made)
    assert caught.value.retry_after == pytest.approx(3 / 2 / 4.0)  # half the queue at 4 requests per second
    with pytest.raises(InvalidRequest):
        submit(made, count=4)
    assert made.statistics().unfinished == 3
    assert len(port.of(SubmitText)) == 3


def test_a_request_whose_images_are_being_read_has_a_place() -> None:
    port = FakeLink(silent)
    made = engine_client(port, limit=2)
    with made.reserved(NOW), made.reserved(NOW):
        assert made.statistics().unfinished == 2
        with pytest.raises(Overloaded), made.reserved(NOW):
            pass
        with pytest.raises(Overloaded):
            submit(made)
    assert made.statistics().unfinished == 0
    submit(made, 2)
    with pytest.raises(Overloaded), made.reserved(NOW):
        pass
    other = engine_client(FakeLink(silent))
    other.draining = True
    with pytest.raises(Unavailable), other.reserved(NOW, engine=False):
        pass


async def test_an_engine_that_was_never_ready_reads_no_images_but_a_tokenizer_does() -> None:
    made = EngineClient([FakeLink(silent)], 3, 5, 8, status_limit=2.0, processes=1)
    with pytest.raises(Unavailable), made.reserved(NOW):
        pass
    with made.reserved(NOW, engine=False):
        assert made.statistics().unfinished == 1


def test_when_to_come_back_is_told_by_the_queue_of_all_api_processes() -> None:
    port = FakeLink(silent)
    made = engine_client(port, limit=1)
    submit(made)
    port.arrive(status(running=6, waiting=10, drain_rate=2.0))
    with pytest.raises(Overloaded) as caught:
        submit(made)
    assert caught.value.retry_after == pytest.approx(16 / 2 / 2.0)
    port.arrive(status(running=6, waiting=10, drain_rate=0.0))
    with pytest.raises(Overloaded) as caught:
        submit(made)
    assert caught.value.retry_after == 1.0


def test_so_many_wait_for_a_model_that_is_not_loaded() -> None:
    """The others are told when to come back: as long as its last load took, or a guess before the first one."""
    port = FakeLink(silent)
    made = engine_client(port, unloaded=2)
    port.arrive(status(loaded=False, load_seconds=7.5))
    submit(made, count=2)
    for seconds, told in ((7.5, 7.5), (0.0, LOAD_SECONDS)):
        port.arrive(status(loaded=False, load_seconds=seconds))
        with pytest.raises(Unavailable, match=r"2 requests wait .* \(--max-unloaded-requests\)") as caught:
            submit(made)
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "not_loaded", told)
    assert made.statistics().unfinished == 2
    port.arrive(status(loaded=True))
    submit(made)


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        (lambda port, made: port.lose(), "no tokenizer"),
        (lambda port, made: port.arrive(status(ready=False)), "not ready"),
        (lambda port, made: port.arrive(status(draining=True)), "shutting down"),
        (lambda port, made: setattr(made, "draining", True), "shutting down"),
        (lambda port, made: setattr(made, "replicas", ReplicaSet(1, 2.0)), "not reported"),
        (lambda port, made: made.replicas.report(status(), NOW - 2.1), "heartbeat"),
    ],
)
async def test_what_is_missing_is_said(change: Any, trouble: str) -> None:
    port = FakeLink(silent)
    made = engine_client(port)
    assert made.ready(NOW)
    change(port, made)
    assert not made.ready(NOW)
    with pytest.raises(Unavailable, match=trouble):
        submit(made)


async def test_questions_need_a_tokenizer_and_no_engine() -> None:
    port = FakeLink(answering(words("")))
    made = engine_client(port)
    made.replicas = ReplicaSet(1, 2.0)
    await made.call(Tokenize(prompt="a"))
    port.peer = None
    with pytest.raises(Unavailable, match="no tokenizer"):
        await made.call(Tokenize(prompt="a"))


async def test_questions_have_one_answer_each() -> None:
    port = FakeLink(answering(words("")))
    made = engine_client(port)
    first, second = await asyncio.gather(made.call(Tokenize(prompt="ab")), made.call(Detokenize(token_ids=b"a\0\0\0")))
    assert (type(first).__name__, type(second).__name__) == ("Tokenized", "Detokenized")
    port, _, asking = await called(Tokenize(prompt="a"))
    port.arrive(Rejected(id=port.of(Tokenize)[0].id, status=400, message="too long", param="prompt"))
    with pytest.raises(InvalidRequest, match="too long"):
        await asking


async def test_a_question_to_a_lost_tokenizer_is_asked_again() -> None:
    port, made, asking = await called(Tokenize(prompt="a"))
    port.lose()
    port.script, port.peer = answering(words("x")), new_peer()
    port.arrive(Joined())
    assert type(await asking).__name__ == "Tokenized"
    assert made.statistics().held == 0


async def test_a_question_that_nobody_waits_for_is_not_asked_again() -> None:
    port, _, asking = await called(Tokenize(prompt="a"))
    port.lose()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    port.sent.clear()
    port.peer = new_peer()
    port.arrive(Joined())
    assert port.sent == []


async def test_questions_that_fail_together_have_an_error_each() -> None:
    """A raised error gathers the frames that it passes, and would hold those of every other question."""
    made = engine_client(FakeLink(silent))
    asking = [asyncio.ensure_future(made.call(Tokenize(prompt="a"))) for _ in range(2)]
    await asyncio.sleep(0)
    made.fail_all(Unavailable("gone"))
    first, second = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(first, Unavailable)
    assert isinstance(second, Unavailable)
    assert first is not second


def test_a_request_moves_to_another_tokenizer_with_all_that_was_delivered() -> None:
    ports = [FakeLink(silent, index) for index in range(2)]
    made = engine_client(*ports)
    waiting, (request,) = submit(made, n=3)
    home, other = ports if ports[0].of(SubmitText) else ports[::-1]
    home.arrive(batch([
        (request.id, Row(text="a", choice=0, token_ids=ids(5))),
        (request.id, Row(text="b", choice=1, tokens=2, token_ids=ids(6, 7))),
    ]))  # fmt: skip
    home.arrive(batch([(request.id, Row(choice=1, token_ids=ids(8), finish=Finish.STOP))]))
    home.arrive(batch([(request.id, Row(text="c", choice=0, tokens=2, token_ids=ids(9, 10)))]))
    home.lose()
    (moved,) = other.of(SubmitText)
    assert moved.id != request.id
    assert moved.client == OWNER
    assert waiting.request_ids == [moved.id]
    assert moved.written == (Written(ids(5, 9, 10)), Written(ended=True), Written())
    other.arrive(batch([(request.id, Row(text="of its former life"))]))
    ends = [(moved.id, Row(text=text, choice=choice, finish=Finish.STOP)) for choice, text in ((0, "d"), (2, "e"))]
    other.arrive(batch(ends))
    assert waiting.ended
    assert waiting.error is None
    assert [choice.take_text() for choice in waiting.choices] == ["acd", "b", "e"]
    assert [choice.tokens for choice in waiting.choices] == [4, 3, 1]
    assert (made.statistics().unfinished, made.statistics().moved) == (0, 1)


def test_what_a_tokenizer_may_have_died_of_is_a_suspect() -> None:
    """A request that got further there is none."""
    port = FakeLink(silent)
    made = engine_client(port)
    (_, (stuck,)), (_, (running,)) = submit(made), submit(made)
    assert (stuck.suspect, running.suspect) == (False, False)
    port.arrive(batch([(running.id, Row(text="a", token_ids=ids(5)))]))
    for suspected in ((True, False), (True, True)):
        port.lose()
        port.peer = new_peer()
        port.arrive(Joined())
        assert tuple(each.suspect for each in port.of(SubmitText)[-2:]) == suspected


def test_what_tokenizers_keep_dying_of_ends_and_its_neighbours_go_on() -> None:
    port = FakeLink(silent)
    made = engine_client(port)
    killer, _ = submit(made)
    other = collector()
    made.submit([SubmitText(prompt="b", sampling=Sampling())], other, NOW)
    for death in range(MOST_DEATHS + 1):
        assert killer.error is None
        number = port.of(SubmitText)[-1].id
        port.arrive(batch([(number, Row(text="a", token_ids=ids(death)))]))
        port.lose()
        port.peer = new_peer()
        port.arrive(Joined())
    assert isinstance(killer.error, EngineFailure)
    assert other.error is None
    assert made.statistics().unfinished == 1
    with pytest.raises(InvalidRequest, match="like this one") as caught:  # the like of it, for a while
        submit(made)
    assert caught.value.code == "condemned"
    made.submit([SubmitText(prompt="c", sampling=Sampling())], collector(), NOW)


async def test_what_kills_in_its_trial_is_refused_from_then_on() -> None:
    """Only what was a suspect: an engine that condemns a request says it in the same words."""
    port = FakeLink(silent)
    made = engine_client(port)
    port.deliver = lambda arrivals: made.receive(arrivals, time.monotonic())  # by which questions are asked
    waiting, (request,) = submit(made)
    port.arrive(Rejected(id=request.id, status=400, message="of executors", code="condemned"))
    assert isinstance(waiting.error, InvalidRequest)
    waiting, _ = submit(made)
    asking = asyncio.ensure_future(made.call(Tokenize(prompt="kill")))
    await asyncio.sleep(0)
    port.lose()
    port.peer = new_peer()
    port.arrive(Joined())
    assert port.of(Tokenize)[-1].suspect
    for number in (port.of(SubmitText)[-1].id, port.of(Tokenize)[-1].id):
        port.arrive(Rejected(id=number, status=500, message="it died", code="condemned"))
    assert isinstance(waiting.error, EngineFailure)
    with pytest.raises(EngineFailure, match="it died"):
        await asking
    with pytest.raises(InvalidRequest, match="like this one"):
        submit(made)
    with pytest.raises(InvalidRequest, match="like this one"):
        await made.call(Tokenize(prompt="kill"))


async def test_a_question_that_tokenizers_keep_dying_of_ends() -> None:
    port, _, asking = await called(Detokenize(token_ids=b"odd"))
    for _ in range(MOST_DEATHS + 1):
        await asyncio.sleep(0)
        assert not asking.done()
        port.lose()
        port.peer = new_peer()
        port.arrive(Joined())
    with pytest.raises(EngineFailure):
        await asking


def test_without_a_tokenizer_requests_wait_in_order_for_the_next() -> None:
    port = FakeLink(silent)
    made = engine_client(port)
    _, (first,) = submit(made)
    port.lose()
    left, _ = submit(made)
    _, (last,) = submit(made)
    assert made.statistics().held == 3
    made.abort(left)
    assert made.statistics().held == 2
    port.sent.clear()
    port.peer = new_peer()
    port.peer.credit = 1
    port.arrive(Joined())
    (moved,) = port.of(SubmitText)
    assert (moved.prompt, moved.written) == (first.prompt, ())
    with pytest.raises(Overloaded):
        submit(made)
    port.peer.credit = 5
    made._router.flush()
    assert [message.id for message in port.of(SubmitText)] == [moved.id, last.id]
    assert not port.of(Abort)


class Counted(OrderedDict[int, Any]):
    """Counts the entries that are looked at."""

    looks = 0

    def items(self) -> Any:
        for item in super().items():
            type(self).looks += 1
            yield item


def test_what_waits_is_not_looked_through_for_every_newcomer() -> None:
    """While the tokenizer is missing each newcomer costs a look at the first that waits, however many do."""
    port = FakeLink(silent)
    made = engine_client(port, limit=1000)
    made.abort(submit(made)[0])  # it has served once, so that others may wait
    port.lose()
    made._router.waiting = Counted()
    port.sent.clear()
    replies = [submit(made)[0] for _ in range(500)]
    for waiting in replies[::2]:
        made.abort(waiting)
    assert made.statistics().held == 250
    assert Counted.looks <= 750
    port.peer = new_peer()
    port.peer.credit = 1000
    port.arrive(Joined())
    assert len(port.of(SubmitText)) == 250
    assert Counted.looks <= 1001


def test_aborts_that_are_owed_are_not_all_tried_for_every_newcomer() -> None:
    port = FakeLink(silent)
    made = engine_client(port, limit=1000)
    assert port.peer is not None
    port.peer.credit = 300
    replies = [submit(made)[0] for _ in range(300)]
    tries: list[Any] = []
    send = port.send
    port.send = lambda peer, message: (tries.append(message), send(peer, message))[1]  # type: ignore[method-assign]
    for waiting in replies:
        made.abort(waiting)
    assert made.statistics().aborts_owed == 300
    assert len(tries) == 300
    port.peer.credit = 200
    made._router.flush()
    assert len(tries) == 501
    port.peer.credit = 200
    made._router.flush()
    assert [abort.id for abort in port.of(Abort)] == [request.id for request in port.of(SubmitText)]
    assert made.statistics().aborts_owed == 0


def test_waiting_has_an_end() -> None:
    port = FakeLink(silent)
    made = engine_client(port)
    waiting, _ = submit(made)
    port.lose()
    made.tick(NOW)
    made.tick(NOW + HOLD - 0.1)
    assert waiting.error is None
    made.tick(NOW + HOLD)
    assert isinstance(waiting.error, Unavailable)
    assert waiting.error.retry_after is not None
    with pytest.raises(Unavailable):
        made.submit([SubmitText(prompt="a", sampling=Sampling())], collector(), NOW + HOLD)
    made.abort(waiting)
    port.peer = new_peer()
    port.arrive(Joined(), status())
    made.tick(NOW + HOLD + 1)
    submit(made)
    assert made.statistics().unfinished == 1


def test_each_loss_has_its_own_time_to_wait() -> None:
    port = FakeLink(silent)
    made = engine_client(port)
    port.lose()
    made.tick(NOW)
    port.peer = new_peer()
    port.arrive(Joined())
    made.receive([], NOW + HOLD)
    made.tick(NOW + HOLD - 0.2)
    waiting, _ = submit(made)
    port.lose()
    made.tick(NOW + HOLD - 0.1)
    made.tick(NOW + 2 * HOLD - 0.2)
    assert waiting.error is None
    made.tick(NOW + 2 * HOLD)
    assert isinstance(waiting.error, Unavailable)


def test_a_server_that_begins_to_drain_takes_nothing_more() -> None:
    """Though it was found to serve a moment ago."""
    made = engine_client(FakeLink(silent))
    submit(made)
    made.draining = True
    with pytest.raises(Unavailable, match="shutting down"):
        submit(made)


def test_nobody_waits_for_a_part_that_will_not_come_back() -> None:
    """While what is needed is there, a process that was given up is nobody's concern."""
    port = FakeLink(silent)
    made = engine_client(port)
    waiting, _ = submit(made)
    made.permanent_failure = "tokenizer-1 failed"
    made.tick(NOW)
    submit(made)
    assert waiting.error is None
    made.permanent_failure = "executor-0 failed"
    port.arrive(status(ready=False))
    with pytest.raises(Unavailable, match="executor-0 failed"):
        submit(made)
    made.tick(NOW)
    made.tick(NOW + 0.1)
    assert isinstance(waiting.error, Unavailable)
    assert "executor-0 failed" in waiting.error.message


def test_a_server_that_was_never_ready_has_nobody_wait() -> None:
    port = FakeLink(silent)
    made = EngineClient((port,), 0, 5, 8, status_limit=2.0, processes=1)
    with pytest.raises(Unavailable):
        submit(made)


@given(cuts=st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30), n=st.integers(1, 3))
def test_whatever_is_cut_and_merged_the_tokens_are_whole(cuts: list[tuple[int, bool]], n: int) -> None:
    """The next tokenizer is told exactly what came before, each time."""
    port = FakeLink(silent)
    made = engine_client(port)
    waiting, _ = submit(made, n=n)
    said: list[list[int]] = [[] for _ in range(n)]
    for number, (count, lose) in enumerate(cuts):
        choice = number % n
        fresh = list(range(len(said[choice]), len(said[choice]) + count))
        said[choice] += fresh
        (request_id,) = waiting.request_ids
        port.arrive(batch([(request_id, Row(text="x" * count, choice=choice, tokens=count, token_ids=ids(*fresh)))]))
        if lose:
            port.lose()
            port.peer = new_peer()
            port.arrive(Joined())
            assert port.of(SubmitText)[-1].written == tuple(Written(ids(*tokens)) for tokens in said)
    assert [len(choice.take_text()) for choice in waiting.choices] == list(map(len, said))


def test_aborts_owed_to_a_lost_tokenizer_are_forgotten() -> None:
    port = FakeLink(silent)
    made = engine_client(port)
    waiting, _ = submit(made)
    assert port.peer is not None
    port.peer.credit = 0
    made.abort(waiting)
    assert made.statistics().aborts_owed == 1
    port.lose()
    assert made.statistics().aborts_owed == 0


def test_rows_find_their_choice() -> None:
    port = FakeLink(silent)
    made = engine_client(port)
    waiting, requests = submit(made, count=2, n=2)
    rows = [(requests[1].id, Row(text="d", choice=1)), (12345, Row(text="stray")), (requests[0].id, Row(text="a"))]
    port.arrive(batch(rows))
    assert ["".join(choice.text) for choice in waiting.choices] == ["a", "", "", "d"]
    assert [choice.index for choice in waiting.get_nowait()] == [3, 0]


@pytest.mark.parametrize("wanted", [False, True])
def test_token_ids_are_kept_for_those_who_want_them(wanted: bool) -> None:
    port = FakeLink(silent)
    made = engine_client(port)
    waiting = collector()
    made.submit([SubmitText(prompt="a", sampling=Sampling(), with_token_ids=wanted)], waiting, NOW)
    port.arrive(batch([(waiting.request_ids[0], Row(text="b", token_ids=ids(5)))]))
    assert waiting.choices[0].take_token_ids() == (ids(5) if wanted else b"")


EVENTS = st.lists(
    st.tuples(st.sampled_from(["row", "end", "reject", "drop", "lose", "error"]), st.integers(0, 3), st.integers(0, 2)),
    max_size=40,
)


@given(EVENTS)
def test_every_request_ends_once(events: list[tuple[str, int, int]]) -> None:
    """Random ends of four requests of three choices each: then no request is left and nothing is sent twice."""
    port = FakeLink(silent)
    made = engine_client(port, limit=4)
    lives = [submit(made, n=3) for _ in range(4)]
    for event, which, choice in events:
        waiting, (request,) = lives[which]
        if port.peer is None:
            break
        match event:
            case "row":
                port.arrive(batch([(request.id, Row(text="x", choice=choice))]))
            case "end":
                port.arrive(batch([(request.id, Row(choice=choice, finish=Finish.STOP))]))
            case "error":
                port.arrive(batch([(request.id, Row(choice=choice, finish=Finish.ERROR))]))
            case "reject":
                port.arrive(Rejected(id=request.id, status=400, message="no"))
            case "drop":
                made.abort(waiting)
            case "lose":
                port.lose()
    for waiting, _ in lives:
        made.abort(waiting)
    assert made.statistics().unfinished == 0
    aborted = [abort.id for abort in port.of(Abort)]
    assert len(aborted) == len(set(aborted))


def test_an_error_of_the_engine_is_told_in_its_words() -> None:
    port = FakeLink(silent)
    made = engine_client(port)
    waiting, (request,) = submit(made)
    row = Row(finish=Finish.ERROR, extra={"error": "the logits were not finite"})
    port.arrive(batch([(request.id, row)]))
    assert isinstance(waiting.error, EngineFailure)
    assert waiting.error.message == "the logits were not finite"
    assert waiting.ended


def test_the_loss_of_a_stranger_changes_nothing() -> None:
    made = engine_client(FakeLink(silent))
    waiting, _ = submit(made)
    made.receive([Arrival(new_peer(), Left("gone"))], NOW)
    assert not waiting.ended


async def test_with_replicas_a_conversation_keeps_to_one_tokenizer() -> None:
    ports = FakeLink(silent), FakeLink(silent), FakeLink(silent)
    made = engine_client(*ports, limit=32, processes=3, replicas=2)
    for turn in range(4):
        messages = msgspec.json.encode([{"role": "user", "content": "hello"}] + [{"role": "assistant"}] * turn)
        chat = SubmitText(messages=messages, sampling=Sampling(), stream=True)
        made.submit([chat], OutputCollector(1, 1, stream=True, timings=Timings(), now=NOW), NOW)
    assert sorted(len(port.of(SubmitText)) for port in ports) == [0, 0, 4]
    for number in range(9):
        named = SubmitText(prompt="x", sampling=Sampling(), session=str(number % 2))
        made.submit([named], OutputCollector(1, 1, stream=False, timings=Timings(), now=NOW), NOW)
    by_session = [{request.session for request in port.of(SubmitText) if request.session} for port in ports]
    assert sum(map(len, by_session)) == 2, "each session is in one place"


async def test_one_replica_serves() -> None:
    port = FakeLink(silent)
    made = engine_client(port, replicas=2)
    assert made.ready(NOW), "the other has not reported"
    port.arrive(msgspec.structs.replace(status(running=5), replica=1))
    port.arrive(msgspec.structs.replace(status(ready=False), replica=0))
    assert made.ready(NOW)
    assert made.status is not None
    assert made.status.running == 5 + status().running
    port.arrive(msgspec.structs.replace(status(ready=False), replica=1))
    assert made.trouble(NOW) == "the engine is not ready"
