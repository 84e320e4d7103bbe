"""Streams over real sockets: they flow past their tasks, and a client that does not read holds up nobody else."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from uvicorn.server import ServerState

from penstock.protocol.message import Message
from penstock.protocol.messages import Abort, Finish, SubmitText
from penstock.services.client.output_collector import Choice, OutputCollector
from penstock.services.http.connection import Connection, StreamWriter
from penstock.services.http.request_context import STREAM_WRITER
from penstock.services.openai.app_state import AppState
from penstock.services.openai.errors import encode
from penstock.services.openai.routes import application
from penstock.services.openai.sse import SSEEncoder
from tests.services.client.fake_engine import LIMIT, FakeLink, Row, app_state, batch, silent

BODY = json.dumps(
    {"prompt": "a", "stream": True, "max_tokens": 100, "stream_options": {"include_usage": True}}
).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)
PIECE = "x" * 4096


class Client:
    """One connection that has sent a request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def head(self) -> bytes:
        return await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), LIMIT)

    async def chunk(self) -> bytes:
        """The next chunk of the body: what one write of the server held; empty at its end."""
        size = int(await asyncio.wait_for(self._reader.readuntil(b"\r\n"), LIMIT), 16)
        data = await asyncio.wait_for(self._reader.readexactly(size + 2), LIMIT)
        return data[:-2]

    async def rest(self) -> list[bytes]:
        """All chunks up to the end."""
        found = []
        while data := await self.chunk():
            found.append(data)
        return found

    async def over(self) -> bool:
        """Whether the server closed the connection, and nothing came before that."""
        return not await asyncio.wait_for(self._reader.read(), LIMIT)

    def close(self) -> None:
        self._writer.close()


