"""The soak's own parts, a minute of it, and what its summary holds against a server."""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import msgspec
import pytest

from benchmarks import soak

FINE = soak.Summary(
    seconds=60.0, cores=2, requests=10, statuses={200: 6, 429: 3, 400: 1}, kinds={"whole": 10}, broken=0,
    p99_at_capacity=0.1, p99_in_flood=0.19, memory={"api-1": (100.0, 104.0)}, blocks_back=True, faults=0, deaths=0,
)  # fmt: skip


def test_a_fine_run_has_nothing_against_it() -> None:
    found = soak.judged(FINE)
    assert all(each.holds for each in found)
    text = soak.table(found)
    assert len(text.splitlines()) == len(found) + 2
    assert "0.190 s, 0.100 s at capacity: 1.90 times | 2 times | yes |" in text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"statuses": {500: 2}}, ["answers of 500", "answers that nobody should get"]),
        ({"statuses": {503: 2}}, ["answers that nobody should get"]),
        ({"p99_in_flood": 0.21}, ["p99 time to first token, admitted in the flood"]),
        ({"p99_at_capacity": 0.0}, ["p99 time to first token, admitted in the flood"]),
        ({"memory": {"api-1": (100.0, 120.0)}}, ["memory of the process that grew most"]),
        ({"broken": 1}, ["answers that broke off"]),
        ({"blocks_back": False}, ["blocks back at the end"]),
        ({"faults": 1}, ["faults in the accounts of blocks"]),
        ({"deaths": 1}, ["processes that died"]),
    ],
)
def test_what_may_not_be_is_told(change: dict[str, Any], told: list[str]) -> None:
    found = soak.judged(msgspec.structs.replace(FINE, **change))
    assert [each.what for each in found if not each.holds] == told
    assert soak.table(found).count("| NO |") == len(told)


@pytest.mark.parametrize(
    ("last", "streamed", "whole"),
    [
        (b"5\r\ndata: {}\n\n\r\n", True, False),
        (b"data: {}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", True, True),
        (b'data: {"error": {"code": "deadline_exceeded"}}\n\n', True, True),
        (b'{"choices": []}', False, True),
        (b'{"choices": [', False, False),
    ],
)
def test_the_end_of_an_answer(last: bytes, streamed: bool, whole: bool) -> None:
    assert soak.ended(last, streamed=streamed) == whole


def test_percentile() -> None:
    assert soak.p99([]) == 0.0
    assert soak.p99([3.0]) == 3.0
    assert soak.p99([float(number) for number in range(1, 201)]) == 198.0


@pytest.mark.parametrize("kind", [kind for kind in soak.KINDS if kind != "nonsense"])
def test_bodies_are_json(kind: str) -> None:
    found = json.loads(soak.body_of(kind, random.Random(1)))
    assert found["stream"] == (kind not in soak.SINGLE)
    assert ("timeout" in found) == (kind == "hurried")


def test_nonsense_is_mostly_none() -> None:
    bad = 0
    for seed in range(50):
        try:
            json.loads(soak.body_of("nonsense", random.Random(seed)))
        except ValueError:
            bad += 1
    assert bad > 40


def test_memory_is_read() -> None:
    assert soak.memory_of(os.getpid())[f"other-{os.getpid()}"] > 10
    assert soak.memory_of(2**30) == {}


async def test_a_client_takes_status_and_first_token() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\ndata: [DONE]\n\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        outcome = await soak.ask(server.sockets[0].getsockname(), "stream", random.Random(1))
    assert (outcome.status, outcome.whole) == (200, True)
    assert 0 < outcome.first < 60


@pytest.mark.long
def test_a_minute() -> None:
    summary = soak.run(60.0, 7)
    print(summary)
    assert summary.statuses.get(500, 0) == 0
    assert summary.statuses[200] > 10
    assert summary.blocks_back
    assert summary.faults == 0
