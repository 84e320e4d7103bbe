"""Clients that send slowly, too much, or nothing (connection.py): cut off, with an answer where one can be read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from penstock.protocol.messages import Finish, SubmitText
from penstock.services.http.connection import Connection, ConnectionLimits
from penstock.services.openai.app_state import AppState
from penstock.services.openai.errors import encode
from penstock.services.openai.routes import application
from tests.services.client.fake_engine import LIMIT, FakeLink, Row, answering, app_state, batch, silent, words
from tests.services.openai.shapes import check_error

SHORT = 0.15  # seconds
BODY = b'{"prompt": "a"}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Place:
    """A server on a real socket."""

    def __init__(self, address: tuple[str, int], parts: AppState, state: ServerState) -> None:
        self.address = address
        self.parts = parts
        self.state = state
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self, data: bytes = b"") -> Ends:
        reader, writer = await asyncio.open_connection(*self.address)
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    async def say(self, data: bytes) -> bytes:
        """All that comes back until the server closes."""
        reader, _ = await self.open(data)
        return await asyncio.wait_for(reader.read(), LIMIT)


@asynccontextmanager
async def place(limits: ConnectionLimits, port: FakeLink | None = None, idle: float = 60.0) -> AsyncIterator[Place]:
    parts = app_state(port or FakeLink(answering(words("ok"))))
    config = uvicorn.Config(application(parts), ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    config.timeout_keep_alive = cast(int, idle)
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(config, state, {}, encode_error=encode, limits=limits), "127.0.0.1", 0, backlog=1024
    )
    found = Place(server.sockets[0].getsockname(), parts, state)
    try:
        yield found
    finally:
        server.close()
        for writer in found.writers:
            writer.close()
        for task in tuple(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        for connection in tuple(state.connections):
            cast(Connection, connection).transport.abort()
        await gone(state)


async def gone(state: ServerState) -> None:
    """Wait until every connection is closed."""
    async with asyncio.timeout(LIMIT):
        while state.connections:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.001)


def refusal(answer: bytes, status: int, code: str) -> str:
    """The message of the last answer, which closes the connection."""
    head, _, body = answer.rpartition(b"\r\n\r\n")
    head = head[head.rindex(b"HTTP/1.1 ") :]
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head
    assert b"x-request-id: " in head
    check_error(json.loads(body), "invalid_request_error", None)
    error = json.loads(body)["error"]
    assert error["code"] == code
    return cast(str, error["message"])


async def dripped(found: Place, data: bytes, pause: float = 0.005) -> bytes:
    """What the server says to a client that sends a byte every few milliseconds until it is cut off."""
    reader, writer = await found.open()
    answer = asyncio.ensure_future(reader.read())
    for byte in data:
        if answer.done():
            break
        writer.write(bytes([byte]))
        await asyncio.wait((answer,), timeout=pause)
    return await asyncio.wait_for(answer, LIMIT)


async def test_a_head_a_byte_at_a_time_is_cut_off() -> None:
    async with place(ConnectionLimits(head_seconds=SHORT)) as found:
        answer = await dripped(found, b"GET /version HTTP/1.1\r\n" + b"X-Fill: y\r\n" * 100)
        assert "--header-timeout" in refusal(answer, 408, "request_timeout")


async def test_a_body_a_byte_at_a_time_is_cut_off_and_logged_as_such() -> None:
    async with place(ConnectionLimits(body_seconds=SHORT)) as found:
        answer = await dripped(found, POST + b"X-Request-Id: mine\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000)
        assert "--body-timeout" in refusal(answer, 408, "request_timeout")
        assert b"x-request-id: mine\r\n" in answer
        assert found.parts.traffic.responses == {("/v1/completions", 408): 1}
        assert found.parts.engine_client.statistics().submitted == 0


async def test_a_head_that_stops_is_cut_off() -> None:
    async with place(ConnectionLimits(head_seconds=SHORT)) as found:
        refusal(await found.say(b"G"), 408, "request_timeout")


async def test_a_body_that_nobody_reads_does_not_keep_the_connection() -> None:
    """The answer came before the body was read; what follows is read past, and only for so long."""
    async with place(ConnectionLimits(body_seconds=SHORT)) as found:
        answer = await found.say(b"GET /health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\nabc")
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" not in answer


async def test_after_an_early_answer_the_connection_goes_on_once_the_body_is_through() -> None:
    async with place(ConnectionLimits()) as found:
        head = b"GET /health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\n"
        reader, writer = await found.open(head + b"abc")
        await asyncio.wait_for(reader.readuntil(b"}"), LIMIT)
        (server,) = found.state.connections
        cast(Connection, server).timeout_keep_alive = cast(int, SHORT)
        writer.write(b"def" + GET)
        assert (await asyncio.wait_for(reader.readuntil(b"}"), LIMIT)).startswith(b"HTTP/1.1 200")
        assert await asyncio.wait_for(reader.read(), LIMIT) == b""  # idle from there on


async def test_a_request_in_pieces_and_in_time_is_served() -> None:
    async with place(ConnectionLimits()) as found:
        reader, writer = await found.open()
        for piece in (b"PO", POST[2:], b"Content-Le", b"ngth: 15\r\n\r\n", BODY[:3], BODY[3:]):
            writer.write(piece)
            await asyncio.sleep(0)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), LIMIT)) == b"HTTP/1.1 200 OK\r\n"


async def test_a_long_answer_is_not_cut_off_by_the_limits_of_its_request() -> None:
    port = FakeLink(silent)
    async with place(ConnectionLimits(head_seconds=SHORT, body_seconds=SHORT), port, idle=SHORT) as found:
        reader, _ = await found.open(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        answer = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(LIMIT):
            while not port.of(SubmitText):  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0)
        await asyncio.wait((answer,), timeout=3 * SHORT)
        assert not answer.done()
        (request,) = port.of(SubmitText)
        port.arrive(batch([(request.id, Row(text="late", finish=Finish.STOP))]))
        assert b'"late"' in await asyncio.wait_for(answer, LIMIT)


async def test_an_idle_connection_is_closed_also_before_its_first_request() -> None:
    async with place(ConnectionLimits(), idle=SHORT) as found:
        assert await found.say(b"") == b""
        assert (await found.say(GET)).startswith(b"HTTP/1.1 200")
        assert await found.say(b"\r\n\r\n") == b""  # line ends before a request are nothing


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 3000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"X" * 3000,
        b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 3000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 1000,
    ],
)
async def test_a_head_that_is_too_large(data: bytes) -> None:
    async with place(ConnectionLimits(head_bytes=2048)) as found:
        message = refusal(await found.say(data), 431, "head_too_large")
        assert "--max-header-bytes" in message
        assert "2048" in message
        assert found.parts.engine_client.statistics().submitted == 0


async def test_a_head_in_many_small_pieces_that_is_too_large() -> None:
    async with place(ConnectionLimits(head_bytes=1024, head_seconds=LIMIT)) as found:
        refusal(await dripped(found, b"GET / HTTP/1.1\r\nX: " + b"a" * 3000, 0.0), 431, "head_too_large")


async def test_trailers_and_chunk_extensions_count_as_well() -> None:
    for tail in (b"0\r\nX: " + b"a" * (1 << 20), b"1;" + b"e" * (1 << 20)):
        async with place(ConnectionLimits(head_bytes=1024)) as found:
            with contextlib.suppress(ConnectionResetError):  # the answer may be lost: more was on its way
                answer = await found.say(POST + b"Transfer-Encoding: chunked\r\n\r\n" + tail)
                refusal(answer, 431, "head_too_large")
            await gone(found.state)


async def test_many_heads_on_one_connection_are_counted_each() -> None:
    async with place(ConnectionLimits(head_bytes=1024)) as found:
        reader, writer = await found.open()
        for _ in range(100):
            writer.write(GET)
            assert (await asyncio.wait_for(reader.readuntil(b"}"), LIMIT)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01\x00", b"nonsense\r\n\r\n",
                                  b"GET /\xff HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nA B: c\r\n\r\n",
                                  POST + b"Content-Length: -1\r\n\r\n",
                                  POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"])  # fmt: skip
async def test_what_is_no_http(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with place(ConnectionLimits()) as found:
            answer = await found.say(data)
    refusal(answer, 400, "invalid_http")
    (line,) = [record for record in caplog.records if record.levelno >= logging.INFO and record.name != "asyncio"]
    fields = line.__dict__["fields"]
    assert f"x-request-id: {fields['id']}".encode() in answer
    assert (line.getMessage(), fields["status"], fields["reason"]) == ("request", 400, "invalid_http")


async def test_nonsense_behind_a_request_that_is_being_served_is_not_answered_in_its_place() -> None:
    port = FakeLink(answering(words("an answer")))
    async with place(ConnectionLimits(), port) as found:
        answer = await found.say(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + b"nonsense\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1") == 1


async def idle_crowd(number: int, most_bytes: float) -> None:
    """`number` connections that have asked once and wait; a request beside them is answered as ever."""
    async with place(ConnectionLimits()) as found:

        async def settle_in() -> None:
            reader, writer = await found.open()
            writer.write(GET)
            await asyncio.wait_for(reader.readuntil(b"}"), LIMIT)

        before = resident()
        for _ in range(0, number, 100):
            await asyncio.gather(*(settle_in() for _ in range(100)))
        assert len(found.state.connections) == number
        assert (resident() - before) / number < most_bytes  # both ends are in this process
        took = []
        for _ in range(20):
            began = time.process_time()
            reader, writer = await found.open(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            await asyncio.wait_for(reader.readuntil(b"}"), LIMIT)
            took.append(time.process_time() - began)
            writer.close()
        assert statistics.median(took) < 1.0  # a thousand times what it takes
        assert found.state.tasks == set() or all(task.done() for task in found.state.tasks)


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_idle_connections_do_no_harm() -> None:
    await idle_crowd(500, 100_000)


@pytest.mark.long
async def test_ten_thousand_idle_connections_do_no_harm() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    await idle_crowd(min(10_000, (most - 500) // 200 * 100), 60_000)
