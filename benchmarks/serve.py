"""Load generator for any OpenAI-compatible server: `python -m benchmarks.serve --base-url http://localhost:8000`.

Workloads are rows of benchmarks/load/workload.py (`--rows bs64,decode_c256` or `--rows all`) or made of options.
Results go to standard output as a table and with `--output` to a JSON file. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import http.client
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load.client import Target, target
from benchmarks.load.progress import Meter
from benchmarks.load.run import ROOT, run
from benchmarks.load.summary import Spread, Summary, summarize
from benchmarks.load.workload import FREE, ROWS, Variant, Workload


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One workload's figures: of all requests, and of each variant where there are several."""

    workload: Workload
    summary: Summary
    variants: dict[str, Summary]
    processes: int
    client_cpu_seconds: float


async def measure(where: Target, workload: Workload, *, model: str = "", extra: Mapping[str, Any] | None = None,
                  processes: int = 1, timeout: float = 600.0) -> Result:  # fmt: skip
    """Warm the server up, run the workload once, and return its figures."""
    if workload.warmup:
        warm = msgspec.structs.replace(workload, rate=0.0, concurrency=workload.concurrency or workload.warmup)
        await run(where, warm, model=model, extra=extra, processes=processes, timeout=timeout, warmup=True)
    with Meter(workload.name, workload.requests) as meter:
        outcome = await run(where, workload, model=model, extra=extra, processes=processes, timeout=timeout,
                            watch=meter.show)  # fmt: skip
    names = [variant.name for variant in workload.variants]
    parts = {name: summarize([r for r in outcome.records if r.variant == n]) for n, name in enumerate(names)}
    return Result(
        workload=workload,
        summary=summarize(outcome.records),
        variants=parts if len(parts) > 1 else {},
        processes=processes,
        client_cpu_seconds=round(outcome.client_cpu_seconds, 3),
    )


def served_model(where: Target) -> str:
    """The first model that the server lists; empty if it lists none, for servers that need no name."""
    connection = http.client.HTTPConnection(where.host, where.port, timeout=30)
    try:
        headers = {"Authorization": f"Bearer {where.api_key}"} if where.api_key else {}
        connection.request("GET", f"{where.path}/v1/models", headers=headers)
        answer = connection.getresponse()
        found = json.loads(answer.read()).get("data") if answer.status == 200 else None
    finally:
        connection.close()
    return str(found[0]["id"]) if found else ""


