"""Penstock on this machine's CPU beside transformers' `generate`: `python -m benchmarks.cpu_embedded`.

Starts `penstock serve` on a free port and gives it the same load at each concurrency; then `generate` gets the same
prompts in a process of its own, in each of `--generate-dtypes`, of which the faster counts for each row. Both are asked
in turns, with fresh prompts each turn, on as many threads. Prints a table and writes benchmarks/results. No two prompts
share a beginning; a run with hits in the prefix cache writes nothing. `--shape 0.6b` has random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.generate_baseline import Figures
from benchmarks.report import ROOT
from benchmarks.server import serving
from benchmarks.shapes import SHAPES, make_folder
from penstock.engine_core import folder
from penstock.engine_core.models.spec import read_spec
from penstock.services.bench.client import target
from penstock.services.bench.serve import HEADING, Result, length, line, measure, read_model_info
from penstock.services.bench.workload import Workload

RESULTS = ROOT / "benchmarks" / "results" / "cpu_embedded.json"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One load: the server and `generate`, and how many times as many tokens per second the server gives.

    `ratio` is against `generate` with the requests in static batches of that concurrency; `ratio_alone` against
    `generate` called for one request after the other, which is what it does for requests that come by themselves. All
    are of the turn with the middle ratio.
    """

    name: str
    concurrency: int
    penstock: Result
    generate: Figures
    ratio: float
    ratio_alone: float
    turns: list[float] = []  # the ratio of each turn


def generate(model: Path, workloads: Sequence[Workload], threads: int, dtype: str) -> list[Figures]:
    """The baseline in a process of its own, so that neither side's memory or threads are the other's."""
    command = [sys.executable, "-m", "benchmarks.generate_baseline", str(model), "--workloads", "-", "--json",
               "--threads", str(threads), "--dtype", dtype]  # fmt: skip
    text = msgspec.json.encode(workloads)
    done = subprocess.run(command, cwd=ROOT, input=text, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Figures])


async def serve_all(url: str, workloads: Sequence[Workload]) -> list[Result]:
    where = target(url)
    model = read_model_info(url)
    results = []
    for workload in workloads:
        results.append(await measure(where, workload, model=model))
        print(line(results[-1]), flush=True)
    return results


