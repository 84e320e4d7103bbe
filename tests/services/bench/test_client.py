"""The client against a real socket: every way that a server can answer, and every way that it can fail."""

from __future__ import annotations

import asyncio
import itertools
import time

import msgspec
import pytest

from benchmarks.load.fake import Behaviour, Fake
from penstock.services.bench.client import Connection, Load, Tally, Target, judge, target
from penstock.services.bench.workload import Record, Request, Workload, requests

SMALL = Workload(requests=12, concurrency=3, input=(4, 9), output=(2, 20), warmup=0)


async def give(behaviour: Behaviour, workload: Workload = SMALL, timeout: float = 30.0) -> tuple[list[Record], Fake]:
    async with Fake(behaviour) as server:
        load = Load(target(server.url), workload.endpoint, timeout)
        await load.connect(workload.concurrency)
        await load.run(requests(workload), workload.concurrency, time.monotonic())
        load.close()
    return sorted(load.records, key=lambda record: record.index), server


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(), Behaviour(line="\r\n", comment=True), Behaviour(cut=1), Behaviour(cut=7, line="\r\n"),
        Behaviour(chunked=False), Behaviour(close=True), Behaviour(ids=True),
    ],
    ids=str,
)  # fmt: skip
async def test_every_shape_of_stream_gives_the_same_counts(behaviour: Behaviour) -> None:
    records, server = await give(behaviour)
    load = list(requests(SMALL))
    assert [record.error for record in records] == [""] * 12
    assert [record.tokens for record in records] == [request.output_tokens for request in load]
    assert [record.prompt_tokens for record in records] == [request.prompt_tokens for request in load]
    assert [record.events for record in records] == [record.tokens for record in records]
    assert [len(record.gaps) // 8 for record in records] == [record.tokens - 1 for record in records]
    assert all(r.start < r.first <= r.last <= r.end and r.cached_tokens == 1 for r in records)
    assert sorted(str(body) for body in server.bodies) == sorted(str(msgspec.json.decode(r.body)) for r in load)


async def test_connections_are_kept_and_bounded() -> None:
    _, server = await give(Behaviour())
    assert server.connections == 3


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (Behaviour(status=429), "http 429"),
        (Behaviour(fail_after=1), "disconnected"),
        (Behaviour(fail_after=0), "disconnected"),
        (Behaviour(fail_after=1, failure="error"), "error event"),
        (Behaviour(fail_after=1, failure="garbage"), "malformed"),
        (Behaviour(failure="truncate"), "ended without [DONE]"),
        (Behaviour(usage=False), "no usage"),
        (Behaviour(missing=1), "token count"),
        (Behaviour(missing=1, ids=True), "token count"),
        (Behaviour(missing=-1), "token count"),
    ],
    ids=str,
)
async def test_failures_are_told_apart(behaviour: Behaviour, error: str) -> None:
    records, _ = await give(behaviour)
    assert [record.error for record in records] == [error] * 12
    assert all(record.end >= record.start > 0 for record in records)


async def test_a_hanging_server_is_a_timeout() -> None:
    records, _ = await give(Behaviour(fail_after=1, failure="hang"), timeout=0.2)
    assert {record.error for record in records} == {"timeout"}


async def test_nobody_listening_is_an_error_of_each_request() -> None:
    async with Fake(Behaviour()) as server:
        where = target(server.url)
    load = Load(where, "completions", 5.0)
    await load.connect(3)
    await load.run(requests(SMALL), 3, time.monotonic())
    assert [record.error for record in load.records] == ["no connection"] * 12


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    records, _ = await give(Behaviour(tick=0.002))
    edges = sorted([(r.start, 1) for r in records] + [(r.end, -1) for r in records], key=lambda edge: edge)
    assert max(itertools.accumulate(step for _, step in edges)) <= 3


async def test_arrivals_do_not_wait_for_answers() -> None:
    workload = Workload(requests=20, rate=400.0, input=(4, 4), output=(30, 30))
    start = time.monotonic()
    records, _ = await give(Behaviour(hold=20), workload)
    due = [request.due for request in requests(workload)]
    assert [record.error for record in records] == [""] * 20
    assert all(record.start >= start + when for record, when in zip(records, due, strict=True))
    assert max(record.start for record in records) < min(record.end for record in records)


async def test_a_capped_rate_never_exceeds_its_cap() -> None:
    workload = Workload(requests=12, rate=5000.0, concurrency=2, input=(4, 4), output=(10, 10))
    records, server = await give(Behaviour(tick=0.002), workload)
    assert [record.error for record in records] == [""] * 12
    assert server.connections <= 3


def request(prompt: int = 4, output: int = 8) -> Request:
    return Request(0, 0, 0.0, prompt, output, b"")


@pytest.mark.parametrize(
    ("record", "asked", "error"),
    [
        (Record(0, 0, events=8, tokens=8, prompt_tokens=4), request(), ""),
        (Record(0, 0, events=3, tokens=8, prompt_tokens=4), request(), ""),  # merged deltas
        (Record(0, 0, events=7, tokens=7, prompt_tokens=4), request(), "token count"),
        (Record(0, 0, events=7, tokens=7, prompt_tokens=4), request(output=-1), ""),
        (Record(0, 0, events=9, tokens=8, prompt_tokens=4), request(), "token count"),
        (Record(0, 0, events=8, tokens=8, prompt_tokens=5), request(), "prompt count"),
        (Record(0, 0, events=8, tokens=8, prompt_tokens=5), request(prompt=-1), ""),
        (Record(0, 0, events=8), request(), "no usage"),
        (Record(0, 0, error="timeout"), request(), "timeout"),
    ],
)
def test_counts_are_held_against_usage(record: Record, asked: Request, error: str) -> None:
    judge(record, asked)
    assert record.error == error


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://localhost:8000", Target("localhost", 8000, "")),
        ("http://localhost:8000/v1/", Target("localhost", 8000, "")),
        ("10.0.0.1:99/engine/v1", Target("10.0.0.1", 99, "/engine")),
        ("http://host", Target("host", 80, "")),
    ],
)
def test_base_urls(url: str, where: Target) -> None:
    assert target(url) == where


def test_tls_is_refused() -> None:
    with pytest.raises(ValueError, match="--base-url"):
        target("https://host")


def test_a_request_on_the_wire() -> None:
    raw = Target("host", 1, "/engine", "secret").encode(b"{}", "chat")
    assert raw.startswith(b"POST /engine/v1/chat/completions HTTP/1.1\r\nHost: host:1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in raw
    assert raw.endswith(b"\r\nContent-Length: 2\r\n\r\n{}")


async def test_chat_chunks_count_from_the_first_content() -> None:
    tally = Tally()
    connection = Connection(tally)
    connection.connection_made(asyncio.Transport())
    connection._record = record = Record(0, 0)
    parts = ['{"role":"assistant","content":""}', '{"content":"Hi"}', '{"reasoning_content":"so"}', "{}"]
    body = "".join(f'data: {{"choices":[{{"delta":{part}}}]}}\n\n' for part in parts)
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n" + body.encode())
    assert (record.events, tally.events, record.error) == (2, 2, "")
