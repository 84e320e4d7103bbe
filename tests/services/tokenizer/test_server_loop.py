"""The server loop: credit, slices of encoding, threads for long prompts, and clients that leave meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import pytest_asyncio

from penstock.engine_core.text.frontend import Frontend
from penstock.protocol.columns import unpack
from penstock.protocol.control import EngineStatus
from penstock.protocol.message import Message
from penstock.protocol.messages import (
    Abort,
    Detokenize,
    Finish,
    Rejected,
    Sampling,
    SubmitText,
    SubmitTokens,
    Tokenize,
    Tokenized,
)
from penstock.protocol.outputs import TextBatch
from penstock.services.links.link import GOODBYE, UNREACHABLE, Arrival, Joined, Left, end_of
from penstock.services.tokenizer import server_loop
from penstock.services.tokenizer.server_loop import LONG_PROMPT, TokenizerLoop, Workers, length
from penstock.services.tracing.tokenizer import TokenizerTraces
from penstock.services.tracing.tracer import Tracer
from tests.engine_core.text.streams import STATUS, batch, make_frontend
from tests.engine_core.tokenizer.vocabularies import tokenizer

TEXT = "one two three"
IDS = tokenizer("byte_level").encode(TEXT).ids
LONG = "one " * LONG_PROMPT


class Neighbour:
    """A peer with as much credit as the test gives it."""

    def __init__(self, index: int = 0, credit: int = 1000) -> None:
        self.index = index
        self.pid = 1
        self.credit = credit
        self.got: list[Message] = []

    def arrival(self, message: Message | Joined | Left) -> Arrival:
        return Arrival(self, message)  # type: ignore[arg-type]


class Wire:
    """Either link: hands over what there is credit for."""

    def send(self, peer: Any, message: Message) -> bool:
        if peer.credit <= 0:
            return False
        peer.credit -= 1
        peer.got.append(message)
        return True


def new_loop(frontend: Frontend, threads: ThreadPoolExecutor, workers: Workers | None = None) -> TokenizerLoop:
    """A loop between wires; without `workers` its requests must need none."""
    workers = workers or Workers(cast("Any", None), cast("Any", None))
    return TokenizerLoop(frontend, Wire(), [Wire()], threads, workers, TokenizerTraces(Tracer()))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def frontend() -> Frontend:
    return make_frontend(apis=())


@pytest_asyncio.fixture
async def loop(frontend: Frontend, threads: ThreadPoolExecutor) -> AsyncIterator[TokenizerLoop]:
    loop = new_loop(frontend, threads)
    yield loop
    loop.close()


@pytest.fixture
def api() -> Neighbour:
    return Neighbour()


@pytest.fixture
def scheduler() -> Neighbour:
    return Neighbour()


@pytest_asyncio.fixture
async def joined(loop: TokenizerLoop, api: Neighbour, scheduler: Neighbour) -> TokenizerLoop:
    loop.from_apis([api.arrival(Joined())])
    loop.from_scheduler(0, [scheduler.arrival(Joined())])
    return loop


def request(request_id: int, prompt: str = "one", **fields: Any) -> SubmitText:
    return SubmitText(id=request_id, prompt=prompt, sampling=Sampling(), stream=True, **fields)


async def so(condition: Callable[[], bool]) -> None:
    """Turn the loop until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (there is no event: the far end is a process)
            await asyncio.sleep(0)


async def until(neighbour: Neighbour, kind: type[Message], count: int = 1) -> list[Any]:
    """The messages of `kind` once there are `count` of them."""
    await so(lambda: sum(isinstance(message, kind) for message in neighbour.got) >= count)
    return [message for message in neighbour.got if isinstance(message, kind)]


