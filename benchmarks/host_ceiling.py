"""What the host's processes cost for a token: `python -m benchmarks.host_ceiling`.

Real api, tokenizer and scheduler processes and the load generator, with an executor that only pretends to compute
(benchmarks/load/executor.py): each step takes `--step` milliseconds whatever it holds. Prints CPU microseconds for an
output token by role, the tokens per second at which one process of that role would be busy all the time, and what the
pipeline adds to the first token of a request that is alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec

from benchmarks import report
from benchmarks.cpu_seconds import cpu_seconds
from benchmarks.report import ROOT
from benchmarks.server import end
from benchmarks.shapes import SHAPES, make_folder
from penstock.protocol.config import ApiConfig
from penstock.services.bench.client import target
from penstock.services.bench.serve import Summary, run, summarize
from penstock.services.bench.workload import Workload
from penstock.services.supervisor.address import hold
from penstock.services.supervisor.sd_notify import NoticeSocket

START_LIMIT = 60.0  # seconds
ROLES = ("api", "tokenizer", "scheduler")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one load showed: the client's figures, and CPU microseconds per output token by role."""

    name: str
    step_ms: float
    summary: Summary
    processes: dict[str, int]  # of the roles that may have several
    microseconds: dict[str, float]
    client_microseconds: float


@contextmanager
def pipeline(step: float, options: argparse.Namespace) -> Iterator[str]:
    """Every process but the executor, and a pretended one, children of this process: the address of the api."""
    held = hold(ApiConfig(port=0, api_processes=options.apis))
    with tempfile.TemporaryDirectory(prefix="penstock-host-") as place, ExitStack() as stack:
        port = stack.enter_context(held).getsockname()[1] if held is not None else 0
        folder = make_folder(SHAPES[options.shape], Path(place))
        notices = stack.enter_context(closing(NoticeSocket(Path(place) / "notify.sock")))
        run_dir = Path(place) / "run"
        run_dir.mkdir(mode=0o700)
        shared = [f"--run-dir={run_dir}", f"--model={folder}", f"--port={port}",
                  "--log-level=warning", f"--api-processes={options.apis}",
                  f"--tokenizer-processes={options.tokenizers}"]  # fmt: skip
        environment = {**os.environ, "NOTIFY_SOCKET": str(notices.path)}
        roles = [("scheduler", 0), *(("tokenizer", index) for index in range(options.tokenizers)),
                 *(("api", index) for index in range(options.apis))]  # fmt: skip
        apis = set()
        for role, index in roles:
            process = begin([sys.executable, "-m", "penstock", role, f"--index={index}", *shared], environment, stack)
            apis |= {process.pid} if role == "api" else set()
        begin(
            [sys.executable, "-m", "benchmarks.load.executor", str(run_dir), str(folder), str(step)], environment, stack
        )
        yield ready(notices, apis)


def begin(command: Sequence[str], environment: Mapping[str, str], stack: ExitStack) -> subprocess.Popen[bytes]:
    """A process that ends with the stack."""
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    stack.callback(end, process)
    return process


def ready(notices: NoticeSocket, waiting: set[int]) -> str:
    """Wait until each of these processes is ready; the address that they share. Raises TimeoutError."""
    deadline, url = time.monotonic() + START_LIMIT, ""
    while waiting:
        if time.monotonic() > deadline:
            raise TimeoutError("the processes did not become ready; their log is above")
        select.select([notices], [], [], 0.5)
        for notice in notices.receive():
            url = notice.fields.get("X_PENSTOCK_URL", url)
            if notice.ready:
                waiting = waiting - {notice.pid}
    return url


def measure(name: str, step: float, workload: Workload, options: argparse.Namespace) -> Load:
    """Give one load to processes of its own."""
    with pipeline(step, options) as url:
        where = target(url)
        warm = msgspec.structs.replace(workload, requests=workload.concurrency, output=(8, 8), seed=1)
        asyncio.run(run(where, warm, processes=options.clients))
        before = cpu_seconds(os.getpid())
        outcome = asyncio.run(run(where, workload, processes=options.clients))
        after = cpu_seconds(os.getpid())
    summary = summarize(outcome.records)
    assert not summary.failed, summary.errors
    spent = {role: 1e6 * (after[role] - before[role]) / summary.output_tokens for role in ROLES}
    return Load(
        name=name, step_ms=1000 * step, summary=summary,
        processes={"api": options.apis, "tokenizer": options.tokenizers},
        microseconds={role: round(value, 2) for role, value in spent.items()},
        client_microseconds=round(1e6 * outcome.client_cpu_seconds / summary.output_tokens, 2),
    )  # fmt: skip


def text(load: Load) -> str:
    """A load's figures for the eye."""
    s = load.summary
    assert s.ttft_ms is not None
    gaps = f"{s.itl_ms.p50:.2f} ms (p99 {s.itl_ms.p99:.2f})" if s.itl_ms is not None else "-"
    lines = [f"{load.name}: {s.output_tokens_per_second:,.0f} tok/s, {s.tokens_per_chunk:.2f} tokens a chunk, time to"
             f" first token {s.ttft_ms.p50:.2f} ms (p99 {s.ttft_ms.p99:.2f}), between tokens {gaps};"
             f" a step takes {load.step_ms:g} ms"]  # fmt: skip
    for role, value in load.microseconds.items():
        most = f"{1e6 / value:10,.0f} tok/s in one process" if value else ""
        lines.append(f"  {role:<10} {value:6.2f} µs a token {most}")
    return "\n".join([*lines, f"  {'clients':<10} {load.client_microseconds:6.2f} µs a token"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_ceiling", description=__doc__.partition("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--concurrency", type=int, default=256, help="streams")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--step", type=float, default=40.0, help="milliseconds of a step; 0: as fast as plans come")
    parser.add_argument("--alone", type=int, default=100, help="requests of one client, one after the other")
    parser.add_argument("--vocab", type=int, default=90000, help="ids of prompts are below")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--apis", type=int, default=1, help="api processes")
    parser.add_argument("--tokenizers", type=int, default=1, help="tokenizer processes")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    streams = Workload(name=f"{options.concurrency} streams", requests=options.concurrency, vocab=options.vocab,
                       concurrency=options.concurrency, output=(options.tokens, options.tokens), warmup=0)  # fmt: skip
    alone = Workload(name="alone", requests=options.alone, concurrency=1, output=(2, 2), vocab=options.vocab, warmup=0)
    loads = []
    for workload, step in ((streams, options.step / 1000), (alone, 0.0)):
        loads.append(measure(workload.name, step, workload, options))
        print(text(loads[-1]), flush=True)
    if options.output:
        report.write(options.output, "host_ceiling", {"loads": loads}, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