def commit() -> str:
    """The commit of this tree, with a plus if it was changed since; empty in an export."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")


def machine() -> dict[str, Any]:
    """What the figures were measured on, as far as this side knows."""
    return {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0))}  # fmt: skip


def line(result: Result) -> str:
    """One row of the table."""
    def cell(spread: Spread | None) -> str:
        return f"{spread.p50:8.2f} {spread.p99:8.2f}" if spread else f"{'-':>8} {'-':>8}"

    s = result.summary
    return (f"{result.workload.name:16} {s.completed:5} {s.failed:5} {s.output_tokens_per_second:10,.0f}"
            f" {s.total_tokens_per_second:10,.0f} {cell(s.ttft_ms)} {cell(s.tpot_ms)} {cell(s.itl_ms)}"
            f" {cell(s.e2e_ms)}")  # fmt: skip


HEADING = (
    f"{'':16} {'done':>5} {'fail':>5} {'out tok/s':>10} {'all tok/s':>10} {'ttft p50':>8} {'p99':>8} {'tpot p50':>8}"
    f" {'p99':>8} {'itl p50':>8} {'p99':>8} {'e2e p50':>8} {'p99':>8}   (ms)"
)


def length(text: str) -> tuple[int, int]:
    """`128`, or a range such as `100:1024`."""
    low, _, high = text.partition(":")
    ends = int(low), int(high or low)
    if not 0 < ends[0] <= ends[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no length or range LOW:HIGH")
    return ends


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    server = found.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", help="with or without /v1; plain http")
    server.add_argument("--model", default="", help="empty: the first that the server lists")
    server.add_argument("--api-key", default="", help="sent as bearer token")
    server.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="chat takes text")
    server.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="further fields")
    load = found.add_argument_group("workload")
    load.add_argument("--rows", default="", help="published rows with commas, or all; lengths are then fixed")
    load.add_argument("--requests", type=int, default=64)
    load.add_argument("--concurrency", type=int, default=0, help="open requests; 0: 16, or no cap with --rate")
    load.add_argument("--rate", type=float, default=0.0, help="requests per second, Poisson; 0: a closed loop")
    load.add_argument("--input", type=length, default="128", metavar="N|LOW:HIGH", help="prompt tokens")
    load.add_argument("--output-tokens", type=length, default="128", metavar="N|LOW:HIGH", help="max_tokens")
    load.add_argument("--prefix", type=int, default=0, help="tokens of a shared prefix")
    load.add_argument("--prefixes", type=int, default=1, help="different shared prefixes")
    load.add_argument("--text", action="store_true", help="prompts of words instead of token ids")
    load.add_argument("--vocab", type=int, default=1000, help="random token ids are below")
    load.add_argument("--respect-eos", action="store_true", help="let the model end early")
    load.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    load.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    load.add_argument("--warmup", type=int, default=8, help="requests before the measured ones")
    client = found.add_argument_group("client")
    client.add_argument("--processes", type=int, default=1, help="client processes; 4 carry 60,000 tokens/s")
    client.add_argument("--timeout", type=float, default=600.0, help="seconds that a request may take")
    client.add_argument("--output", type=Path, help="JSON file for the results")
    client.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="recorded: chip=H200")
    return found


def workloads(options: argparse.Namespace) -> tuple[Workload, ...]:
    """The workloads that the options ask for. Raises ValueError for an unknown row."""
    if options.rows:
        rows = {row.name: row for row in ROWS}
        names = list(rows) if options.rows == "all" else options.rows.split(",")
        if unknown := [name for name in names if name not in rows]:
            raise ValueError(f"--rows: {unknown[0]!r} is not allowed; one of {', '.join(rows)}, or all")
        found = tuple(rows[name] for name in names)
    else:
        variant = Variant("all", {}) if options.extra_body else FREE
        found = (Workload(
            requests=options.requests, concurrency=options.concurrency or (0 if options.rate else 16),
            rate=options.rate, input=options.input, output=options.output_tokens, prefix=options.prefix,
            prefixes=options.prefixes, warmup=options.warmup, variants=(variant,),
        ),)  # fmt: skip
    return tuple(
        msgspec.structs.replace(
            row, endpoint=options.endpoint, text=options.text, vocab=options.vocab, seed=options.seed,
            ignore_eos=not options.respect_eos, temperature=options.temperature,
        )
        for row in found
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        where, rows = target(options.base_url, options.api_key), workloads(options)
        model = options.model or served_model(where)
    except (ValueError, OSError) as error:
        print(f"{options.base_url}: {error}", file=sys.stderr)
        return 2
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    print(HEADING, flush=True)
    results = []
    for row in rows:
        result = asyncio.run(
            measure(where, row, model=model, extra=options.extra_body, processes=options.processes,
                    timeout=options.timeout)
        )  # fmt: skip
        results.append(result)
        print(line(result), flush=True)
        for kind, count in result.summary.errors.items():
            print(f"  {count} × {kind} {result.summary.error_examples.get(kind, '')}", flush=True)
        if options.output:  # after each row: a long run that is cut short keeps what it has
            record = {
                "started": started, "model": model, "extra_body": options.extra_body, "commit": commit(),
                "client_machine": machine(), "labels": dict(label.split("=", 1) for label in options.label),
                "results": results,
            }  # fmt: skip
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    return int(any(result.summary.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
