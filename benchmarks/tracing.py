"""What tracing costs: `python -m benchmarks.tracing`.

Servers with the load of decode_c256 (128 tokens in, 512 out, 256 streams) and an executor that only pretends to compute
(benchmarks/load/executor.py), in steps of no time: the host is the limit, so whatever tracing costs is lost. On a GPU
the host works beside the device, and only what does not fit there is. One server tells no traces, one those of 1 % of
its requests, one all; they stand side by side and get the load in turns, round after round, in another order each time.

What it costs without a server, which a busy machine disturbs less, is benchmarks/span_cost.py's to say.

Printed and written for each: CPU microseconds per output token by role, tokens per second, and both against the server
without traces: the median over rounds of the difference within a round.

On a GPU: `python -m benchmarks.tracing --h200 "MODEL OPTIONS"` gives the same load, in turns, to three of `penstock
serve` that share the GPU's memory: the options must leave each a third of it (`--kv-cache-memory`). Who has no load
does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks import report
from benchmarks.cpu_seconds import cpu_seconds
from benchmarks.host_ceiling import pipeline
from benchmarks.report import ROOT
from benchmarks.server import serving
from penstock.services.bench.client import target
from penstock.services.bench.serve import run, summarize
from penstock.services.bench.workload import Workload

SETTINGS: Mapping[str, float | None] = {"off": None, "1 %": 0.01, "100 %": 1.0}
ROLES = ("api", "tokenizer", "scheduler", "executor")
GOALS = {"1 %": 1.0, "100 %": 5.0}  # percent of throughput


class Measured(msgspec.Struct, frozen=True):
    """One load on one server."""

    setting: str
    round: int
    tokens: int
    tokens_per_second: float
    microseconds: dict[str, float]  # of CPU per output token, by role
    itl_p50_ms: float
    itl_p99_ms: float


class Cost(msgspec.Struct, frozen=True):
    """A setting against the server without traces, in percent; medians over rounds, and their range."""

    setting: str
    cpu: float
    cpu_range: tuple[float, float]
    by_role: dict[str, float]
    throughput: float  # that is lost
    throughput_range: tuple[float, float]


@contextmanager
def collecting() -> Iterator[str]:
    """The address of a collector that takes everything."""
    command = [sys.executable, "-m", "benchmarks.load.collector", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        told, _ = process.communicate()
        print(f"the collector took {told.strip()}", flush=True)


def variables(setting: str, url: str) -> dict[str, str]:
    """What has a server tell this share of its traces."""
    ratio = SETTINGS[setting]
    if ratio is None:
        return {}
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(ratio)}  # fmt: skip


@contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
    """For the processes that are started inside."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Place(NamedTuple):
    """A server."""

    url: str
    starter: int  # pid of the process that started the server's


def measure(setting: str, number: int, place: Place, workload: Workload, clients: int) -> Measured:
    """Give the load to one server."""
    before = cpu_seconds(place.starter)
    outcome = asyncio.run(run(target(place.url), workload, processes=clients))
    after = cpu_seconds(place.starter)
    summary = summarize(outcome.records)
    assert not summary.failed, summary.errors
    assert summary.itl_ms is not None
    spent = {
        role: 1e6 * (after[role] - before.get(role, 0.0)) / summary.output_tokens for role in ROLES if role in after
    }
    return Measured(
        setting, number, summary.output_tokens, round(summary.output_tokens_per_second, 1),
        {role: round(value, 3) for role, value in spent.items()},
        round(summary.itl_ms.p50, 3), round(summary.itl_ms.p99, 3),
    )  # fmt: skip


