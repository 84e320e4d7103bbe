"""A refused request leaves nothing behind: its body is freed at once, by reference counts alone.

What waits for the cycle collector is counted by no limit: --max-queued-bytes has let it go with the answer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from uvicorn.server import ServerState

from penstock.protocol.errors import Unavailable
from penstock.protocol.message import Message
from penstock.protocol.messages import Finish, Rejected, SubmitText, Tokenize
from penstock.services.http.connection import Connection
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.app_state import AppState
from penstock.services.openai.errors import encode
from penstock.services.openai.routes import application
from tests.services.client.fake_engine import LIMIT, FakeLink, Row, app_state, batch, silent

SIZE = 1 << 20  # bytes of each body
FLOOD = 24  # bodies
KEPT = 2 * SIZE  # bytes that may stay: far fewer than the flood's
BIG = "x" * SIZE
KEY = "Authorization: Bearer right"


def asking(path: str, body: str | bytes, *headers: str) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *(headers or (KEY,)), f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


CHAT = {"messages": [{"role": "user", "content": BIG}]}
REFUSED = {
    "chat": ("/v1/chat/completions", json.dumps({**CHAT, "n": 0}), 400),
    "chat-unbuilt": ("/v1/chat/completions", json.dumps({**CHAT, "functions": [{}]}), 400),
    "completions": ("/v1/completions", json.dumps({"prompt": BIG, "temperature": 9}), 400),
    "messages": ("/v1/messages", json.dumps({**CHAT, "max_tokens": 0}), 400),
    "messages-later": ("/v1/messages", json.dumps({**CHAT, "max_tokens": 4, "min_tokens": 5}), 400),
    "responses": ("/v1/responses", json.dumps({"input": BIG, "temperature": 9}), 400),
    "responses-later": ("/v1/responses", json.dumps({"input": BIG, "max_output_tokens": 10**6}), 400),
    "embeddings": ("/v1/embeddings", json.dumps({"input": BIG, "dimensions": 0}), 400),
    "score": ("/v1/score", json.dumps({"text_1": BIG, "text_2": 5}), 400),
    "rerank": ("/v1/rerank", json.dumps({"query": BIG, "documents": []}), 400),
    "tokenize": ("/tokenize", json.dumps({"prompt": BIG, "model": "nobody"}), 404),
    "no-json": ("/v1/chat/completions", '{"messages": "' + BIG, 400),
    "no-utf-8": ("/v1/chat/completions", b'{"messages": "' + BIG.encode() + b'\xff"}', 400),
    "too-deep": ("/v1/chat/completions", '{"messages": "' + BIG + '", "a": ' + "[" * 4096, 400),
    "nowhere": ("/v1/nowhere", BIG, 404),
    "wrong-method": ("/v1/models", BIG, 405),
}  # fmt: skip


@asynccontextmanager
async def listening(parts: AppState) -> AsyncIterator[tuple[str, int]]:
    config = uvicorn.Config(application(parts), ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(config=config, server_state=state, app_state={}, encode_error=encode), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()


async def status_of(reader: asyncio.StreamReader) -> int:
    """Status of the next answer, whose body is read past."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT)).lower()
    if b"transfer-encoding: chunked" in head:
        await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), LIMIT)
    else:
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
    return int(head.split()[1])


async def flood(parts: AppState, request: bytes, status: int, *, close: bool) -> int:
    """Bytes that are still there behind FLOOD requests, of which the first few were not counted."""
    async with asyncio.timeout(LIMIT), listening(parts) as address:
        reader, writer = await asyncio.open_connection(*address)
        before = 0
        for number in range(FLOOD):
            if number == 2:
                before = tracemalloc.get_traced_memory()[0]
            writer.write(request)
            assert await status_of(reader) == status
            if close:
                writer.close()
                await writer.wait_closed()
                reader, writer = await asyncio.open_connection(*address)
        writer.close()
        await writer.wait_closed()
        return tracemalloc.get_traced_memory()[0] - before


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()
        gc.collect()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("close", [False, True], ids=["kept-alive", "closed"])
@pytest.mark.parametrize("case", REFUSED)
async def test_a_refused_body_is_freed_with_its_answer(case: str, close: bool) -> None:
    path, body, status = REFUSED[case]
    parts = app_state(FakeLink(silent), api_key="right")
    assert await flood(parts, asking(path, body), status, close=close) < KEPT


@pytest.mark.usefixtures("no_collector")
async def test_a_wrong_key_keeps_no_body() -> None:
    parts = app_state(FakeLink(silent), api_key="right")
    request = asking("/v1/chat/completions", json.dumps(CHAT), "Authorization: Bearer wrong")
    assert await flood(parts, request, 401, close=True) < KEPT


