"""`penstock bench offline`: a load for the Python API in one call of `generate`, without HTTP or streams; and
`penstock bench start`: the time from a server's first process to readiness, several times in a row.

The offline rate is over the wall time of the call, from prompts as token ids to outputs as text and token ids.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.protocol.config import Config, fields
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import Role
from penstock.services.bench.serve import HEADING, Result, add_load, conclude, summarize, workload_of
from penstock.services.bench.workload import Record, Request, Workload, requests
from penstock.services.commands.client import quiet, started
from penstock.services.llm.llm import LLM
from penstock.services.llm.outputs import RequestOutput
from penstock.services.llm.params import SamplingParams
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

ROLES = frozenset(role.value.encode() for role in Role)


class Body(msgspec.Struct, frozen=True):
    """The fields of a load's request that apply to the Python API."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    ignore_eos: bool


class Offline(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `generate`, with the CPU seconds of every role during it; the program's own are under `program`."""

    result: Result
    cpu_seconds: dict[str, float]
    device: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file for the result")


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Measure once; 1 if a request failed. Raises ConfigError for options that only apply to HTTP."""
    workload = workload_of(namespace)
    for option, given in (("--rate", namespace.rate), ("--extra-body", namespace.extra_body),
                          ("--endpoint", namespace.endpoint == "chat"), ("--text", namespace.text)):  # fmt: skip
        if given:
            raise ConfigError(option, given, "one call of the Python API has token ids and no arrivals")
    config = effective.config
    keywords = {
        field.name: getattr(getattr(config, field.section), field.name)
        for field in fields()
        if field.name in effective.origins and field.section != "api" and field.name != "model"
    }
    with LLM(config.model.model, **keywords) as llm:
        print(HEADING, flush=True)
        found = measure(llm, workload)
    code = conclude(found.result, namespace.output)
    print("  cpu s: " + " ".join(f"{role} {seconds:.2f}" for role, seconds in found.cpu_seconds.items()), flush=True)
    return code


def measure(llm: LLM, workload: Workload) -> Offline:
    """Warm the engine up, give it the load in one call, and return the figures."""
    llm.generate(*arguments(list(requests(workload, warmup=True))), use_tqdm=False)
    load = list(requests(workload))
    prompts, params = arguments(load)
    before, own = engine_seconds(), time.process_time()
    start = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    end = time.monotonic()
    own = time.process_time() - own
    after = engine_seconds()
    records = [record(request, output, start, end) for request, output in zip(load, outputs, strict=True)]
    roles = {role: round(seconds - before.get(role, 0.0), 3) for role, seconds in after.items()}
    result = Result(workload=workload, summary=summarize(records), variants={}, processes=0, client_cpu_seconds=own)
    device = llm.status.device if llm.status is not None else ""
    return Offline(result=result, cpu_seconds={**roles, "program": round(own, 3)}, device=device)


def arguments(load: Sequence[Request]) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts and parameters of a load's requests."""
    bodies = [msgspec.json.decode(request.body, type=Body) for request in load]
    params = [
        SamplingParams(max_tokens=body.max_tokens, temperature=body.temperature, ignore_eos=body.ignore_eos)
        for body in bodies
    ]
    return [body.prompt for body in bodies], params


def record(request: Request, output: RequestOutput, start: float, end: float) -> Record:
    """The outcome of one request; a wrong length is a failure."""
    tokens = sum(len(choice.token_ids) for choice in output.outputs)
    wrong = request.output_tokens >= 0 and tokens != request.output_tokens
    return Record(
        request.index, request.variant, start, end=end, tokens=tokens, prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens or 0, error="token count" if wrong else "",
        detail=f"{tokens} of {request.output_tokens}" if wrong else "",
    )  # fmt: skip


def engine_seconds() -> dict[str, float]:
    """CPU seconds so far of the engine that this program started."""
    found: Counter[str] = Counter()
    for launcher in children(os.getpid()):
        found.update(cpu_seconds(launcher))
    return dict(found)


def cpu_seconds(launcher: int) -> dict[str, float]:
    """CPU seconds by role of a launcher and the processes that it started. Source: proc(5), utime and stime."""
    found: dict[str, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for pid in (launcher, *children(launcher)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        role = next((word.decode() for word in words if word in ROLES), "launcher")
        found[role] = found.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return found


def children(pid: int) -> list[int]:
    """The running processes that a process started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def add_start_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="starts, one after the other [default 3]")


def start_command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Start, time and end a server `--runs` times. The first start fills caches that the others use.

    Raises ConfigError, and the error of a failed start.
    """
    if namespace.runs < 1:
        raise ConfigError("--runs", namespace.runs, "it must be at least 1")
    times = []
    for number in range(1, namespace.runs + 1):
        times.append(start_seconds(quiet(effective)))
        print(f"start {number}: ready after {times[-1]:.2f} s", flush=True)
    print(f"fastest {min(times):.2f} s, slowest {max(times):.2f} s", flush=True)
    return ExitCode.ORDERLY


def start_seconds(config: Config) -> float:
    """From the start of the launcher to readiness."""
    began = time.monotonic()
    with started(config):
        return time.monotonic() - began