class World:
    """A server on a real socket whose tokenizer the test plays."""

    def __init__(self, parts: AppState, port: FakeLink, address: tuple[str, int]) -> None:
        self.parts = parts
        self.port = port
        self.address = address
        self.sent: asyncio.Queue[Message] = asyncio.Queue()  # by the api, to the tokenizer
        port.script = lambda _, message: self.sent.put_nowait(message)
        self._clients: list[Client] = []

    async def ask(self, *, buffer: int = 0) -> tuple[Client, int]:
        """A client and the id of its request. `buffer` bounds what its socket takes unread."""
        peer = socket.socket()
        if buffer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        peer.setblocking(False)
        await asyncio.get_running_loop().sock_connect(peer, self.address)
        reader, writer = await asyncio.open_connection(sock=peer, limit=1 << 16)
        client = Client(reader, writer)
        self._clients.append(client)
        return client, await self.request(client)

    async def request(self, client: Client) -> int:
        """Send a request; its id once it is here."""
        client.send(HEAD + BODY)
        message = await self.message()
        assert isinstance(message, SubmitText)
        return message.id

    async def message(self) -> Message:
        """The next message that the api sends."""
        return await asyncio.wait_for(self.sent.get(), LIMIT)

    def close(self) -> None:
        for client in self._clients:
            client.close()


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    port = FakeLink(silent)
    parts = app_state(port)
    config = uvicorn.Config(application(parts), http=Connection, ws="none", lifespan="off", log_config=None,
                            access_log=False)  # fmt: skip
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(config=config, server_state=state, app_state={}, encode_error=encode), "127.0.0.1", 0
    )
    found = World(parts, port, server.sockets[0].getsockname())
    try:
        yield found
    finally:
        found.close()
        server.close()
        for task in tuple(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        for open_connection in tuple(state.connections):
            open_connection.transport.abort()
        await asyncio.sleep(0)


def text_of(chunks: list[bytes]) -> str:
    events = [event[6:] for event in b"".join(chunks).split(b"\n\n") if event and event != b"data: [DONE]"]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


async def test_each_batch_is_one_chunk_on_the_spot() -> None:
    async with world() as found:
        client, number = await found.ask()
        found.port.arrive(batch([(number, Row(text="one", extra={"prompt_tokens": 3}))]))
        assert b"200 OK" in await client.head()
        assert b'"one"' in await client.chunk()
        task_turns = asyncio.all_tasks()
        for word in ("two", "three"):
            found.port.arrive(batch([(number, Row(text=word))]))
            chunk = await client.chunk()
            assert f'"text":"{word}"'.encode() in chunk
            assert chunk.endswith(b"\n\n")
        assert asyncio.all_tasks() == task_turns
        found.port.arrive(batch([(number, Row(text="!", finish=Finish.STOP))]))
        last = b"".join(await client.rest())
        assert b'"finish_reason":"stop"' in last
        assert b'"completion_tokens":4' in last
        assert last.endswith(b"data: [DONE]\n\n")


async def test_a_bug_in_what_a_stream_says_ends_it_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What came in the same message is written for the others, and the process goes on."""
    real = SSEEncoder.take

    def take(self: SSEEncoder, collector: OutputCollector, updated: list[Choice]) -> bytes:
        if any("bug" in piece for choice in updated for piece in choice.text):
            raise RuntimeError("what nobody is told")
        return real(self, collector, updated)

    monkeypatch.setattr(SSEEncoder, "take", take)
    async with world() as found:
        (bad, bad_id), (good, good_id) = await found.ask(), await found.ask()
        found.port.arrive(batch([(number, Row(text="-", extra={"prompt_tokens": 1})) for number in (bad_id, good_id)]))
        for client in (bad, good):
            await client.head()
            await client.chunk()
        found.port.arrive(batch([(bad_id, Row(text="bug")), (good_id, Row(text="fine"))]))
        assert b'"fine"' in await good.chunk()
        last = b"".join(await bad.rest())
        assert b'"code":"internal_error"' in last
        assert b"nobody" not in last
        assert await found.message() == Abort(bad_id)
        found.port.arrive(batch([(good_id, Row(text="!", finish=Finish.STOP))]))
        assert b"".join(await good.rest()).endswith(b"data: [DONE]\n\n")
        assert found.parts.engine_client.statistics().unfinished == 0
    (line,) = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request_failed"]
    assert {"id", "trace_id", "route"} == set(line)
    assert all(line.values())


async def test_a_client_that_does_not_read_holds_up_nobody_and_gets_everything_merged() -> None:
    """Its deltas wait as text, bounded by the answer; what the server has buffered for it is bounded by much less."""
    async with world() as found:
        slow, slow_id = await found.ask(buffer=4096)
        fast = [await found.ask() for _ in range(3)]
        rows = [(slow_id, Row(text="-", extra={"prompt_tokens": 1}))]
        rows += [(number, Row(text="-", extra={"prompt_tokens": 1})) for _, number in fast]
        found.port.arrive(batch(rows))
        for client, _ in fast:
            await client.head()
            await client.chunk()
        steps = 2000  # 8 MB for the client that does not read
        for step in range(steps):
            rows = [(slow_id, Row(text=PIECE)), *((number, Row(text=f" {step}")) for _, number in fast)]
            found.port.arrive(batch(rows))
            for client, _ in fast:
                assert f'" {step}"'.encode() in await client.chunk()  # in this very step
        buffered = max(task.transport.get_write_buffer_size() for task in connections(found))
        assert buffered < 300_000
        found.port.arrive(batch([(slow_id, Row(text="end", finish=Finish.STOP))]))
        await slow.head()
        chunks = await slow.rest()
        assert text_of(chunks) == "-" + PIECE * steps + "end"
        assert len(chunks) < steps / 2  # many deltas came in one chunk
        usage = json.loads(chunks[-1].split(b"\n\n")[-3][6:])["usage"]
        assert usage["completion_tokens"] == steps + 2


def connections(found: World) -> list[Connection]:
    """The server's ends of all connections."""
    return [one for one in CONNECTIONS if not one.transport.is_closing()]


CONNECTIONS: list[Connection] = []


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note every connection that is made."""
    CONNECTIONS.clear()
    made = Connection.connection_made

    def noted(self: Connection, transport: asyncio.Transport) -> None:
        made(self, transport)
        CONNECTIONS.append(self)

    monkeypatch.setattr(Connection, "connection_made", noted)


async def test_a_client_that_goes_while_it_is_behind_is_aborted() -> None:
    async with world() as found:
        slow, number = await found.ask(buffer=4096)
        for _ in range(200):
            found.port.arrive(batch([(number, Row(text=PIECE))]))
            await asyncio.sleep(0)
        slow.close()
        assert await found.message() == Abort(number)
        assert found.parts.engine_client.statistics().unfinished == 0
        found.port.arrive(batch([(number, Row(text="late"))]))


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_goes_with_another_request_behind_the_first_is_aborted(begun: bool) -> None:
    """uvicorn tells a connection's last request of its end; it is the first one that runs."""
    async with world() as found:
        client, number = await found.ask()
        client.send(HEAD + BODY)
        if begun:
            found.port.arrive(batch([(number, Row(text="one", extra={"prompt_tokens": 1}))]))
            await client.head()
            await client.chunk()
        client.close()
        assert await found.message() == Abort(number)
        found.port.arrive(batch([(number, Row(text="late"))]))
        assert found.parts.engine_client.statistics().unfinished == 0
        assert found.sent.empty()


async def streaming(found: World) -> tuple[Connection, StreamWriter]:
    """The server's side of a stream that has begun, and the way out that stands open to it."""
    client, number = await found.ask()
    found.port.arrive(batch([(number, Row(text="one"))]))
    await client.head()
    (server,) = connections(found)
    writer = server.scope[STREAM_WRITER]
    assert writer is not None
    assert writer.open
    return server, writer


async def test_a_connection_that_is_closing_is_not_written_to() -> None:
    async with world() as found:
        server, writer = await streaming(found)
        server.transport.close()
        assert not writer.open


async def test_a_body_that_is_not_chunked_takes_the_long_way() -> None:
    """uvicorn chunks every stream; a writer that finds one it did not chunk says so."""
    async with world() as found:
        server, writer = await streaming(found)
        server.cycle.chunked_encoding = None
        assert not writer.open
        server.cycle.chunked_encoding = True
        server.pause_writing()
        assert not writer.open
        server.resume_writing()
        assert writer.open


async def test_two_requests_on_one_connection_have_an_writer_each() -> None:
    async with world() as found:
        client, number = await found.ask()
        found.port.arrive(batch([(number, Row(text="one", finish=Finish.STOP))]))
        await client.head()
        assert text_of(await client.rest()) == "one"
        number = await found.request(client)
        for row in (Row(text="t"), Row(text="w"), Row(text="o", finish=Finish.STOP)):
            found.port.arrive(batch([(number, row)]))
            await asyncio.sleep(0)
        await client.head()
        assert text_of(await client.rest()) == "two"


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAAAAAAIAAAAA\r\n"


async def test_who_offers_another_protocol_is_answered_as_if_it_had_not() -> None:
    """As Java's client does with its first request, and others with each one."""
    async with world() as found:
        reader, writer = await asyncio.open_connection(*found.address)
        client = Client(reader, writer)
        for word in ("one", "two"):
            writer.write(HEAD.removesuffix(b"\r\n") + OFFER + b"\r\n")
            await asyncio.sleep(0)
            writer.write(BODY)
            message = await found.message()
            assert isinstance(message, SubmitText)
            assert message.prompt == "a"
            found.port.arrive(batch([(message.id, Row(text=word, finish=Finish.STOP))]))
            assert b"200 OK" in await client.head()
            assert text_of(await client.rest()) == word
        client.close()


async def test_a_head_with_an_offer_is_bounded_like_any_other() -> None:
    async with world() as found:
        reader, writer = await asyncio.open_connection(*found.address)
        writer.write(b"GET / HTTP/1.1\r\n" + OFFER)
        for _ in range(80):
            writer.write(b"x: " + b"y" * 1000 + b"\r\n")
        assert (await asyncio.wait_for(reader.read(), LIMIT)).startswith(b"HTTP/1.1 431")
        writer.close()


async def test_a_head_without_end_is_refused() -> None:
    async with world() as found:
        reader, writer = await asyncio.open_connection(*found.address)
        writer.write(b"GET / HTTP/1.1\r\n")
        for _ in range(80):
            writer.write(b"x: " + b"y" * 1000)
        answer = await asyncio.wait_for(reader.read(), LIMIT)
        assert answer.startswith(b"HTTP/1.1 431")
        writer.close()


@pytest.mark.parametrize("target", [b"CONNECT x:443", b"GET x y", b"GET http://[", b"\x16\x03\x01"])
async def test_what_has_no_target_is_refused(target: bytes) -> None:
    async with world() as found:
        reader, writer = await asyncio.open_connection(*found.address)
        writer.write(target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), LIMIT)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"invalid_http" in answer
        writer.close()


