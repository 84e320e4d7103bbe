"""`penstock bench serve`: a load for any OpenAI-compatible server, and its figures.

A running server is measured as it is; without one, a server is started for the measurement.

- ttft: from sending a request (including a new connection where none was free) to its first token.
- tpot: (last token − first token) / (tokens − 1), one value per request.
- itl: time between consecutive chunks with tokens, over all requests; a server that merges tokens sends several in one
  chunk, see `tokens_per_chunk`.
- e2e: from sending a request to the end of its response.
- Rates are over the wall time from the first request sent to the last response ended. Failed requests only count as
  errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import ConfigError, LinkError, RequestError
from penstock.services.bench.client import Finished, Job, Progress, Target, target
from penstock.services.bench.workload import FREE, Record, Variant, Workload
from penstock.services.commands.client import Client, add_server_arguments, server_client
from penstock.services.commands.progress import ProgressBar
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

ROOT = Path(__file__).absolute().parents[3]  # the folder of the package
HEAD_START = 0.2  # seconds between the last process being ready and the first request
LINE = 1 << 30  # bytes of the longest line that a client process may send
Report = Progress | Finished
REPORT = msgspec.json.Decoder(Report)
Watch = Callable[[Progress], None]


class ClientDied(Exception):
    """A client process of the load generator ended without its results."""


class Outcome(msgspec.Struct, frozen=True):
    """The results of all client processes."""

    records: tuple[Record, ...]
    client_cpu_seconds: float  # of all processes together, during the load


class Distribution(msgspec.Struct, frozen=True):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    completed: int
    failed: int
    errors: dict[str, int]  # count by kind
    error_examples: dict[str, str]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    tokens_per_chunk: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one workload: over all requests, and per variant where there are several."""

    workload: Workload
    summary: Summary
    variants: dict[str, Summary]
    processes: int
    client_cpu_seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--name", default="", help="of the model; empty: the first that the server lists")
    add_load(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file for the result")


def add_load(parser: argparse.ArgumentParser, seed: str = "--load-seed") -> None:
    """The options of a load and its client. `seed` names the option for the seed of the prompts."""
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


def length(text: str) -> tuple[int, int]:
    """`128`, or a range such as `100:1024`."""
    low, _, high = text.partition(":")
    ends = int(low), int(high or low)
    if not 0 < ends[0] <= ends[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no length or range LOW:HIGH")
    return ends


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Measure once; 1 if a request failed. Raises ConfigError, LinkError, and the error of a server's failed start."""
    workload = workload_of(namespace)
    with server_client(namespace, effective) as client:
        url = namespace.url or client.url
        try:
            where = target(url, client.api_key)
            model = namespace.name or read_model_info(url, client.api_key)
            print(HEADING, flush=True)
            result = asyncio.run(
                measure(where, workload, model=model, extra=namespace.extra_body, processes=namespace.processes,
                        timeout=namespace.timeout)
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError("--url", url, str(error)) from error
        except (OSError, ClientDied) as error:
            raise LinkError(f"{url}: {error}") from error
    return conclude(result, namespace.output)


def conclude(result: Result, output: Path | None) -> int:
    """Print a result and write it; the exit code."""
    print(line(result), flush=True)
    for kind, count in result.summary.errors.items():
        print(f"  {count} × {kind} {result.summary.error_examples.get(kind, '')}", file=sys.stderr)
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return ExitCode.FAILED if result.summary.failed else ExitCode.ORDERLY


def workload_of(namespace: argparse.Namespace) -> Workload:
    variant = Variant("all", {}) if namespace.extra_body else FREE
    return Workload(
        requests=namespace.requests, concurrency=namespace.concurrency or (0 if namespace.rate else 16),
        rate=namespace.rate, input=namespace.input, output=namespace.output_tokens, prefix=namespace.prefix,
        prefixes=namespace.prefixes, warmup=namespace.warmup, variants=(variant,), **shared(namespace),
    )  # fmt: skip


def shared(namespace: argparse.Namespace) -> dict[str, Any]:
    """The options that hold for any load, including a published row."""
    return {
        "endpoint": namespace.endpoint, "text": namespace.text, "vocab": namespace.vocab, "seed": namespace.load_seed,
        "ignore_eos": not namespace.respect_eos, "temperature": namespace.temperature,
    }  # fmt: skip


def read_model_info(base_url: str, api_key: str = "") -> str:
    """The first model that the server lists; empty if it lists none, for servers that need no name."""
    try:
        return Client(base_url, api_key).model()
    except RequestError:
        return ""


async def measure(where: Target, workload: Workload, *, model: str = "", extra: Mapping[str, Any] | None = None,
                  processes: int = 1, timeout: float = 600.0) -> Result:  # fmt: skip
    """Warm the server up, run the workload once, and return its figures."""
    if workload.warmup:
        warm = msgspec.structs.replace(workload, rate=0.0, concurrency=workload.concurrency or workload.warmup)
        await run(where, warm, model=model, extra=extra, processes=processes, timeout=timeout, warmup=True)
    with ProgressBar(workload.name, workload.requests) as progress:

        def watch(report: Progress) -> None:
            progress.show(report.finished, described(report, time.monotonic() - progress.start))

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
            clients.append(await start(stack))
            await send(clients[-1], msgspec.json.encode(job))
        latest = [Progress()] * workers
        for client in clients:
            await receive(client)
        go = b"%r" % (time.monotonic() + HEAD_START)
        for client in clients:
            await send(client, go)

        async def follow(worker: int) -> Finished:
            while not isinstance(report := await receive(clients[worker]), Finished):
                latest[worker] = report
                if watch is not None:
                    watch(total(latest))
            return report

        done = await asyncio.gather(*map(follow, range(workers)))
    records = sorted((record for finished in done for record in finished.records), key=lambda r: r.index)
    return Outcome(tuple(records), sum(finished.cpu_seconds for finished in done))


async def start(stack: AsyncExitStack) -> asyncio.subprocess.Process:
    """A client process, which ends with the stack at the latest."""
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.services.bench.client", cwd=ROOT, limit=LINE,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip

    async def end() -> None:
        if client.returncode is None:
            client.terminate()
        await client.wait()

    stack.push_async_callback(end)
    return client


async def send(client: asyncio.subprocess.Process, text: bytes) -> None:
    assert client.stdin is not None
    client.stdin.write(text + b"\n")
    await client.stdin.drain()


async def receive(client: asyncio.subprocess.Process) -> Report:
    assert client.stdout is not None
    text = await client.stdout.readline()
    if not text.endswith(b"\n"):
        raise ClientDied("a client process died; its error is above")
    report: Report = REPORT.decode(text)
    return report


def total(reports: Sequence[Progress]) -> Progress:
    return Progress(
        finished=sum(r.finished for r in reports),
        failed=sum(r.failed for r in reports),
        events=sum(r.events for r in reports),
        open=sum(r.open for r in reports),
    )


def described(report: Progress, seconds: float) -> str:
    failed = f", {report.failed} failed" if report.failed else ""
    return f"{report.open} open{failed}, {report.events / max(seconds, 1e-9):,.0f} tok/s so far"


def distribution(seconds: npt.NDArray[np.float64]) -> Distribution | None:
    """Durations in milliseconds; None without any."""
    if not seconds.size:
        return None
    figures = seconds.mean(), *np.percentile(seconds, (50, 90, 99)), seconds.max()
    return Distribution(*(round(float(figure) * 1000, 4) for figure in figures))


def summarize(records: Sequence[Record]) -> Summary:
    """The published figures of these requests."""
    good = [record for record in records if not record.error]
    bad = [record for record in records if record.error]
    seconds = max((r.end for r in records), default=0.0) - min((r.start for r in records), default=0.0)
    output, prompt = sum(r.tokens for r in good), sum(r.prompt_tokens for r in good)
    streamed = [r for r in good if r.events]
    long = [r for r in streamed if r.tokens > 1 and r.events > 1]
    per_second = 1 / seconds if seconds > 0 else 0.0
    return Summary(
        requests=len(records),
        completed=len(good),
        failed=len(bad),
        errors=dict(Counter(r.error for r in bad).most_common()),
        error_examples={r.error: r.detail for r in reversed(bad) if r.detail},
        seconds=round(seconds, 4),
        prompt_tokens=prompt,
        cached_tokens=sum(r.cached_tokens for r in good),
        output_tokens=output,
        requests_per_second=round(len(good) * per_second, 3),
        output_tokens_per_second=round(output * per_second, 2),
        total_tokens_per_second=round((output + prompt) * per_second, 2),
        tokens_per_chunk=round(output / max(1, sum(r.events for r in good)), 3),
        ttft_ms=distribution(np.array([r.first - r.start for r in streamed])),
        tpot_ms=distribution(np.array([(r.last - r.first) / (r.tokens - 1) for r in long])),
        itl_ms=distribution(np.frombuffer(b"".join(r.gaps for r in good), dtype=np.float64)),
        e2e_ms=distribution(np.array([r.end - r.start for r in good])),
    )


def line(result: Result) -> str:
    def cell(times: Distribution | None) -> str:
        return f"{times.p50:8.2f} {times.p99:8.2f}" if times else f"{'-':>8} {'-':>8}"

    s = result.summary
    return (f"{result.workload.name:16} {s.completed:5} {s.failed:5} {s.output_tokens_per_second:10,.0f}"
            f" {s.total_tokens_per_second:10,.0f} {cell(s.ttft_ms)} {cell(s.tpot_ms)} {cell(s.itl_ms)}"
            f" {cell(s.e2e_ms)}")  # fmt: skip


HEADING = (
    f"{'':16} {'done':>5} {'fail':>5} {'out tok/s':>10} {'all tok/s':>10} {'ttft p50':>8} {'p99':>8} {'tpot p50':>8}"
    f" {'p99':>8} {'itl p50':>8} {'p99':>8} {'e2e p50':>8} {'p99':>8}   (ms)"
)
