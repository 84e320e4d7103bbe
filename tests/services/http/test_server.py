"""Connections beyond what there are descriptors for wait; nobody who is in loses anything by them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from benchmarks.samples import read_samples, total
from penstock.protocol.message import Message
from penstock.protocol.messages import Finish, SubmitText
from penstock.services.http import server
from penstock.services.http.server import ConnectionLimiter, accept, connection_limit
from penstock.services.supervisor.process import ExitCode
from tests.services.client.fake_engine import LIMIT, Row, batch
from tests.services.http.process import Tokenizer, api

LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
FILES = 160  # descriptors of the process
CROWD = 3 * FILES  # connections


class Echo(asyncio.Protocol):
    """Says what it hears."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self.limiter = limiter

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self.transport, asyncio.Transport)
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limiter.release()


class Place:
    """A listener whose connections are echoed."""

    def __init__(self, limit: int, encryption: ssl.SSLContext | None = None, handshake: float = 1.0) -> None:
        self.limiter = ConnectionLimiter(limit)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.task = asyncio.create_task(
            accept(self.listener, self.limiter, lambda: Echo(self.limiter), encryption, handshake)
        )

    async def client(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.listener.getsockname())

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))
        self.listener.close()


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"a")
    return await asyncio.wait_for(reader.readexactly(1), LIMIT) == b"a"


async def test_the_next_connection_waits_for_one_to_close() -> None:
    place = Place(2)
    clients = [await place.client() for _ in range(4)]
    for reader, writer in clients[:2]:
        assert await echoed(reader, writer)
    third = clients[2][0]
    clients[2][1].write(b"a")
    assert await echoed(*clients[1])
    assert not third.at_eof()
    assert place.limiter.statistics() == server.ConnectionStatistics(open=2, limit=2, waits=1, failures=0)
    clients[0][1].close()
    assert await asyncio.wait_for(third.readexactly(1), LIMIT) == b"a"
    assert place.limiter.statistics().open == 2
    for _, writer in clients:
        writer.close()
        await writer.wait_closed()
    await place.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ECONNABORTED])
async def test_an_accept_that_fails_is_tried_again(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = socket.socket.accept, [number] * 3

    def failing(self: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(), os.strerror(number))
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    monkeypatch.setattr(server, "PAUSE", 0.001)
    place = Place(2)
    reader, writer = await place.client()
    assert await echoed(reader, writer)
    assert failures == []
    assert place.limiter.statistics().failures == (0 if number == errno.ECONNABORTED else 3)
    writer.close()
    await writer.wait_closed()
    await place.close()


@pytest.mark.parametrize(("begins", "seconds"), [(b"", 0.01), (b"\x16", 0.01), (b"s", LIMIT)])
async def test_a_handshake_that_fails_leaves_no_connection(begins: bytes, seconds: float) -> None:
    """Nor one that never begins, or never goes on."""
    place = Place(2, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), seconds)
    reader, writer = await place.client()
    writer.write(begins + b"\0" * 16 * (begins == b"s"))
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), LIMIT)
    assert place.limiter.statistics().open == 0
    writer.close()
    await place.close()


async def test_a_broken_listener_is_no_want_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: socket.socket) -> tuple[socket.socket, object]:
        raise OSError(errno.EINVAL, "not listening")

    monkeypatch.setattr(socket.socket, "accept", broken)
    place = Place(2)
    with pytest.raises(OSError, match="not listening"):
        await place.task
    place.listener.close()


def test_the_room_follows_the_limit_of_open_files() -> None:
    before = soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, used + 200), most))
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - used
        assert free - 50 < connection_limit(0, 2) < free - server.SPARE
        assert connection_limit(10, 2) == 10
        assert connection_limit(10**6, 2) == connection_limit(0, 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, most))
        assert connection_limit(0, 2) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_crowd_beyond_the_limit_of_open_files_costs_no_stream(tmp_path: Path) -> None:
    """Five rounds: a process that ended by it would be given up by its launcher."""
    submitted: asyncio.Queue[int] = asyncio.Queue()

    def script(tokenizer: Tokenizer, message: Message) -> None:
        if isinstance(message, SubmitText):
            tokenizer.arrive(batch([(message.id, Row(text="begun", extra={"prompt_tokens": 1}))]))
            submitted.put_nowait(message.id)

    tokenizer = Tokenizer(script, tmp_path)
    limited = ("bash", "-c", f'ulimit -n {FILES}; exec "$0" "$@"')
    try:
        async with api(tmp_path, parent=limited) as process, httpx.AsyncClient(timeout=LIMIT) as http:
            body = {"prompt": "a", "stream": True}
            async with http.stream("POST", process.url + "/v1/completions", json=body) as stream:
                port = int(process.url.split(":")[2])
                number = await asyncio.wait_for(submitted.get(), LIMIT)
                lines = stream.aiter_lines()
                for round_ in range(5):
                    crowd = []
                    for _ in range(CROWD):
                        peer = socket.socket()
                        peer.setblocking(False)
                        await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", port))
                        peer.send(LIVE)
                        crowd.append(peer)
                    async with asyncio.timeout(LIMIT):
                        while "connections_full" not in process.log.read_text():  # noqa: ASYNC110
                            await asyncio.sleep(0.02)
                    tokenizer.arrive(batch([(number, Row(text=f"<{round_}>"))]))
                    async for line in lines:
                        if f"<{round_}>" in line:
                            break
                    assert process.process.returncode is None
                    for peer in crowd:
                        peer.close()
                metrics = (await http.get(process.url + "/metrics")).text
                tokenizer.arrive(batch([(number, Row(text="!", finish=Finish.STOP))]))
                assert "data: [DONE]" in [line async for line in lines]
            process.signal()
            assert await process.ended() == ExitCode.ORDERLY
        found = read_samples(metrics)
        most = total(found, "connections_limit", role="api")
        assert FILES / 4 < most < FILES - server.SPARE
        assert total(found, "accept_waits_total", role="api") >= 1
        assert total(found, "accept_failures_total", role="api") == 0
        assert process.log.read_text().count("connections_full") == 1
    finally:
        tokenizer.close()