async def test_bytes_behind_a_request_end_the_connection_but_not_its_answer() -> None:
    """Such as a body that nobody announced."""
    async with world() as found:
        reader, writer = await asyncio.open_connection(*found.address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n" + BODY)
        answer = await asyncio.wait_for(reader.read(), LIMIT)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"the body is empty" in answer
        writer.close()
        client, number = await found.ask()
        client.send(BODY)
        for row in (Row(text="t"), Row(text="w"), Row(text="o", finish=Finish.STOP)):
            found.port.arrive(batch([(number, row)]))
            await asyncio.sleep(0)
        await client.head()
        assert text_of(await client.rest()) == "two"
        assert await client.over()


async def answer_to(data: bytes) -> tuple[int, dict[str, object], bool]:
    """Status, error and whether the connection is over behind it, of whatever comes first."""
    async with world() as found:
        reader, writer = await asyncio.open_connection(*found.address)
        writer.write(data)
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT)).lower()
        body = await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        rest = await asyncio.wait_for(reader.read(), LIMIT) if b"connection: close" in head else b"open"
        writer.close()
        await writer.wait_closed()
        assert found.sent.empty(), "nothing of it was served"
        return int(head.split()[1]), json.loads(body)["error"], rest == b""


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKS = b"\r\n\r\n1\r\na\r\n0\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (POST + b"Transfer-Encoding: gzip, chunked" + CHUNKS, 501, "unsupported_transfer_coding"),
        (POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked" + CHUNKS, 501, "unsupported_transfer_coding"),
        (POST + b"Transfer-Encoding: gzip" + CHUNKS, 501, "unsupported_transfer_coding"),
        (POST + b"Transfer-Encoding: identity" + CHUNKS, 501, "unsupported_transfer_coding"),
        (POST + b"Transfer-Encoding: ,chunked" + CHUNKS, 501, "unsupported_transfer_coding"),
        (
            POST + b"Upgrade: h2c\r\nConnection: upgrade\r\nTransfer-Encoding: gzip, chunked" + CHUNKS,
            501,
            "unsupported_transfer_coding",
        ),
        (POST + b"Transfer-Encoding: chunked, gzip" + CHUNKS, 400, "invalid_http"),
        (POST + b"Transfer-Encoding: chunked, chunked" + CHUNKS, 400, "invalid_http"),
        (POST + b"Transfer-Encoding: \x0bchunked" + CHUNKS, 400, "invalid_http"),
        (POST + b"Transfer-Encoding : chunked" + CHUNKS, 400, "invalid_http"),
        (POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked" + CHUNKS, 400, "invalid_http"),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4" + CHUNKS, 400, "invalid_http"),
        (POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked" + CHUNKS, 400, "invalid_http"),
        (POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400, "invalid_http"),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "invalid_http"),
        (POST + b"Content-Length: 2, 2\r\n\r\n{}", 400, "invalid_http"),
        (POST + b"Content-Length: +2\r\n\r\n{}", 400, "invalid_http"),
        (POST + b"Content-Length: 0x2\r\n\r\n{}", 400, "invalid_http"),
        (POST + b"Content-Length:\r\n\r\n", 400, "invalid_http"),
        (POST + b"X-A: b\r\n folded\r\n\r\n", 400, "invalid_http"),
        (POST + b"Content-Length: 2\n\r\n{}", 400, "invalid_http"),
        (POST.replace(b"\r\n", b"\n") + b"\n", 400, "invalid_http"),
        (POST + b"X-A: b\rContent-Length: 2\r\n\r\n", 400, "invalid_http"),
        (POST + b"X-A: b\0c\r\n\r\n", 400, "invalid_http"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n", 400, "invalid_http"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n", 400, "invalid_http"),
        (b"GET /version HTTP/1.1\r\n\r\n", 400, "invalid_host"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400, "invalid_host"),
        (b"GET /version HTTP/2.0\r\nHost: x\r\n\r\n", 505, "http_version_not_supported"),
        (b"GET /version HTTP/3.0\r\nHost: x\r\n\r\n", 505, "http_version_not_supported"),
        (b"GET /version HTTP/1.2\r\nHost: x\r\n\r\n", 505, "http_version_not_supported"),
        (b"GET /version HTTP/0.9\r\nHost: x\r\n\r\n", 505, "http_version_not_supported"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version_not_supported"),
    ],
)
async def test_what_two_readers_might_read_differently_is_refused(data: bytes, status: int, code: str) -> None:
    """Refused with the connection, so that nothing behind it is ever taken for a request."""
    found, error, over = await answer_to(data + SMUGGLED)
    assert (found, error["code"], error["type"], over) == (status, code, "invalid_request_error", True), error


