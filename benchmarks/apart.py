"""Prompts and outputs on different GPUs, beside two replicas that do both: `python -m benchmarks.apart`, two GPUs, 8B.

Requests of 8,192 tokens in and 256 out arrive at random, at several rates, over HTTP with streaming. Three servers run
one after the other: two mixed replicas, the same with steps of 2,048 tokens, which bounds what a prompt costs streams,
and one prefill replica with one that decodes. All get the same requests at the same moments.

`--smoke` does the same with the embedded model on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import select
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.h200 import CLIENTS, VOCAB_MARGIN, device
from benchmarks.rendered import table
from benchmarks.samples import scrape, total
from benchmarks.server import Server, serving
from benchmarks.shapes import SHAPES, SMOKE, Shape, make_folder
from penstock.services.bench.client import target
from penstock.services.bench.serve import Distribution, run, summarize
from penstock.services.bench.workload import Workload

RESULTS = report.ROOT / "benchmarks" / "results" / "h200" / "apart.json"
READY_LIMIT = 120.0  # seconds until all replicas serve, once the first one does
REQUEST_LIMIT = 60.0
SETTLE = 2.5  # seconds: metrics are taken once a second
MAPPED = " prefill_memory "  # what an executor logs


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the loads."""

    prompt: int = 8192  # tokens
    output: int = 256
    rates: tuple[float, ...] = (1.0, 2.0, 3.5)  # requests a second
    seconds: float = 20.0  # of arrivals at each rate
    host_memory: int = 24 << 30  # bytes of each executor
    chunk: int = 2048  # tokens of a step


SMALL = Sizes(prompt=200, output=20, rates=(2.0,), seconds=3.0, host_memory=1 << 28, chunk=64)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one rate."""

    server: str
    rate: float
    requests: int
    failed: int
    ttft_ms: Distribution | None
    gap_ms: Distribution | None  # between tokens of a stream
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    output_tokens_per_second: float
    handovers: int = 0  # requests that a prefill replica handed over
    transfers: int = 0  # those whose blocks were copied
    stale: int = 0
    handover_ms: float = 0.0  # mean of copies out, where those to the other GPU began behind them
    transfer_ms: float = 0.0  # mean, from then on, or from the first token on, until the blocks are on the other GPU


def servers(sizes: Sizes) -> Mapping[str, tuple[str, ...]]:
    """Options of each server beside those that all have."""
    return {
        "mixed": (),
        f"mixed, steps of {sizes.chunk:,}": ("--max-num-batched-tokens", str(sizes.chunk)),
        "1 + 1": (
            *("--prefill-replicas", "1", "--kv-host-memory", str(sizes.host_memory)),
            *("--max-local-prefill-length", str(sizes.prompt // 16)),
        ),
    }


def health(server: Server) -> Any:
    with urllib.request.urlopen(f"{server.url}/health", timeout=10) as answer:
        return json.load(answer)


def wait_for_all(server: Server, *, mapped: bool) -> None:
    """Until each replica serves, and those that decode can read the others' memory. Raises TimeoutError."""
    deadline = time.monotonic() + READY_LIMIT
    while health(server)["degraded"] or (mapped and not server.logged(MAPPED)):
        if time.monotonic() >= deadline:
            raise TimeoutError(server.tail())
        select.select([], [], [], 0.2)


def load(sizes: Sizes, shape: Shape, rate: float) -> Workload:
    lengths = {"input": (sizes.prompt, sizes.prompt), "output": (sizes.output, sizes.output)}
    return Workload(
        name=f"apart-{rate:g}", requests=max(4, round(rate * sizes.seconds)), rate=rate, warmup=4, warmup_output=8,
        vocab=int(VOCAB_MARGIN * shape.vocab), **lengths,
    )  # fmt: skip


def counters(server: Server) -> dict[str, float]:
    names = (
        "engine_handovers_total", "engine_transfers_total", "engine_stale_transfers_total",
        "engine_transfer_seconds_sum",
    )  # fmt: skip
    found = scrape(server.url)
    return {name: total(found, name) for name in names}


