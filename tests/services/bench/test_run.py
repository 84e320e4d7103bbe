"""Client processes of a load (serve.py, client.py): a load in several of them, progress, and one that dies."""

from __future__ import annotations

import asyncio
import sys

import pytest

from benchmarks.load.fake import Behaviour, Fake
from penstock.services.bench import serve
from penstock.services.bench.client import Progress, Target, target
from penstock.services.bench.serve import ClientDied, run, total
from penstock.services.bench.workload import Workload

LOAD = Workload(requests=12, concurrency=4, input=(4, 4), output=(3, 3), warmup=3)


async def test_processes_share_a_load() -> None:
    seen: list[Progress] = []
    async with Fake(Behaviour()) as fake:
        where = target(fake.url)
        outcome = await run(where, LOAD, processes=3, watch=seen.append)
        warm = await run(where, LOAD, processes=3, warmup=True)
    assert [record.index for record in outcome.records] == list(range(12))
    assert {record.error for record in outcome.records} == {""}
    assert all(record.tokens == 3 for record in outcome.records)
    assert len(warm.records) == 3
    assert outcome.client_cpu_seconds > 0


async def test_a_client_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises((ClientDied, BrokenPipeError, ConnectionResetError)):
        await asyncio.wait_for(run(Target("127.0.0.1", 1, ""), LOAD), 120)


def test_reports_add_up() -> None:
    one, two = Progress(1, 2, 3, 4), Progress(10, 20, 30, 40)
    assert total([one, two]) == Progress(11, 22, 33, 44)
    assert serve.HEAD_START < 1