async def test_trailers_are_dropped() -> None:
    """They come when the request has been let in by its headers, and are none of those."""
    parts = app_state(FakeLink(silent), api_key="right")
    scopes: list[dict[str, object]] = []

    async def app(scope: dict[str, object], receive: object, send: object) -> None:
        scopes.append(scope)
        await application(parts)(scope, receive, send)  # type: ignore[arg-type]

    trailers = b"Authorization: Bearer right\r\nX-Request-Timeout: 1\r\nContent-Encoding: gzip\r\nX-Request-Id: t\r\n"
    for name in (b"", b"Trailer: Authorization\r\n"):
        scopes.clear()
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)  # type: ignore[arg-type]
        config.load()
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda config=config, state=state: Connection(  # type: ignore[misc]
                config=config, server_state=state, app_state={}, encode_error=encode
            ),
            "127.0.0.1", 0,
        )  # fmt: skip
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        head = b"POST /v1/nowhere HTTP/1.1\r\nHost: x\r\n" + name + b"Transfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n")
        told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT)
        assert told.startswith(b"HTTP/1.1 401 ")
        scope = scopes[0]
        assert [key for key, _ in scope["headers"]] == [b"host", *([b"trailer"] if name else []), b"transfer-encoding"]  # type: ignore[attr-defined]
        writer.close()
        await writer.wait_closed()
        server.close()
        for open_connection in tuple(state.connections):
            open_connection.transport.abort()
        await asyncio.sleep(0)


async def test_trailers_count_as_head() -> None:
    async with world() as found:
        reader, writer = await asyncio.open_connection(*found.address)
        writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
        writer.write(b"".join(b"X-%d: %b\r\n" % (number, b"a" * 1000) for number in range(70)))
        told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT)
        assert int(told.split()[1]) in (400, 431)
        writer.close()
        await writer.wait_closed()
