"""A request continues after what was delivered of it; deaths count while it makes no progress."""

from __future__ import annotations

import asyncio
from typing import cast

from penstock.protocol.columns import pack
from penstock.protocol.messages import Sampling, SubmitText, Tokenize, Tokenized, Written
from penstock.services.client.output_collector import OutputCollector
from penstock.services.client.tokenizer_router import Call, RequestState
from penstock.services.metrics.requests import Timings


def new_state(n: int = 2) -> RequestState:
    collector = OutputCollector(1, n, stream=True, timings=Timings(), now=0.0)
    request = SubmitText(id=1, prompt="a", n=n, sampling=Sampling())
    return RequestState(1, request, collector, 0, [bytearray() for _ in range(n)])


def test_a_request_without_output_is_sent_as_it_is() -> None:
    state = new_state()
    assert state.message() == state.request


def test_a_request_continues_under_its_new_id() -> None:
    state = new_state()
    state.id = 9
    state.written[0] += pack("i", [5, 6])
    state.ended.add(1)
    message = state.message()
    assert (message.id, message.suspect) == (9, False)
    assert message.written == (Written(pack("i", [5, 6]), False), Written(b"", True))


def test_deaths_count_from_the_last_progress() -> None:
    state = new_state(n=1)
    for deaths in (1, 2):
        state.count_death()
        assert state.deaths == deaths
        assert state.message().suspect
    state.written[0] += pack("i", [5])
    state.count_death()
    assert state.deaths == 0
    state.count_death()
    assert state.deaths == 1


def test_a_call_that_a_tokenizer_may_have_died_of_is_marked() -> None:
    call = Call(3, Tokenize(id=3, prompt="a"), cast("asyncio.Future[Tokenized]", None))
    assert not call.message().suspect
    call.deaths = 1
    assert call.message().suspect
