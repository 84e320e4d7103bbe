"""The Python API under a load: `python -m benchmarks.offline --shape 0.6b`. No HTTP, one call of `generate`.

The load is a row of benchmarks/load/workload.py (offline_256 unless another is named) or its lengths as options. The
rate is over the wall time of the call, from prompts as token ids to outputs as text and token ids.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cpu_seconds import engine_seconds
from benchmarks.load.workload import ROWS
from benchmarks.report import ROOT
from benchmarks.shapes import SHAPES, make_folder
from penstock import LLM
from penstock.protocol.config import fields
from penstock.services.bench.offline import measure, warm_up
from penstock.services.bench.serve import Result
from penstock.services.bench.workload import Workload
from penstock.services.supervisor import options

ROW = "offline_256"
DUMMY: Mapping[str, Any] = {"load_format": "dummy", "max_model_len": 40960}


class OfflineFailed(Exception):
    """The command that measures the Python API ended without its figures."""


class Offline(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `generate`, with the CPU seconds of every role during it; the program's own are under `program`."""

    result: Result
    cpu_seconds: dict[str, float]
    device: str


def measured(llm: LLM, workload: Workload) -> Offline:
    """Warm the engine up, and give it the load in one call."""
    warm_up(llm, workload)
    before = engine_seconds()
    result = measure(llm, workload)
    roles = {role: round(seconds - before.get(role, 0.0), 3) for role, seconds in engine_seconds().items()}
    device = llm.status.device if llm.status is not None else ""
    return Offline(result=result, cpu_seconds={**roles, "program": round(result.client_cpu_seconds, 3)}, device=device)


def in_its_own_process(
    folder: Path, workload: Workload, keywords: Mapping[str, Any], environ: Mapping[str, str], limit: float
) -> Offline:
    """As `measured`, by this module as a command. Raises TimeoutError, and OfflineFailed with its last words."""
    job = msgspec.json.encode({"folder": str(folder), "workload": workload, "options": keywords})
    return asyncio.run(asyncio.wait_for(command(job, {**os.environ, **environ}), limit))


async def command(job: bytes, environ: Mapping[str, str]) -> Offline:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.offline", "--job", stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT, env=environ,
    )  # fmt: skip
    try:
        out, said = await process.communicate(job)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        raise OfflineFailed(said.decode(errors="replace")[-2000:])
    return msgspec.json.decode(out, type=Offline)


def keywords(arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of `penstock serve` as keywords of `LLM`, less those of HTTP."""
    parsed = options.parse(options_parser(), arguments)
    http = {field.name for field in fields() if field.section == "api"}
    return {name: value for name, value in vars(parsed).items() if name not in {*http, "config", "without_effect"}}


def options_parser() -> options.Parser:
    found = options.Parser(prog="penstock serve", allow_abbrev=False)
    options.add_options(found)
    return found


def do_job() -> int:
    """The job on standard input; its figures on standard output."""
    job = msgspec.json.decode(sys.stdin.buffer.read())
    with LLM(job["folder"], **job["options"]) as llm:
        found = measured(llm, msgspec.convert(job["workload"], Workload))
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.offline", description=__doc__.partition("\n")[0],
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    found.add_argument("--shape", default="0.6b", help="shape of the model, with dummy weights: " + ", ".join(SHAPES))
    found.add_argument("--row", default=ROW, help="load: " + ", ".join(row.name for row in ROWS))
    found.add_argument("--requests", type=int, default=0, help="so many, with warm-up; 0: as the row has")
    found.add_argument("--temperature", type=float, help="another than the row's")
    found.add_argument("--rounds", type=int, default=1, help="loads one after the other, each with its own prompts")
    found.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="further options of LLM")
    found.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    asked_for = parser().parse_args(arguments)
    if asked_for.job:
        return do_job()
    rows = {row.name: row for row in ROWS}
    if asked_for.shape not in SHAPES or asked_for.row not in rows:
        print(f"{asked_for.shape}, {asked_for.row}: no such shape or load", file=sys.stderr)
        return 2
    shape, workload = SHAPES[asked_for.shape], rows[asked_for.row]
    workload = msgspec.structs.replace(workload, vocab=shape.vocab // 2, warmup_output=32)
    if asked_for.requests:
        workload = msgspec.structs.replace(workload, requests=asked_for.requests, warmup=asked_for.requests)
    if asked_for.temperature is not None:
        workload = msgspec.structs.replace(workload, temperature=asked_for.temperature)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="penstock-offline-") as place:
        start = time.monotonic()
        extra = dict(word.split("=", 1) for word in asked_for.option)
        with LLM(str(make_folder(shape, Path(place))), **{**DUMMY, **extra}) as llm:
            print(f"{shape.title}: ready after {time.monotonic() - start:.1f} s", flush=True)
            for seed in range(asked_for.rounds):
                found = measured(llm, msgspec.structs.replace(workload, seed=seed))
                summary = found.result.summary
                failed += summary.failed
                told = " ".join(f"{role} {seconds:.2f}" for role, seconds in found.cpu_seconds.items())
                print(f"{workload.name}: {summary.output_tokens_per_second:,.0f} tok/s out, {summary.completed} of "
                      f"{summary.requests} in {summary.seconds:.2f} s; cpu s: {told} {summary.errors or ''}",
                      flush=True)  # fmt: skip
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