def plan(options: argparse.Namespace, vocab: int) -> list[Workload]:
    """The same lengths at each concurrency, enough requests that each runs for some seconds; then mixed lengths at the
    largest, as real requests have them. The first is of one request at a time.
    """
    levels = sorted({1, *map(int, options.concurrency.split(","))})
    fixed = [
        Workload(name=f"c{c}", concurrency=c, requests=max(c * options.rounds, options.least), input=options.input,
                 output=options.output_tokens, vocab=vocab, warmup=c)
        for c in levels
    ]  # fmt: skip
    around = [(max(1, low // 8), 2 * high - max(1, low // 8)) for low, high in (options.input, options.output_tokens)]
    mixed = msgspec.structs.replace(fixed[-1], name=f"mixed c{levels[-1]}", input=around[0], output=around[1])
    return [*fixed, mixed]


def faster(baselines: Sequence[Sequence[Figures]]) -> list[Figures]:
    """Of each row the fastest."""
    return [max(row, key=lambda found: found.output_tokens_per_second) for row in zip(*baselines, strict=True)]


def middle(turns: Sequence[Sequence[Comparison]]) -> list[Comparison]:
    """Of each row the turn with the middle ratio, the lower of two."""
    found = []
    for row in zip(*turns, strict=True):
        ordered = sorted(row, key=lambda one: one.ratio)
        chosen = ordered[(len(ordered) - 1) // 2]
        found.append(msgspec.structs.replace(chosen, turns=[one.ratio for one in row]))
    return found


def compare(served: Sequence[Result], baseline: Sequence[Figures]) -> list[Comparison]:
    """Side by side; the first load is of one request at a time."""
    alone = baseline[0].output_tokens_per_second
    return [
        Comparison(
            name=result.workload.name, concurrency=result.workload.concurrency, penstock=result, generate=figures,
            ratio=round(result.summary.output_tokens_per_second / figures.output_tokens_per_second, 3),
            ratio_alone=round(result.summary.output_tokens_per_second / alone, 3),
        )
        for result, figures in zip(served, baseline, strict=True)
    ]  # fmt: skip


def cached_tokens(served: Sequence[Result]) -> dict[str, int]:
    """Prompt tokens that the prefix cache gave to each load."""
    return {result.workload.name: result.summary.cached_tokens for result in served}


def table(comparisons: Sequence[Comparison]) -> str:
    heads = ("Penstock", "generate", "ratio", "one by one", "ttft p50", "tpot p50")
    rows = ["{:12} {:>10} {:>10} {:>7} {:>11} {:>11} {:>11}".format("tok/s", *heads)]
    for c in comparisons:
        s = c.penstock.summary
        assert s.ttft_ms is not None
        assert s.tpot_ms is not None
        rates = f"{s.output_tokens_per_second:10,.0f} {c.generate.output_tokens_per_second:10,.0f}"
        times = f"{s.ttft_ms.p50:8.1f} ms {s.tpot_ms.p50:8.2f} ms"
        rows.append(f"{c.name:12} {rates} {c.ratio:6.2f}x {c.ratio_alone:10.2f}x {times}")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_embedded",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--model", default="", help="folder; empty: the embedded model")
    parser.add_argument("--shape", default="", choices=sorted(SHAPES), help="random weights of this shape instead")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--concurrency", default="1,16,64", help="with commas")
    parser.add_argument("--input", type=length, default="128", metavar="N|LOW:HIGH", help="prompt tokens")
    parser.add_argument("--output-tokens", type=length, default="128", metavar="N|LOW:HIGH", help="new tokens")
    parser.add_argument("--rounds", type=int, default=2, help="requests per open request")
    parser.add_argument("--least", type=int, default=8, help="fewest requests of a row")
    parser.add_argument("--threads", type=int, default=0, help="torch threads of both sides; 0: each side's default")
    parser.add_argument("--dtype", default="auto", help="of the server")
    parser.add_argument("--generate-dtypes", default="float32,bfloat16", help="with commas")
    parser.add_argument("--serve-arguments", default="", help="further arguments of penstock serve")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is ended, too
    with tempfile.TemporaryDirectory(prefix="penstock-cpu-") as place:
        path = make_folder(SHAPES[options.shape], Path(place)) if options.shape else folder.resolve(options.model)
        return against(path, options, arguments)


def against(path: Path, options: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    """Measure one model and write the file. Returns the exit code."""
    workloads = plan(options, read_spec(path).vocab_size)
    extra = ["--cpu-threads", str(options.threads), "--dtype", options.dtype, "--device", "cpu",
             *(["--load-format", "dummy"] if options.shape else []), *options.serve_arguments.split()]  # fmt: skip
    print(HEADING, flush=True)
    turns: list[list[Comparison]] = []
    with serving([*([str(path)] if options.model or options.shape else []), *extra]) as server:
        for turn in range(options.turns):
            loads = [msgspec.structs.replace(workload, seed=turn) for workload in workloads]
            served = asyncio.run(serve_all(server.url, loads))
            if any((cached := cached_tokens(served)).values()):
                print(f"nothing is written: prompts were found in the prefix cache, {cached} tokens", file=sys.stderr)
                return 1
            kinds = options.generate_dtypes.split(",")
            baselines = [generate(path, loads, options.threads, kind) for kind in kinds]
            turns.append(compare(served, faster(baselines)))
    comparisons = middle(turns)
    print(table(comparisons))
    title = f"{SHAPES[options.shape].title}, random weights" if options.shape else "embedded"
    report.write(options.output, "cpu_embedded", {
        "model": read_spec(path).family + ("" if options.model else f" ({title})"), "threads": options.threads,
        "cache": "prompts share nothing", "cached_tokens": cached, "start_seconds": round(server.seconds, 2),
        "serve_arguments": extra,
        "comparisons": comparisons,
    }, arguments)  # fmt: skip
    return int(any(comparison.penstock.summary.failed for comparison in comparisons))


if __name__ == "__main__":
    sys.exit(main())