async def test_both_ways(joined: TokenizerLoop, api: Neighbour, scheduler: Neighbour) -> None:
    joined.from_apis([api.arrival(request(1)), api.arrival(Tokenize(id=2, prompt="one"))])
    (submitted,) = await until(scheduler, SubmitTokens)
    assert submitted.id == 1
    await until(api, Tokenized)
    joined.from_scheduler(
        0,
        [
            scheduler.arrival(STATUS),
            scheduler.arrival(batch((1, 0, IDS[:1], Finish.NONE))),
            scheduler.arrival(batch((1, 0, IDS[1:], Finish.LENGTH))),
            scheduler.arrival(Rejected(id=77, status=400, message="unknown")),
        ],
    )
    kinds = {type(message) for message in api.got}
    assert kinds == {Tokenized, EngineStatus, TextBatch}
    assert "".join(message.text[0] for message in api.got if isinstance(message, TextBatch)) == "one two three"


async def test_what_has_no_credit_waits_and_is_merged(
    joined: TokenizerLoop, api: Neighbour, scheduler: Neighbour
) -> None:
    scheduler.credit = api.credit = 0
    joined.from_apis([api.arrival(request(1))])
    assert not scheduler.got
    assert joined.statistics().stalls == 1
    scheduler.credit = 5
    await until(scheduler, SubmitTokens)
    for token_id in IDS:
        joined.from_scheduler(0, [scheduler.arrival(batch((1, 0, [token_id], Finish.NONE)))])
    assert not any(isinstance(message, TextBatch) for message in api.got)
    api.credit = 5
    (merged,) = await until(api, TextBatch)
    assert merged.text == ("one two three",)
    assert unpack("i", merged.tokens) == [len(IDS)]