async def measure(server: Server, name: str, sizes: Sizes, shape: Shape, rate: float) -> Figures:
    where, workload = target(server.url), load(sizes, shape, rate)
    await run(where, workload, warmup=True, timeout=REQUEST_LIMIT)
    await asyncio.sleep(SETTLE)
    before = counters(server)
    outcome = await run(where, workload, processes=CLIENTS, timeout=REQUEST_LIMIT)
    await asyncio.sleep(SETTLE)
    summary, after = summarize(outcome.records), counters(server)
    grown = {key: after[key] - value for key, value in before.items()}
    for kind, count in summary.errors.items():
        print(f"  {count} x {kind}: {summary.error_examples.get(kind, '')}", flush=True)
    handovers, transfers = int(grown["engine_handovers_total"]), int(grown["engine_transfers_total"])
    return Figures(
        server=name, rate=rate, requests=summary.requests, failed=summary.failed, ttft_ms=summary.ttft_ms,
        gap_ms=summary.itl_ms, tpot_ms=summary.tpot_ms, e2e_ms=summary.e2e_ms,
        output_tokens_per_second=summary.output_tokens_per_second, handovers=handovers, transfers=transfers,
        stale=int(grown["engine_stale_transfers_total"]),
        transfer_ms=round(1000 * grown["engine_transfer_seconds_sum"] / max(1, transfers), 2),
    )  # fmt: skip


def figures_table(found: Sequence[Figures]) -> str:
    """Rows by rate, then by server."""
    heads = ["requests/s", "two H200", "gap p50, ms", "p99", "longest", "first token p50, ms", "p99", "tok/s",
             "copies, ms"]  # fmt: skip
    lines = []
    for one in sorted(found, key=lambda one: one.rate):
        gap, first = one.gap_ms, one.ttft_ms
        if gap is None or first is None:
            continue
        copies = [f"{seconds:.0f}" for seconds in (one.handover_ms, one.transfer_ms) if seconds]
        lines.append(
            [
                f"{one.rate:g}",
                one.server,
                f"{gap.p50:.1f}",
                f"{gap.p99:.1f}",
                f"{gap.max:.0f}",
                f"{first.p50:,.0f}",
                f"{first.p99:,.0f}",
                f"{one.output_tokens_per_second:,.0f}",
                " + ".join(copies),
            ]
        )
    return table(heads, lines)


def words_of(folder: Path, sizes: Sizes, *, smoke: bool) -> list[str]:
    """Options of all servers."""
    words = [str(folder), "--load-format", "dummy", "--data-parallel-size", "2", "--max-model-len",
             str(sizes.prompt + sizes.output)]  # fmt: skip
    if smoke:
        return [*words, "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--cpu-threads", "1"]
    return [*words, "--gpu-memory-utilization", "0.90"]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.apart", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    found.add_argument("--smoke", action="store_true", help="the embedded model on a CPU, in small")
    found.add_argument("--rates", default="", help="requests a second, with commas between; empty: 1, 2 and 3.5")
    found.add_argument("--seconds", type=float, default=0.0, help="of arrivals at each rate; 0: 20")
    found.add_argument("--server-args", default="", help="further arguments of every server, in one word")
    found.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the figures")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    return found


def sizes_of(options: argparse.Namespace) -> Sizes:
    sizes = SMALL if options.smoke else Sizes()
    if options.rates:
        sizes = msgspec.structs.replace(sizes, rates=tuple(float(rate) for rate in options.rates.split(",")))
    return msgspec.structs.replace(sizes, seconds=options.seconds or sizes.seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    shape, sizes = SMOKE if options.smoke else SHAPES[options.shape], sizes_of(options)
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="penstock-apart-") as place:
        folder = make_folder(shape, Path(place))
        common = [*words_of(folder, sizes, smoke=options.smoke), *shlex.split(options.server_args)]
        for name, words in servers(sizes).items():
            print(shlex.join([*common, *words]), flush=True)
            with serving([*common, *words]) as server:
                wait_for_all(server, mapped="--prefill-replicas" in words)
                chip = device(server)
                for rate in sizes.rates:
                    found.append(asyncio.run(measure(server, name, sizes, shape, rate)))
                    print(figures_table(found[-1:]).splitlines()[-1], flush=True)
                    results = {"chip": chip, "server_arguments": shlex.join(common[1:]), "sizes": sizes,
                               "figures": found}  # fmt: skip
                    report.write(options.output, "apart", results, arguments, options.commit)
    print(figures_table(found), flush=True)
    return int(any(one.failed for one in found))


if __name__ == "__main__":
    sys.exit(main())