def refusing(port: FakeLink, message: Message) -> None:
    """A tokenizer that refuses what it gets."""
    port.sent.clear()
    if isinstance(message, SubmitText | Tokenize):
        told = Rejected(id=message.id, status=400, message="the prompt is too long", param="prompt")
        asyncio.get_running_loop().call_soon(port.arrive, told)


LATER = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {"prompt": BIG}),
    "stream": ("/v1/completions", {"prompt": BIG, "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 4}),
    "count": ("/v1/messages/count_tokens", CHAT),
    "responses": ("/v1/responses", {"input": BIG, "store": False}),
    "embeddings": ("/v1/embeddings", {"input": BIG}),
    "tokenize": ("/tokenize", {"prompt": BIG}),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("case", LATER)
async def test_what_a_later_part_refuses_is_freed_too(case: str) -> None:
    path, body = LATER[case]
    parts = app_state(FakeLink(refusing), api_key="right")
    assert await flood(parts, asking(path, json.dumps(body)), 400, close=True) < KEPT


@pytest.mark.usefixtures("no_collector")
async def test_an_answered_body_is_freed_too() -> None:
    def ending(port: FakeLink, message: Message) -> None:
        port.sent.clear()
        if isinstance(message, SubmitText):
            row = Row(text="ok", finish=Finish.STOP, extra={"prompt_tokens": 3})
            asyncio.get_running_loop().call_soon(port.arrive, batch([(message.id, row)]))

    parts = app_state(FakeLink(ending), api_key="right")
    assert await flood(parts, asking("/v1/completions", json.dumps({"prompt": BIG})), 200, close=False) < KEPT


@pytest.mark.usefixtures("no_collector")
async def test_when_all_requests_fail_at_once_each_has_an_error_of_its_own() -> None:
    """One object for all of them would gather the frames of them all, and their bodies with them."""
    arrived: asyncio.Queue[None] = asyncio.Queue()

    def waiting(port: FakeLink, message: Message) -> None:
        port.sent.clear()
        arrived.put_nowait(None)

    parts = app_state(FakeLink(waiting), api_key="right")
    requests = {
        "completions": asking("/v1/completions", json.dumps({"prompt": BIG})),
        "tokenize": asking("/tokenize", json.dumps({"prompt": BIG})),
    }
    async with asyncio.timeout(LIMIT), listening(parts) as address:
        before = tracemalloc.get_traced_memory()[0]
        for request in requests.values():
            asked = [await asyncio.open_connection(*address) for _ in range(FLOOD // 2)]
            for _, writer in asked:
                writer.write(request)
            for _ in asked:
                await asyncio.wait_for(arrived.get(), LIMIT)
            parts.engine_client.fail_all(Unavailable("the server is shutting down", code="draining"))
            for reader, writer in asked:
                assert await status_of(reader) == 503
                writer.close()
                await writer.wait_closed()
        asked.clear()
        assert tracemalloc.get_traced_memory()[0] - before < 2 * KEPT


@pytest.mark.usefixtures("no_collector")
async def test_a_connection_that_stays_open_keeps_nothing_of_a_refused_body() -> None:
    """Not even what was read of it before its key was looked at."""
    parts = app_state(FakeLink(silent), api_key="right")
    request = asking("/v1/chat/completions", json.dumps(CHAT), "Authorization: Bearer wrong")
    async with asyncio.timeout(LIMIT), listening(parts) as address:
        idle = [await asyncio.open_connection(*address) for _ in range(FLOOD)]
        before = tracemalloc.get_traced_memory()[0]
        for reader, writer in idle:
            writer.write(request)
            assert await status_of(reader) == 401
            await writer.drain()
        assert tracemalloc.get_traced_memory()[0] - before < KEPT
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()


CONTEXTS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 200),
    "stream": ("/v1/completions", {"prompt": "x", "stream": True}, 200),
    "responses": ("/v1/responses", {"input": "x", "store": False}, 200),
    "refused": ("/v1/completions", {"prompt": "x", "temperature": 9}, 400),
    "nowhere": ("/v1/nowhere", {}, 404),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("case", CONTEXTS)
async def test_a_request_leaves_no_cycle_behind(case: str) -> None:
    """The api process collects cycles rarely: a context in one would keep its headers and its scope until then."""

    def ending(port: FakeLink, message: Message) -> None:
        port.sent.clear()
        if isinstance(message, SubmitText):
            row = Row(text="ok", finish=Finish.STOP, extra={"prompt_tokens": 3})
            asyncio.get_running_loop().call_soon(port.arrive, batch([(message.id, row)]))

    path, body, status = CONTEXTS[case]
    parts = app_state(FakeLink(ending), api_key="right")
    await flood(parts, asking(path, json.dumps(body)), status, close=True)
    assert sum(type(each) is RequestContext for each in gc.get_objects()) == 0