def costs(measured: Sequence[Measured]) -> list[Cost]:
    """Each setting's cost, from differences within rounds: what else the machine does weighs on all of one alike."""
    by_round: dict[int, dict[str, Measured]] = {}
    for one in measured:
        by_round.setdefault(one.round, {})[one.setting] = one
    whole = [found for found in by_round.values() if len(found) == len(SETTINGS)]
    found = []
    for setting in GOALS:
        pairs = [(each["off"], each[setting]) for each in whole]
        cpu = [percent(sum(b.microseconds.values()), sum(a.microseconds.values())) for a, b in pairs]
        roles = {
            role: round(statistics.median([percent(b.microseconds[role], a.microseconds[role]) for a, b in pairs]), 2)
            for role in pairs[0][0].microseconds
        }
        lost = [-percent(b.tokens_per_second, a.tokens_per_second) for a, b in pairs]
        found.append(Cost(setting, round(statistics.median(cpu), 2), spread(cpu), roles,
                          round(statistics.median(lost), 2), spread(lost)))  # fmt: skip
    return found


def percent(value: float, than: float) -> float:
    """How much more it is."""
    return 100 * (value / than - 1)


def spread(values: Sequence[float]) -> tuple[float, float]:
    return round(min(values), 2), round(max(values), 2)


def text(cost: Cost) -> str:
    roles = ", ".join(f"{role} {value:+.1f} %" for role, value in cost.by_role.items())
    return (f"{cost.setting:>6}: CPU per token {cost.cpu:+.2f} % ({cost.cpu_range[0]:+.1f} to {cost.cpu_range[1]:+.1f};"
            f" {roles}), throughput lost {cost.throughput:.2f} % ({cost.throughput_range[0]:.1f} to"
            f" {cost.throughput_range[1]:.1f}; goal {GOALS[cost.setting]:g})")  # fmt: skip


@contextmanager
def server(setting: str, collector: str, options: argparse.Namespace) -> Iterator[Place]:
    """One server of this setting."""
    given = variables(setting, collector)
    if options.h200:
        with serving(shlex.split(options.h200), given) as found:
            yield Place(found.url, found.pid)
        return
    with contextlib.ExitStack() as stack:
        with environment(given):
            url = stack.enter_context(pipeline(options.step / 1000, options))
        yield Place(url, os.getpid())


def rounds(options: argparse.Namespace) -> list[Measured]:
    """All loads, each round in another order."""
    size = options.concurrency
    workload = Workload(name="decode_c256", requests=size, concurrency=size, input=(options.prompt, options.prompt),
                        output=(options.tokens, options.tokens), vocab=options.vocab, warmup=0)  # fmt: skip
    warm = msgspec.structs.replace(workload, output=(8, 8), seed=1)
    names = list(SETTINGS)
    measured: list[Measured] = []
    with collecting() as collector, ExitStack() as stack:
        places = {name: stack.enter_context(server(name, collector, options)) for name in names}
        for place in places.values():
            asyncio.run(run(target(place.url), warm, processes=options.clients))
        for number in range(options.rounds):
            for setting in names[number % len(names) :] + names[: number % len(names)]:
                seeded = msgspec.structs.replace(workload, seed=number + 2)
                measured.append(measure(setting, number, places[setting], seeded, options.clients))
                print(f"round {number}, {setting}: {measured[-1].tokens_per_second:,.0f} tok/s,"
                      f" {sum(measured[-1].microseconds.values()):.2f} µs of CPU a token", flush=True)  # fmt: skip
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__.partition("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=256, help="streams")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--step", type=float, default=0.0, help="milliseconds of a pretended step")
    parser.add_argument("--vocab", type=int, default=90000, help="ids of prompts are below")
    parser.add_argument("--shape", default="0.6b", help="of the pretended model (benchmarks/shapes.py)")
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--apis", type=int, default=1, help="api processes")
    parser.add_argument("--tokenizers", type=int, default=1, help="tokenizer processes")
    parser.add_argument("--h200", default="", metavar="ARGUMENTS", help="serve this for real, on a GPU")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    measured = rounds(options)
    found = costs(measured)
    print("\n".join(map(text, found)))
    if options.output:
        limit = "the device's" if options.h200 else "the host's, with an executor that only pretends to compute"
        results = {"limit": limit, "load": "decode_c256", "costs": found, "measured": measured}
        report.write(options.output, "tracing", results, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
