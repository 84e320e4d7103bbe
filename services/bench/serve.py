"""`penstock bench serve`: a load for any OpenAI-compatible server, and what became of it.

A server that runs is measured as it stands; else one is started for the measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.protocol.errors import ConfigError, LinkError
from penstock.services.bench.client import Target, target
from penstock.services.bench.run import ClientDied, run
from penstock.services.bench.summary import Spread, Summary, summarize
from penstock.services.bench.worker import Progress
from penstock.services.bench.workload import FREE, Variant, Workload
from penstock.services.commands import target as server
from penstock.services.commands.progress import Meter
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One workload's figures: of all requests, and of each variant where there are several."""

    workload: Workload
    summary: Summary
    variants: dict[str, Summary]
    processes: int
    client_cpu_seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server.add_arguments(parser)
    parser.add_argument("--name", default="", help="of the model; empty: the first that the server lists")
    add_load(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file for the result")


def add_load(parser: argparse.ArgumentParser, seed: str = "--load-seed") -> None:
    """The options of a load and of its client. `seed` is what that of its prompts is called."""
    load = parser.add_argument_group("workload")
    load.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="chat takes text")
    load.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="further fields of requests")
    load.add_argument("--requests", type=int, default=64, metavar="N", help="how many [default 64]")
    load.add_argument("--concurrency", type=int, default=0, metavar="N",
                      help="open requests; 0: 16, or no cap with --rate")  # fmt: skip
    load.add_argument("--rate", type=float, default=0.0, metavar="X",
                      help="requests per second, Poisson; 0: a closed loop")  # fmt: skip
    load.add_argument("--input", type=length, default="128", metavar="N|LOW:HIGH", help="prompt tokens [default 128]")
    load.add_argument("--output-tokens", type=length, default="128", metavar="N|LOW:HIGH",
                      help="max_tokens [default 128]")  # fmt: skip
    load.add_argument("--prefix", type=int, default=0, metavar="N", help="tokens of a shared prefix")
    load.add_argument("--prefixes", type=int, default=1, metavar="N", help="different shared prefixes")
    load.add_argument("--text", action="store_true", help="prompts of words instead of token ids")
    load.add_argument("--vocab", type=int, default=1000, metavar="N", help="random token ids are below [default 1000]")
    load.add_argument("--respect-eos", action="store_true", help="let the model end early")
    load.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy [default 0]")
    load.add_argument(seed, type=int, default=0, dest="load_seed", metavar="N", help="of prompts, lengths, arrivals")
    load.add_argument("--warmup", type=int, default=8, metavar="N", help="requests before the measured ones")
    client = parser.add_argument_group("client")
    client.add_argument("--processes", type=int, default=1, metavar="N",
                        help="client processes; 4 carry 60,000 tokens/s")  # fmt: skip
    client.add_argument("--timeout", type=float, default=600.0, metavar="X", help="seconds that a request may take")


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Measure once; 1 if a request failed. Raises ConfigError, LinkError and what a server failed to start with."""
    workload = workload_of(namespace)
    with server.reached(namespace, effective) as found:
        try:
            where = target(found.url, found.api_key)
            model = namespace.name or served_model(where)
            print(HEADING, flush=True)
            result = asyncio.run(
                measure(where, workload, model=model, extra=namespace.extra_body, processes=namespace.processes,
                        timeout=namespace.timeout)
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError("--url", found.url, str(error)) from error
        except (OSError, ClientDied) as error:
            raise LinkError(f"{found.url}: {error}") from error
    return told(result, namespace.output)


def told(result: Result, output: Path | None) -> int:
    """Print a result and write it; the exit code."""
    print(line(result), flush=True)
    for kind, count in result.summary.errors.items():
        print(f"  {count} × {kind} {result.summary.error_examples.get(kind, '')}", file=sys.stderr)
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return ExitCode.FAILED if result.summary.failed else ExitCode.ORDERLY


def workload_of(namespace: argparse.Namespace) -> Workload:
    """The load that the options describe."""
    variant = Variant("all", {}) if namespace.extra_body else FREE
    return Workload(
        requests=namespace.requests, concurrency=namespace.concurrency or (0 if namespace.rate else 16),
        rate=namespace.rate, input=namespace.input, output=namespace.output_tokens, prefix=namespace.prefix,
        prefixes=namespace.prefixes, warmup=namespace.warmup, variants=(variant,), **shared(namespace),
    )  # fmt: skip


def shared(namespace: argparse.Namespace) -> dict[str, Any]:
    """What options say of any load, a published row's too."""
    return {
        "endpoint": namespace.endpoint, "text": namespace.text, "vocab": namespace.vocab, "seed": namespace.load_seed,
        "ignore_eos": not namespace.respect_eos, "temperature": namespace.temperature,
    }  # fmt: skip


async def measure(where: Target, workload: Workload, *, model: str = "", extra: Mapping[str, Any] | None = None,
                  processes: int = 1, timeout: float = 600.0) -> Result:  # fmt: skip
    """Warm the server up, run the workload once, and return its figures."""
    if workload.warmup:
        warm = msgspec.structs.replace(workload, rate=0.0, concurrency=workload.concurrency or workload.warmup)
        await run(where, warm, model=model, extra=extra, processes=processes, timeout=timeout, warmup=True)
    with Meter(workload.name, workload.requests) as meter:

        def watch(report: Progress) -> None:
            meter.show(report.finished, said(report, time.monotonic() - meter.start))

        outcome = await run(where, workload, model=model, extra=extra, processes=processes, timeout=timeout,
                            watch=watch)  # fmt: skip
    names = [variant.name for variant in workload.variants]
    parts = {name: summarize([r for r in outcome.records if r.variant == n]) for n, name in enumerate(names)}
    return Result(
        workload=workload,
        summary=summarize(outcome.records),
        variants=parts if len(parts) > 1 else {},
        processes=processes,
        client_cpu_seconds=round(outcome.client_cpu_seconds, 3),
    )


def said(report: Progress, seconds: float) -> str:
    """How far a run is, in words."""
    failed = f", {report.failed} failed" if report.failed else ""
    return f"{report.open} open{failed}, {report.events / max(seconds, 1e-9):,.0f} tok/s so far"


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
