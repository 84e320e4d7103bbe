"""One client process: `python -m penstock.services.bench.worker`, started by benchmarks/serve.py.

Frames (4 bytes of length, then msgpack) come on standard input: the `Job`, then the start time. Frames go out on
standard output: `Ready`, `Progress` a few times a second, and `Finished`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from typing import Any, BinaryIO

import msgspec
import uvloop

from penstock.services.bench.client import Load, Record, Target
from penstock.services.bench.workload import Workload, requests

INTERVAL = 0.25  # seconds between two progress frames


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a client process has to do: its share of a workload."""

    target: Target
    workload: Workload
    model: str
    extra: dict[str, Any]
    timeout: float
    worker: int
    workers: int
    warmup: bool

    @property
    def concurrency(self) -> int:
        """This process's share of the open requests; 0 is without a limit."""
        total = self.workload.concurrency
        if self.workload.rate and not total:
            return 0
        return (total or 1) // self.workers + (self.worker < (total or 1) % self.workers)


class Go(msgspec.Struct, frozen=True, tag=True):
    start: float  # monotonic seconds


class Ready(msgspec.Struct, frozen=True, tag=True):
    requests: int


class Progress(msgspec.Struct, frozen=True, tag=True):
    finished: int
    failed: int
    events: int
    open: int


class Finished(msgspec.Struct, frozen=True, tag=True):
    records: tuple[Record, ...]
    cpu_seconds: float


Report = Ready | Progress | Finished


def frame(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(4, "little") + payload


def say(message: Report) -> None:
    sys.stdout.buffer.write(frame(message))
    sys.stdout.buffer.flush()


def read_frame(stream: BinaryIO) -> bytes:
    size = int.from_bytes(stream.read(4), "little")
    return stream.read(size)


async def work(job: Job) -> None:
    load = Load(job.target, job.workload.endpoint, job.timeout)
    share = list(requests(job.workload, job.model, warmup=job.warmup, extra=job.extra, worker=job.worker,
                          workers=job.workers))  # fmt: skip
    await load.connect(min(job.concurrency, len(share)))
    say(Ready(len(share)))
    start = msgspec.msgpack.decode(await asyncio.to_thread(read_frame, sys.stdin.buffer), type=Go).start
    gc.collect()
    gc.freeze()
    gc.disable()
    cpu = time.process_time()
    reporter = asyncio.create_task(report(load))
    await load.run(share, job.concurrency, start)
    cpu = time.process_time() - cpu
    reporter.cancel()
    load.close()
    say(Finished(tuple(load.records), cpu))


async def report(load: Load) -> None:
    while True:
        await asyncio.sleep(INTERVAL)
        failed = sum(bool(record.error) for record in load.records)
        say(Progress(len(load.records), failed, load.tally.events, load.open))


if __name__ == "__main__":
    uvloop.run(work(msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=Job)))
