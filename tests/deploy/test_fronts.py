"""nginx and Envoy with the settings of `deploy/front`, run for real where they are installed, before a server that does
what the test says: tokens pass as they come, nothing that began is repeated, who leaves is gone."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from tests.services.links.network import free_port

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PID = os.getpid()
HOST = f"127.{1 + (PID >> 14) % 128}.{(PID >> 7) % 128}.{1 + PID % 128}"  # loopback's, and nobody else's
LIMIT = 60.0  # seconds for anything
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\nContent-Length: 2\r\n\r\n{}"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Serve = Callable[[StreamReader, StreamWriter], Awaitable[None]]
FRONTS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name in ("nginx", "envoy")
]


def nginx(folder: Path, port: int, server: int) -> list[str]:
    """Its command, with the settings as they are but for addresses and places."""
    text = (DEPLOY / "front" / "nginx.conf").read_text()
    text = text.replace("listen 8080", f"listen {HOST}:{port}").replace("127.0.0.1:8000", f"{HOST}:{server}")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"    {kind}_temp_path {folder / kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(text.replace("http {\n", "http {\n" + places))
    user = "user root; " if os.geteuid() == 0 else ""
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr",
            "-g", f"{user}daemon off; pid {folder / 'pid'};"]  # fmt: skip


def envoy(folder: Path, port: int, server: int) -> list[str]:
    settings = yaml.safe_load((DEPLOY / "front" / "envoy.yaml").read_text())
    resources = settings["static_resources"]
    resources["listeners"][0]["address"]["socket_address"] = {"address": HOST, "port_value": port}
    (cluster,) = resources["clusters"]
    (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["address"]["socket_address"] = {"address": HOST, "port_value": server}
    (folder / "envoy.yaml").write_text(yaml.safe_dump(settings))
    return ["envoy", "-c", str(folder / "envoy.yaml"), "--use-dynamic-base-id", "--concurrency", "1", "-l", "error"]


COMMANDS = {"nginx": nginx, "envoy": envoy}


@asynccontextmanager
async def front(name: str, folder: Path, serve: Serve) -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    """A front before a server, when it takes requests: its port, its process."""
    tasks: set[asyncio.Task[None]] = set()

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    port = free_port(HOST)  # fronts cannot be given port 0
    command = COMMANDS[name](folder, port, server.sockets[0].getsockname()[1])
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    answered = await got(port, "/health/ready")
                except OSError:
                    answered = b""
                if b" 200 " in answered:
                    break
                assert process.returncode is None
                await asyncio.sleep(0.02)
            yield port, process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        server.close()
        for task in tuple(tasks):
            task.cancel()


async def got(port: int, path: str) -> bytes:
    """From an address other than 127.0.0.1, which nginx lets ask for more."""
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(HOST, 0))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: front\r\nConnection: close\r\n\r\n".encode())
    found = await reader.read()
    writer.close()
    return found


async def request(reader: StreamReader, writer: StreamWriter) -> bytes:
    """The path of the next request that is no question about health, which are answered here."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        await reader.readexactly(int(length[1]) if length else 0)
        path = head.split(b" ")[1]
        if not path.startswith(b"/health"):
            return path
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


@pytest.mark.parametrize("name", FRONTS)
async def test_tokens_pass_as_they_come(name: str, tmp_path: Path) -> None:
    """The next one is written only when the client has the one before."""
    seen = asyncio.Event()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await request(reader, writer)
        writer.write(HEAD)
        for number in range(20):
            writer.write(chunk(b"data: %d\n\n" % number))
            await seen.wait()
            seen.clear()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        await reader.read()

    async with front(name, tmp_path, serve) as (port, _):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(POST)
        for number in range(20):
            await reader.readuntil(b"data: %d\n\n" % number)
            seen.set()
        await reader.readuntil(b"0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize("name", FRONTS)
async def test_a_request_that_has_begun_is_never_repeated(name: str, tmp_path: Path) -> None:
    """The server takes it and ends: the client hears of it, and no second one comes."""
    came: list[bytes] = []

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        came.append(await request(reader, writer))

    async with front(name, tmp_path, serve) as (port, _):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(POST)
        status = await reader.readline()
        writer.close()
        assert status.split()[1] in (b"502", b"503")
        assert came == [b"/v1/chat/completions"]


@pytest.mark.parametrize("name", FRONTS)
async def test_a_client_that_leaves_is_gone_at_the_server_too(name: str, tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await request(reader, writer)
        writer.write(HEAD + chunk(b"data: 0\n\n"))
        assert await reader.read() == b""
        gone.set()

    async with front(name, tmp_path, serve) as (port, _):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(POST)
        await reader.readuntil(b"data: 0\n\n")
        writer.close()
        await gone.wait()


@pytest.mark.parametrize("name", FRONTS)
async def test_metrics_are_not_for_clients(name: str, tmp_path: Path) -> None:
    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        assert await request(reader, writer) != b"/metrics"

    async with front(name, tmp_path, serve) as (port, _):
        assert b" 403 " in (await got(port, "/metrics")).splitlines()[0]


@pytest.mark.parametrize("name", FRONTS[:1])
async def test_streams_outlive_a_reload(name: str, tmp_path: Path) -> None:
    """As the page's second way to upgrade wants it: new settings are read, old streams end in their own time."""
    go = asyncio.Event()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        if await request(reader, writer) != b"/v1/chat/completions":
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            return
        writer.write(HEAD + chunk(b"data: 0\n\n"))
        await go.wait()
        writer.write(chunk(b"data: 1\n\n") + b"0\r\n\r\n")
        await writer.drain()

    async with front(name, tmp_path, serve) as (port, process):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(POST)
        await reader.readuntil(b"data: 0\n\n")
        settings = tmp_path / "nginx.conf"
        settings.write_text(settings.read_text().replace("deny all;", "return 418;"))
        process.send_signal(signal.SIGHUP)
        while b" 418 " not in await got(port, "/metrics"):
            continue
        go.set()
        await reader.readuntil(b"data: 1\n\n")
        writer.close()
