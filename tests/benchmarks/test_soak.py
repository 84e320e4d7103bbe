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
    seconds=60.0, requests=10, statuses={200: 6, 429: 3, 400: 1}, kinds={"whole": 10}, p99_at_capacity=0.1,
    p99_in_flood=0.19, memory={"api-1": (100.0, 104.0)}, blocks_back=True, faults=0,
)  # fmt: skip


def test_a_fine_run_has_nothing_against_it() -> None:
    assert FINE.against() == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"statuses": {500: 2}}, "2 answers of 500"),
        ({"p99_in_flood": 0.21}, "0.210 s, 0.100 s at capacity"),
        ({"memory": {"api-1": (100.0, 120.0)}}, "api-1 grew from 100 to 120 MiB"),
        ({"blocks_back": False}, "blocks are missing"),
        ({"faults": 1}, "1 faults"),
    ],
)
def test_what_may_not_be_is_told(change: dict[str, Any], told: str) -> None:
    (found,) = msgspec.structs.replace(FINE, **change).against()
    assert told in found


def test_percentile() -> None:
    assert soak.p99([]) == 0.0
    assert soak.p99([3.0]) == 3.0
    assert soak.p99([float(number) for number in range(1, 201)]) == 198.0


@pytest.mark.parametrize("kind", [kind for kind in soak.KINDS if kind != "nonsense"])
def test_bodies_are_json(kind: str) -> None:
    found = json.loads(soak.body_of(kind, random.Random(1)))
    assert found["stream"] == (kind != "whole")
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
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        outcome = await soak.ask(server.sockets[0].getsockname(), "stream", random.Random(1))
    assert outcome.status == 200
    assert 0 < outcome.first < 10


@pytest.mark.long
def test_a_minute() -> None:
    summary = soak.run(60.0, 7)
    print(summary)
    assert summary.statuses.get(500, 0) == 0
    assert summary.statuses[200] > 10
    assert summary.blocks_back
    assert summary.faults == 0
