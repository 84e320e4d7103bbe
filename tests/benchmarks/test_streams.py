"""Streams of which every token is kept: what a client got, when a blow falls, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from benchmarks.load.streams import Answer, Progress, play
from penstock.services.bench.client import Target

LIMIT = 60.0  # seconds
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(*ids: int, end: str | None = None) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": end}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def answering(parts: Sequence[bytes], go: asyncio.Event | None = None) -> AsyncIterator[Target]:
    """A server that answers everybody with these bytes, the last of them when `go` is set."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
        for part in parts[:-1]:
            writer.write(part)
            await writer.drain()
        if go is not None:
            await go.wait()
        writer.write(parts[-1])
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield Target(host, port, "")


async def test_every_token_is_kept_and_compared() -> None:
    async with answering([HEAD, event(1, 2), event(3), event(end="length"), DONE]) as where:
        first, second = await play(where, [b"{}", b"{}"], LIMIT)
    assert (first.tokens, first.ends, first.error) == ((1, 2, 3), ("length",), "")
    assert first.same(second)
    other = Answer(tokens=(1, 2, 4), ends=("length",))
    assert not first.same(other)
    assert first.as_long(other)
    assert not first.as_long(Answer(tokens=(1, 2), ends=("length",)))
    assert not first.as_long(Answer(tokens=(1, 2, 3), ends=("length", "length")))
    assert not first.same(Answer(tokens=(1, 2, 3), ends=("length",), error="late"))


async def test_a_blow_falls_at_its_mark_and_the_pause_is_seen() -> None:
    go, struck = asyncio.Event(), []

    def strike() -> None:
        struck.append(True)
        asyncio.get_running_loop().call_later(0.2, go.set)

    async with answering([HEAD, event(1), event(2), event(3, end="stop") + DONE], go) as where:
        found = await play(where, [b"{}"] * 3, LIMIT, 6, strike)
    assert struck == [True]
    assert [answer.tokens for answer in found] == [(1, 2, 3)] * 3
    assert max(answer.pause for answer in found) >= 0.15  # those who had both events before the blow


async def test_streams_that_end_before_the_mark_are_not_struck() -> None:
    struck: list[bool] = []
    async with answering([HEAD, event(1, end="stop"), DONE]) as where:
        (answer,) = await play(where, [b"{}"], LIMIT, 5, lambda: struck.append(True))
    assert struck == []
    assert answer.error == ""


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([HEAD, event(1), b""], "ended without [DONE]"),
        ([HEAD.replace(b"Connection: close", b"Content-Length: 9999"), event(1)], "disconnected"),
        ([b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\n", b"busy"], "http 503 busy"),
        ([b"nonsense\r\n\r\n", b""], "malformed"),
        ([HEAD, b"data: {nonsense\n\n"], "malformed"),
        ([HEAD, b'data: {"error": {"message": "no more"}}\n\n', DONE], "no more"),
    ],
)
async def test_what_goes_wrong_is_told(parts: list[bytes], error: str) -> None:
    async with answering(parts) as where:
        (answer,) = await play(where, [b"{}"], LIMIT)
    assert error in answer.error
    assert not answer.same(answer)


async def test_who_has_no_end_in_time_is_told() -> None:
    go = asyncio.Event()
    async with answering([HEAD, event(1), DONE], go) as where:
        (answer,) = await play(where, [b"{}"], 0.2)
        go.set()
    assert answer.error == "no end after 0.2 s"


async def test_nobody_there() -> None:
    async with answering([b""]) as where:
        pass
    (answer,) = await play(where, [b"{}"], LIMIT, 3, lambda: None)
    assert answer.error.startswith("no connection")


async def test_progress_is_reached_or_never() -> None:
    progress = Progress(2)
    progress.add(3)
    assert await progress.reach(3)
    progress = Progress(1)
    waiting = asyncio.create_task(progress.reach(3))
    await asyncio.sleep(0)
    progress.add(2)
    progress.ended()
    assert not await waiting
