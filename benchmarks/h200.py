"""Every published figure of one H200 in one go: `python -m benchmarks.h200`.

For each model shape a server is started with empty caches, ended, and started again with what the first start left in
them; the second one gets the loads. One JSON file per row goes to benchmarks/results/h200/MODEL/, written as soon as
the row is done; `--table` prints the published tables from them. `--features` adds the rows of what a request
asks for (sampling, log-probabilities, penalties, JSON). `--smoke` tries all of it on a CPU with tiny loads.

The row offline_256 (benchmarks/offline.py) starts an engine of its own through the Python API, with what the other
starts left in the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import limits, offline, report, rows
from benchmarks.report import ROOT
from benchmarks.rows import ALL, FEATURES, OFFLINE, SERVING, STARTS, WARMUP_OUTPUT, WORKLOADS, Record, Row
from benchmarks.server import Server, serving, with_bytecode
from benchmarks.shapes import SHAPES, Shape, make_folder
from penstock.engine_core.models.spec import ModelSpec, read_spec
from penstock.services.bench.client import target
from penstock.services.bench.serve import HEADING, ClientDied, Result, line, measure
from penstock.services.bench.workload import Workload

RESULTS = ROOT / "benchmarks" / "results" / "h200"
SERVE = ("--load-format", "dummy", "--max-model-len", "40960", "--gpu-memory-utilization", "0.90")
SMOKE = ("--load-format", "dummy", "--device", "cpu", "--max-model-len", "512", "--max-num-seqs", "8")
SMOKE_TOKENS = 8  # of a prompt and of an answer
CLIENTS = 4  # processes
ROW_LIMIT = 90.0  # seconds that a row may take, unless told otherwise
OFFLINE_LIMIT = 120.0  # the same with the start of an engine
VOCAB_MARGIN = 0.75  # share of a vocabulary that prompts draw from: its end holds special tokens
COLD = "Triton's and Penstock's caches empty; bytecode as installed; the operating system's page cache as it was"
WARM = "caches as the cold start left them"
RANDOM = "random prompts: no prefix is cached"
SHARED = "the shared prefix is cached by the warm-up, the rest of each prompt is random"


class Run:
    """One go: options, where its records go, and what was measured so far."""

    def __init__(self, options: argparse.Namespace, words: Sequence[str] | None = None) -> None:
        self.options = options
        self.records = rows.read(options.output) if options.output.is_dir() else {}
        self.environment = report.header("h200", words, options.commit)
        self.failed = 0

    def model(self, shape: Shape, place: Path) -> None:
        """Every row of one model. Raises TimeoutError when its server does not start."""
        folder = make_folder(shape, place)
        spec = read_spec(folder)
        smoke = self.options.smoke
        arguments = [str(folder), *(SMOKE if smoke else SERVE), *shlex.split(self.options.server_args)]
        caches = place / "caches"
        caches.mkdir(exist_ok=True)
        environ = {} if self.options.skip_start else {"TRITON_CACHE_DIR": str(caches / "triton"),
                                                      "XDG_CACHE_HOME": str(caches)}  # fmt: skip
        environ |= {} if smoke else with_bytecode(place)
        wanted = [row for row in self.wanted() if row not in STARTS and row not in OFFLINE]
        alone = [row for row in self.wanted() if row in OFFLINE and (self.options.rows or shape.name in row.targets)]
        starts = {row.name: row for row in self.wanted() if row in STARTS and not self.options.skip_start}
        if "start_cold" in starts or (starts and wanted):
            with serving(arguments, environ) as server:
                self.start(shape, starts.get("start_cold"), server, COLD, device(server))
        if wanted or "start_warm" in starts:
            with serving(arguments, environ) as server:
                named = device(server)  # while it certainly answers
                if starts:
                    self.start(shape, starts.get("start_warm"), server, WARM, named)
                self.load(shape, spec, wanted, server, named)
        for row in alone:
            self.offline(shape, folder, row, environ)

    def wanted(self) -> list[Row]:
        """The rows that were asked for, in order."""
        if self.options.rows:
            return [row for row in ALL if row.name in self.options.rows.split(",")]
        return [*STARTS, *SERVING, *OFFLINE, *(FEATURES if self.options.features else ())]

    def start(self, shape: Shape, row: Row | None, server: Server, cache: str, named: str) -> None:
        if row is not None:
            seconds = round(server.seconds, 2)
            print(f"{row.name}: {seconds} s", flush=True)
            self.keep(shape, row, Record(row=row.name, model=shape.name, figure=row.figure, cache=cache,
                                         unit=rows.UNITS[row.figure], value=seconds), named)  # fmt: skip

    def offline(self, shape: Shape, folder: Path, row: Row, environ: Mapping[str, str]) -> None:
        """Give the load of a row to the Python API."""
        smoke = self.options.smoke
        workload = prepared(WORKLOADS[row.load], shape, smoke=smoke)
        arguments = [*(SMOKE if smoke else SERVE), *shlex.split(self.options.server_args)]
        found, error = None, ""
        try:
            keywords = offline.keywords(arguments)
            found = offline.in_its_own_process(folder, workload, keywords, environ, OFFLINE_LIMIT)
        except TimeoutError:
            error = f"not done after {OFFLINE_LIMIT:g} s"
        except offline.OfflineFailed as failure:
            error = str(failure)
        result = found.result if found else None
        if result is not None:
            summary = result.summary
            error = "; ".join(f"{count} × {kind}" for kind, count in summary.errors.items())
        named = driver_name(found.device) if found else ""
        record = self.limited(recorded(row, shape, workload, result, error), row, workload, read_spec(folder), named)
        spent = found.cpu_seconds if found else {}
        self.keep(shape, row, msgspec.structs.replace(record, **per_token(spent, workload, result)), named)
        print(line(result) + cpu(spent, result) if result is not None else f"{row.name}: {error}", flush=True)

    def load(self, shape: Shape, spec: ModelSpec, wanted: Sequence[Row], server: Server, named: str) -> None:
        """Give the server each load once, for all of the rows that are figures of it."""
        print(HEADING, flush=True)
        for name in dict.fromkeys(row.load for row in wanted):
            workload = prepared(WORKLOADS[name], shape, smoke=self.options.smoke)
            before = server.cpu_seconds()
            result, error = attempt(server, workload, self.options.clients, self.options.row_limit)
            after = server.cpu_seconds()
            spent = {role: round(seconds - before.get(role, 0.0), 3) for role, seconds in after.items()}
            for row in (row for row in wanted if row.load == name):
                record = self.limited(recorded(row, shape, workload, result, error), row, workload, spec, named)
                self.keep(shape, row, msgspec.structs.replace(record, **per_token(spent, workload, result)), named)
            print(line(result) + cpu(spent, result) if result is not None else name, flush=True)
            log = server.tail()
            if error:
                print(f"  {error}\n{log}", flush=True)
            if not server.running:
                raise TimeoutError("the server has ended")

    def limited(self, record: Record, row: Row, workload: Workload, spec: ModelSpec, named: str) -> Record:
        """The record with what the chip allows, where that chip is known."""
        chip = limits.chip(named)
        if chip is None:
            return record
        limit = limits.limit(row.figure, workload, limits.Cost.of(spec, chip))
        return msgspec.structs.replace(
            record, limit=limit and round(limit, 4), share_of_limit=rows.share(row, record.value, limit)
        )

    def keep(self, shape: Shape, row: Row, record: Record, named: str) -> None:
        """Hold the record against its goal and write it."""
        goal = row.targets.get(shape.name)
        free = self.records.get((shape.name, row.against))
        found = rows.price(rows.figure_tpot(row, record), rows.figure_tpot(row, free) if free else None)
        record = msgspec.structs.replace(
            record,
            against=row.against,
            price=found if row.against else None,
            goal=goal.goal if goal else None,
            vllm=goal.vllm if goal else (),
            met=rows.met(row, goal, record.value, found) if goal and not rows.cached_share(record) else None,
            environment={**self.environment, "chip": named, "server_arguments": self.options.server_args},
        )
        self.failed += bool(record.error)
        self.records[shape.name, row.name] = record
        rows.write(self.options.output, record)


def attempt(server: Server, workload: Workload, clients: int, seconds: float) -> tuple[Result | None, str]:
    """The result of a load, and what went wrong with it."""
    try:
        result = asyncio.run(asyncio.wait_for(
            measure(target(server.url), workload, processes=clients, timeout=seconds), seconds
        ))  # fmt: skip
    except TimeoutError:
        return None, f"not done after {seconds:g} s"
    except ClientDied as error:
        return None, str(error)
    summary = result.summary
    errors = [f"{count} × {kind} {summary.error_examples.get(kind, '')}" for kind, count in summary.errors.items()]
    return result, "; ".join(errors)


def recorded(row: Row, shape: Shape, workload: Workload, result: Result | None, error: str) -> Record:
    """The record of a row before it is held against anything."""
    record = Record(row=row.name, model=shape.name, figure=row.figure, unit=rows.UNITS[row.figure], value=None,
                    concurrency=workload.concurrency, cache=SHARED if workload.prefix else RANDOM, workload=workload,
                    error=error)  # fmt: skip
    if result is None:
        return record
    return msgspec.structs.replace(
        record, value=None if error else rows.figure(row, result), client=result.summary, variants=result.variants,
        output_tokens_per_second=result.summary.output_tokens_per_second,
        client_cpu_seconds=result.client_cpu_seconds,
    )  # fmt: skip


def per_token(spent: dict[str, float], workload: Workload, result: Result | None) -> dict[str, Any]:
    """CPU seconds of a load, its warm-up included, and what they come to for each token."""
    if result is None or not result.summary.output_tokens:
        return {"cpu_seconds": spent}
    tokens = result.summary.output_tokens + workload.warmup * min(workload.warmup_output, workload.output[1])
    return {"cpu_seconds": spent,
            "host_microseconds_per_token": {role: round(1e6 * s / tokens, 2) for role, s in spent.items()}}  # fmt: skip


def cpu(spent: dict[str, float], result: Result) -> str:
    """CPU seconds by role, for the eye."""
    told = " ".join(f"{role} {seconds:.2f}" for role, seconds in spent.items() if seconds >= 0.01)
    return f"   cpu s: {told}; clients {result.client_cpu_seconds:.2f}"


def prepared(workload: Workload, shape: Shape, *, smoke: bool) -> Workload:
    """The load for a model: ids of its vocabulary, and a warm-up that is short but as wide as the load."""
    if smoke:
        return msgspec.structs.replace(
            workload, vocab=shape.vocab // 2, requests=min(workload.requests, 4), warmup=1,
            concurrency=min(workload.concurrency, 4), prefix=min(workload.prefix, 32),
            input=(SMOKE_TOKENS, SMOKE_TOKENS), output=(SMOKE_TOKENS, SMOKE_TOKENS),
        )  # fmt: skip
    warmup = workload.concurrency if workload.input[1] <= 128 else min(workload.concurrency, 64)
    return msgspec.structs.replace(workload, vocab=int(shape.vocab * VOCAB_MARGIN), warmup=warmup,
                                   warmup_output=WARMUP_OUTPUT)  # fmt: skip


def device(server: Server) -> str:
    """What the engine runs on: the name that the driver gives it, or the engine's own."""
    with urllib.request.urlopen(f"{server.url}/health", timeout=10) as answer:
        return driver_name(str((json.load(answer)["engine"] or {}).get("device", "")))