async def test_a_burst_of_prompts_leaves_room_for_streams(
    joined: TokenizerLoop, api: Neighbour, scheduler: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slices of no length each turn of the loop encodes one prompt; tokens pass in between, in order."""
    monkeypatch.setattr(server_loop, "SLICE", 0.0)
    joined.from_apis([api.arrival(request(number)) for number in range(1, 21)])
    assert len(scheduler.got) == 1
    assert len(joined._short) == 19
    joined.from_scheduler(0, [scheduler.arrival(batch((1, 0, IDS[:1], Finish.NONE)))])
    assert any(isinstance(message, TextBatch) for message in api.got)
    joined.from_apis([api.arrival(Abort(20))])
    submitted = await until(scheduler, SubmitTokens, 19)
    assert [message.id for message in submitted] == list(range(1, 20))
    await so(lambda: not joined._short)
    assert len([message for message in scheduler.got if isinstance(message, SubmitTokens)]) == 19
    ended = [message for message in api.got if isinstance(message, TextBatch) and message.finish != b"\x00"]
    assert [unpack("q", message.ids) for message in ended] == [[20]]


async def test_long_prompts_go_through_a_thread_and_an_abort_wins(
    joined: TokenizerLoop, api: Neighbour, scheduler: Neighbour, frontend: Frontend
) -> None:
    joined.from_apis([api.arrival(request(1, LONG)), api.arrival(request(2, LONG)), api.arrival(request(3))])
    assert len(joined._work) == 2
    assert [message.id for message in scheduler.got if isinstance(message, SubmitTokens)] == [3]
    joined.from_apis([api.arrival(Abort(2))])
    (rejected,) = await until(api, Rejected)
    assert (rejected.id, rejected.code) == (1, "context_length_exceeded")
    await so(lambda: not joined._work)
    ended = next(message for message in api.got if isinstance(message, TextBatch))
    assert (unpack("q", ended.ids), ended.finish) == ([2], bytes([Finish.ABORT]))
    assert frontend.statistics().requests == 1


async def test_whoever_leaves_is_not_answered(
    joined: TokenizerLoop, api: Neighbour, scheduler: Neighbour, frontend: Frontend
) -> None:
    joined.from_apis([api.arrival(request(1)), api.arrival(Tokenize(id=2, prompt=LONG))])
    before = len(api.got)
    joined.from_apis([api.arrival(Left("gone"))])
    await so(lambda: not joined._work)
    assert scheduler.got[-1] == Abort(1)
    joined.from_scheduler(0, [scheduler.arrival(batch((1, 0, IDS, Finish.ABORT)))])
    assert len(api.got) == before
    assert frontend.statistics().requests == 0
    assert not joined._apis


@pytest.mark.parametrize(("reason", "level"), [(GOODBYE, "INFO"), (end_of(1), "INFO"), (UNREACHABLE, "WARNING")])
async def test_a_scheduler_that_ends_is_no_warning_and_one_that_is_lost_is(
    joined: TokenizerLoop, scheduler: Neighbour, reason: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "penstock.services.tokenizer.server_loop"):
        joined.from_scheduler(0, [scheduler.arrival(Left(reason))])
    assert [record.levelname for record in caplog.records if "scheduler_left" in record.getMessage()] == [level]


async def test_the_next_scheduler_gets_the_requests_of_a_lost_one(
    joined: TokenizerLoop, api: Neighbour, scheduler: Neighbour
) -> None:
    joined.from_apis([api.arrival(request(1))])
    joined.from_scheduler(0, [scheduler.arrival(batch((1, 0, IDS[:2], Finish.NONE)))])
    joined.from_scheduler(0, [scheduler.arrival(Left("gone"))])
    joined.from_apis([api.arrival(request(2))])
    assert joined.statistics().frontend.dispatch.held == 2
    following = Neighbour()
    joined.from_scheduler(0, [following.arrival(Joined())])
    assert not following.got
    joined.from_scheduler(0, [following.arrival(STATUS)])
    first, second = following.got
    assert isinstance(first, SubmitTokens)
    assert isinstance(second, SubmitTokens)
    assert (first.id, second.id, second.written) == (1, 2, ())
    assert unpack("i", first.written[0].token_ids) == IDS[:2]
    joined.from_scheduler(0, [following.arrival(batch((1, 0, IDS[2:], Finish.LENGTH)))])
    assert "".join(text for message in api.got if isinstance(message, TextBatch) for text in message.text) == TEXT


async def test_draining_ends_with_the_last_request_or_at_its_limit(
    joined: TokenizerLoop, api: Neighbour, scheduler: Neighbour
) -> None:
    joined.from_apis([api.arrival(request(1))])
    draining = asyncio.create_task(joined.drain(30.0))
    await asyncio.sleep(0)
    joined.from_apis([api.arrival(request(2))])
    assert [message.id for message in await until(api, Rejected)] == [2]
    assert not draining.done()
    joined.from_scheduler(0, [scheduler.arrival(batch((1, 0, IDS, Finish.LENGTH)))])
    await draining
    await joined.drain(30.0)


async def test_a_drain_has_a_limit(joined: TokenizerLoop, api: Neighbour) -> None:
    joined.from_apis([api.arrival(request(1))])
    await joined.drain(0.0)
    assert joined.statistics().frontend.requests == 1


async def test_an_error_behind_a_thread_is_not_lost(
    joined: TokenizerLoop, api: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Frontend, "close", lambda *_: 1 // 0)
    found: list[BaseException | None] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context.get("exception")))
    joined.from_apis([api.arrival(request(1, LONG))])
    await so(lambda: bool(found))
    assert isinstance(found[0], ZeroDivisionError)


def test_length_is_what_there_is_to_encode() -> None:
    assert length(request(1, "four")) == 4
    assert length(Detokenize(1, bytes(8))) == 8
    chat = SubmitText(id=1, messages=b"[{}]", tools=b"[]", template_arguments=b"{}", sampling=Sampling())
    assert length(chat) == 8
    assert length(SubmitText(id=1, prompt_ids=bytes(400_000), sampling=Sampling())) == 0
    assert length(SubmitText(id=1, prompt="four", prediction="and five", sampling=Sampling())) == 12
