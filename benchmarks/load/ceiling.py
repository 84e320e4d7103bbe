"""How much load the client itself can carry: `python -m benchmarks.load.ceiling`.

A fake server streams to it, first token by token at a given pace (each token its own packet, as from a real server),
then as fast as the sockets take it. The client's CPU time tells the tokens per second at which one client process
would be busy all the time, also where server and client share too few cores to get there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec

from benchmarks.load.fake import Behaviour, Fake
from penstock.services.bench.client import target
from penstock.services.bench.serve import run, summarize
from penstock.services.bench.workload import Workload


class Ceiling(msgspec.Struct, frozen=True):
    """What one run showed."""

    pace: str
    tokens_per_second: float
    tokens_per_cpu_second: float  # of a client process


async def measure(pace: str, tick: float, workload: Workload, processes: int) -> Ceiling:
    async with Fake(Behaviour(tick=tick)) as server:
        outcome = await run(target(server.url), workload, processes=processes)
    figures = summarize(outcome.records)
    assert not figures.failed, figures.errors
    tokens = figures.output_tokens
    return Ceiling(pace, figures.output_tokens_per_second, tokens / outcome.client_cpu_seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load.ceiling",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--processes", type=int, default=1, help="client processes")
    parser.add_argument("--concurrency", type=int, default=64, help="open requests, of all processes")
    parser.add_argument("--tokens", type=int, default=256, help="of each request")
    parser.add_argument("--tick", type=float, default=0.01, help="seconds between two tokens of a paced request")
    options = parser.parse_args(arguments)
    workload = Workload(requests=2 * options.concurrency, concurrency=options.concurrency, warmup=0,
                        output=(options.tokens, options.tokens))  # fmt: skip
    for pace, tick in (("paced", options.tick), ("flood", 0.0)):
        found = asyncio.run(measure(pace, tick, workload, options.processes))
        print(f"{found.pace}: {found.tokens_per_second:,.0f} tokens/s offered;"
              f" {found.tokens_per_cpu_second:,.0f} tokens per second of client CPU", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
