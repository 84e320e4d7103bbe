"""`penstock bench offline`: a load for the Python API in one call of `generate`, without HTTP or streams; and
`penstock bench start`: the time from a server's first process to readiness, several times in a row.

The offline rate is over the wall time of the call, from prompts as token ids to outputs as text and token ids.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.protocol.config import Config, fields
from penstock.protocol.errors import ConfigError
from penstock.services.bench.serve import HEADING, Result, add_load, conclude, summarize, workload_of
from penstock.services.bench.workload import Record, Request, Workload, requests
from penstock.services.commands.client import quiet, started
from penstock.services.llm.llm import LLM
from penstock.services.llm.outputs import RequestOutput
from penstock.services.llm.params import SamplingParams
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode


class Body(msgspec.Struct, frozen=True):
    """The fields of a load's request that apply to the Python API."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    ignore_eos: bool


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
        warm_up(llm, workload)
        found = measure(llm, workload)
    return conclude(found, namespace.output)


def warm_up(llm: LLM, workload: Workload) -> None:
    llm.generate(*arguments(list(requests(workload, warmup=True))), use_tqdm=False)


def measure(llm: LLM, workload: Workload) -> Result:
    """Give the engine the load in one call, and return the figures."""
    load = list(requests(workload))
    prompts, params = arguments(load)
    start, own = time.monotonic(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    end, own = time.monotonic(), time.process_time() - own
    records = [record(request, output, start, end) for request, output in zip(load, outputs, strict=True)]
    return Result(workload=workload, summary=summarize(records), variants={}, processes=0, client_cpu_seconds=own)


def arguments(load: Sequence[Request]) -> tuple[list[list[int]], list[SamplingParams]]:
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
    began = time.monotonic()
    with started(config):
        return time.monotonic() - began
