"""A tokenizer process (frontend.py) whose scheduler is lost or not ready, and one that takes over from another."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from penstock.engine_core.text.frontend import Frontend
from penstock.protocol import messages
from penstock.protocol.columns import pack
from penstock.protocol.messages import Finish, Rejected, Sampling, SubmitText, SubmitTokens, Written
from tests.engine_core.text.streams import API, STATUS, Answer, Client, batch, make_frontend, submit
from tests.engine_core.tokenizer.vocabularies import tokenizer

TEXT = "one two three, größe 你好 😀 four"
IDS = tokenizer("byte_level").encode(TEXT).ids
EOS = tokenizer("byte_level").token_to_id("</s>")


def lose_scheduler(frontend: Frontend) -> None:
    frontend.leave_scheduler()
    assert not frontend.upward[0]


def test_requests_outlive_their_scheduler(frontend: Frontend, client: Client) -> None:
    owner = messages.Client("tenant", "name")
    submit(frontend, 1, n=2, stop=("three",), client=owner)
    first = frontend.upward[0].popleft()
    frontend.batch(batch((1, 0, IDS[:3], Finish.NONE), (1, 1, IDS, Finish.NONE)))  # the stop string is in the second
    client.take()
    making = SubmitText(id=2, prompt="one", sampling=Sampling(), stream=True)
    frontend.open(API, making)
    lose_scheduler(frontend)
    frontend.close(2, frontend.make(making, 0.0))
    submit(frontend, 3)
    assert not frontend.upward[0], "nobody is there to take them"
    assert frontend.statistics().dispatch.held == 3
    frontend.report(msgspec.structs.replace(STATUS, ready=False))
    assert not frontend.upward[0], "the next scheduler has no executor yet"
    frontend.report(STATUS)
    again, fresh, last = frontend.upward[0]
    ended = client.answer(1, 1)
    assert again == msgspec.structs.replace(
        first, written=(Written(pack("i", IDS[:3])), Written(pack("i", ended.token_ids), ended=True))
    )
    assert again.client == owner
    assert [fresh.id, last.id, fresh.written, last.written] == [2, 3, (), ()]
    frontend.batch(batch((1, 0, IDS[3:], Finish.NONE)))
    client.take()
    assert client.answer(1, 0).text == ended.text == TEXT[: TEXT.index("three")]
    assert client.answer(1, 0).token_ids == ended.token_ids
    assert frontend.statistics().requests == 3, "the scheduler confirms the stop"
    frontend.batch(batch((1, 0, [], Finish.STOP)))
    assert frontend.statistics().requests == 2


def test_what_was_aborted_or_over_ends_with_its_scheduler(frontend: Frontend, client: Client) -> None:
    submit(frontend, 1, n=2)
    submit(frontend, 2, stop=("two",))
    frontend.batch(batch((1, 1, IDS, Finish.STOP), (2, 0, IDS, Finish.NONE)))
    frontend.abort(1)
    lose_scheduler(frontend)
    client.take()
    assert (client.answer(1, 0).finish, client.answer(1, 1).finish) == (Finish.ABORT, Finish.STOP)
    assert client.answer(2).finish == Finish.STOP
    assert frontend.idle()


def test_an_abort_while_no_scheduler_is_there_is_answered_at_once(frontend: Frontend, client: Client) -> None:
    submit(frontend)
    lose_scheduler(frontend)
    frontend.abort(1)
    client.take()
    assert client.answer().finish == Finish.ABORT
    assert frontend.idle()


def test_what_a_scheduler_was_not_ready_for_waits_for_one_that_is(frontend: Frontend, client: Client) -> None:
    submit(frontend, 1)
    submit(frontend, 2)
    first = frontend.upward[0].popleft()
    frontend.abort(2)
    for number in (1, 2):
        frontend.reject(Rejected(id=number, status=503, message="the engine is not ready"))
    frontend.upward[0].clear()
    frontend.report(STATUS)
    assert list(frontend.upward[0]) == [first]
    client.take()
    assert not client.rejected
    assert client.answer(2).finish == Finish.ABORT


def test_a_scheduler_that_drains_gets_nothing_new(frontend: Frontend) -> None:
    frontend.report(msgspec.structs.replace(STATUS, ready=False, draining=True))
    submit(frontend)
    assert not frontend.upward[0]
    lose_scheduler(frontend)
    frontend.report(STATUS)
    assert isinstance(frontend.upward[0].popleft(), SubmitTokens)


def test_apis_hear_at_once_that_the_scheduler_is_gone(frontend: Frontend, client: Client) -> None:
    frontend.leave_scheduler()
    client.take()
    assert client.others == [msgspec.structs.replace(STATUS, ready=False)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_goes_on_where_its_api_process_knows_it(frontend: Frontend, client: Client, stream: bool) -> None:
    """Whatever was merged and wherever it was cut: what the first tokenizer said and what the second says is all."""
    chance = random.Random(5)
    for number in range(1, 40):
        fields: dict[str, Any] = {"n": 2, "stop": chance.choice(((), ("four",), ("zzz",))), "with_token_ids": True}
        submit(frontend, number, stream=stream, echo=True, **fields)
        cut = chance.randint(0, len(IDS))
        for start in range(0, cut, 3):
            frontend.batch(batch((number, 0, IDS[start : min(cut, start + 3)], Finish.NONE)))
            if chance.random() < 0.5:
                client.take()
        client.take()
        before = client.answers.get((number, 0)) or Answer()
        if before.finish:
            continue
        second = make_frontend()
        after = Client(second)
        written = (Written(pack("i", before.token_ids)), Written(ended=True)) if before.token_ids else ()
        submit(second, number, stream=stream, echo=True, written=written, **fields)
        sent = second.upward[0].popleft()
        assert isinstance(sent, SubmitTokens)
        assert sent.written == written
        second.batch(batch((number, 0, [*IDS[len(before.token_ids) :], EOS], Finish.STOP)))
        after.take()
        answer = after.answer(number)
        stopped = "four" in fields["stop"]
        assert before.text + answer.text == "one" + (TEXT[: TEXT.index("four")] if stopped else TEXT)
        assert (before.token_ids + answer.token_ids) == [*IDS, EOS][: before.tokens + answer.tokens]
        told = [extra.prompt_tokens for extra in before.extras + answer.extras if extra.prompt_tokens is not None]
        assert len(told) == 1
        ids = [extra.prompt_token_ids for extra in before.extras + answer.extras if extra.prompt_token_ids]
        assert len(ids) == 1
        assert bool(second.statistics().requests) == (not written)


def test_what_was_written_and_cannot_be_read_again_ends_its_request_alone(frontend: Frontend, client: Client) -> None:
    submit(frontend, 1, stop=("two",), written=(Written(pack("i", IDS)),))
    submit(frontend, 2)
    client.take()
    assert client.rejected[1].status == 500
    assert [message.id for message in frontend.upward[0] if isinstance(message, SubmitTokens)] == [2]
