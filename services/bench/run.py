"""Runs one workload with several client processes and shows how far it is."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.bench.client import Record, Target
from penstock.services.bench.worker import Finished, Go, Job, Progress, Ready, Report, frame
from penstock.services.bench.workload import Workload

ROOT = Path(__file__).absolute().parents[3]
HEAD_START = 0.2  # seconds between the last process being ready and the first request
REPORT = msgspec.msgpack.Decoder(Report)


class ClientDied(Exception):
    """A client process of the load generator ended without its results."""


class Outcome(msgspec.Struct, frozen=True):
    """What the client processes brought back."""

    records: tuple[Record, ...]
    client_cpu_seconds: float  # of all processes together, while the load ran


Watch = Callable[[Progress], None]


async def run(where: Target, workload: Workload, *, model: str = "", extra: Mapping[str, Any] | None = None,
              processes: int = 1, timeout: float = 600.0, warmup: bool = False,
              watch: Watch | None = None) -> Outcome:  # fmt: skip
    """Give the workload to the server from `processes` client processes. Raises ClientDied."""
    workers = min(processes, workload.concurrency or processes, max(1, workload.requests))
    async with AsyncExitStack() as stack:
        clients = []
        for worker in range(workers):
            job = Job(target=where, workload=workload, model=model, extra=dict(extra or {}), timeout=timeout,
                      worker=worker, workers=workers, warmup=warmup)  # fmt: skip
            clients.append(await start(job, stack))
        for client in clients:
            await receive(client, Ready)
        go = frame(Go(time.monotonic() + HEAD_START))
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(go)
            await client.stdin.drain()
        latest = [Progress(0, 0, 0, 0)] * workers

        async def follow(worker: int) -> Finished:
            while True:
                report = await receive(clients[worker], Progress, Finished)
                if isinstance(report, Finished):
                    return report
                assert isinstance(report, Progress)
                latest[worker] = report
                if watch is not None:
                    watch(total(latest))

        done = await asyncio.gather(*(follow(worker) for worker in range(workers)))
        await asyncio.gather(*(client.wait() for client in clients))
    records = sorted((record for finished in done for record in finished.records), key=lambda r: r.index)
    return Outcome(tuple(records), sum(finished.cpu_seconds for finished in done))


async def start(job: Job, stack: AsyncExitStack) -> asyncio.subprocess.Process:
    """A client process with its job; it ends with the stack at the latest."""
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.services.bench.worker", cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip

    async def end() -> None:
        if client.returncode is None:
            client.terminate()
        await client.wait()

    stack.push_async_callback(end)
    assert client.stdin is not None
    client.stdin.write(frame(job))
    await client.stdin.drain()
    return client


async def receive(client: asyncio.subprocess.Process, *kinds: type[msgspec.Struct]) -> msgspec.Struct:
    """The next frame of a client process, which must be one of the kinds."""
    assert client.stdout is not None
    try:
        size = int.from_bytes(await client.stdout.readexactly(4), "little")
        report = REPORT.decode(await client.stdout.readexactly(size))
    except asyncio.IncompleteReadError as error:
        raise ClientDied("a client process died; its error is above") from error
    assert isinstance(report, kinds), report
    return report


def total(reports: list[Progress]) -> Progress:
    return Progress(
        finished=sum(r.finished for r in reports),
        failed=sum(r.failed for r in reports),
        events=sum(r.events for r in reports),
        open=sum(r.open for r in reports),
    )
