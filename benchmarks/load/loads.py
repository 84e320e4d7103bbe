"""Loads of one server under measurement, one after the other or beside streams, and the errors of all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.server import Server
from penstock.services.bench.client import Load, target
from penstock.services.bench.serve import Summary, summarize
from penstock.services.bench.workload import Request


class Loads:
    """Errors are printed as they come, and counted by kind. limit: seconds that a request may take."""

    def __init__(self, server: Server, endpoint: str, limit: float) -> None:
        self.errors: dict[str, int] = {}
        self._where, self._endpoint, self._limit = target(server.url), endpoint, limit

    async def run(self, requests: Sequence[Request], concurrency: int) -> Summary:
        """What came of requests that are sent from now on. concurrency: how many at once; 0: each when it is due."""
        load = Load(self._where, self._endpoint, self._limit)
        await load.connect(min(concurrency or len(requests), len(requests)))
        await load.run(requests, concurrency, time.monotonic() + 0.05)
        load.close()
        summary = summarize(load.records)
        for kind, count in summary.errors.items():
            self.errors[kind] = self.errors.get(kind, 0) + count
            print(f"  {count} x {kind}: {summary.error_examples.get(kind, '')}", flush=True)
        return summary

    async def streams(self, streams: Sequence[Request], beside: Sequence[Request]) -> Summary:
        """What came of streams, all at once, while other requests come; what is left of these is not waited for."""
        running = asyncio.create_task(self.run(streams, len(streams)))
        coming = asyncio.create_task(self.run(beside, 0)) if beside else None
        summary = await running
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        return summary


def median_ttft(summary: Summary) -> float:
    """Milliseconds; 0 where no request has completed."""
    return summary.ttft_ms.p50 if summary.ttft_ms else 0.0


def price(beside: float, alone: float) -> float:
    """Percent by which something takes longer beside other load."""
    return round(100 * (beside / alone - 1), 2) if alone else 0.0