def driver_name(named: str) -> str:
    """The name that the driver gives a GPU; any other device's is as it was."""
    if "cuda" not in named and "NVIDIA" not in named:
        return named
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return named
    several = limits.SEVERAL.match(named)
    return (several[0] if several else "") + told.stdout.splitlines()[0].strip()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.h200", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--models", default="", help="shapes with commas, of " + ", ".join(SHAPES) + "; empty: 8b,0.6b")
    found.add_argument("--rows", default="", help="only these rows, with commas")
    found.add_argument("--features", action="store_true", help="also the rows of what a request asks for")
    found.add_argument("--skip-start", action="store_true", help="start each server once, and do not record how long")
    found.add_argument("--server-args", default="", help="further arguments of penstock serve, in one word")
    found.add_argument("--clients", type=int, default=CLIENTS, help="client processes")
    found.add_argument("--row-limit", type=float, default=ROW_LIMIT, help="seconds that a row may take")
    found.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
    found.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    found.add_argument("--table", action="store_true", help="print the tables of the records that are there, and end")
    found.add_argument("--smoke", action="store_true", help="the embedded model's shape on a CPU, tiny loads")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    titles = [(shape.name, shape.title) for shape in SHAPES.values()]
    if options.table:
        print(rows.table(rows.read(options.output), titles))
        return 0
    names = options.models.split(",") if options.models else ["smoke"] if options.smoke else ["8b", "0.6b"]
    known = {row.name for row in ALL}
    for word, allowed in [(name, SHAPES) for name in names] + [
        (name, known) for name in options.rows.split(",") if name
    ]:
        if word not in allowed:
            print(f"{word!r} is not allowed; one of {', '.join(sorted(allowed))}", file=sys.stderr)
            return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the server is ended, too
    run = Run(options, arguments)
    for name in names:
        print(f"\n{SHAPES[name].title}", flush=True)
        with tempfile.TemporaryDirectory(prefix="penstock-h200-") as place:
            try:
                run.model(SHAPES[name], Path(place))
            except TimeoutError as error:
                run.failed += 1
                print(f"{name}: {error}", file=sys.stderr, flush=True)
    print("\n" + rows.table({key: one for key, one in run.records.items() if key[0] in names}, titles), flush=True)
    return int(run.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
