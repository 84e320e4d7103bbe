"""`penstock bench offline`: a load for the Python API, in one call of `generate`. No HTTP, no streams.

The rate is over the wall time of the call, from prompts as token ids to outputs as text and token ids.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.protocol.config import fields
from penstock.protocol.errors import ConfigError
from penstock.services.bench.client import Record
from penstock.services.bench.processes import children, cpu_seconds
from penstock.services.bench.serve import HEADING, Result, add_load, told, workload_of
from penstock.services.bench.summary import summarize
from penstock.services.bench.workload import Request, Workload, requests
from penstock.services.llm.llm import LLM
from penstock.services.llm.outputs import RequestOutput
from penstock.services.llm.params import SamplingParams
from penstock.services.supervisor.options import Effective


class Body(msgspec.Struct, frozen=True):
    """What a request of the load asks for."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    ignore_eos: bool


class Offline(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `generate`, and CPU seconds of every process while it ran, the program's own as `program`."""

    result: Result
    cpu_seconds: dict[str, float]
    device: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file for the result")


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Measure once; 1 if a request failed. Raises ConfigError for what has no meaning without HTTP."""
    workload = workload_of(namespace)
    for option, given in (("--rate", namespace.rate), ("--extra-body", namespace.extra_body),
                          ("--endpoint", namespace.endpoint == "chat"), ("--text", namespace.text)):  # fmt: skip
        if given:
            raise ConfigError(option, given, "one call of the Python API has token ids and no arrivals")
    with LLM(effective.config.model.model, **keywords(effective)) as llm:
        print(HEADING, flush=True)
        found = measure(llm, workload)
    code = told(found.result, namespace.output)
    print("  cpu s: " + " ".join(f"{role} {seconds:.2f}" for role, seconds in found.cpu_seconds.items()), flush=True)
    return code


def keywords(effective: Effective) -> dict[str, object]:
    """The options that were given beside the model, as keywords of `LLM`, less those of HTTP."""
    config = effective.config
    return {
        field.name: getattr(getattr(config, field.section), field.name)
        for field in fields()
        if field.name in effective.origins and field.section != "api" and field.name != "model"
    }


def asked(load: Sequence[Request]) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts and parameters of a load's requests."""
    bodies = [msgspec.json.decode(request.body, type=Body) for request in load]
    params = [
        SamplingParams(max_tokens=body.max_tokens, temperature=body.temperature, ignore_eos=body.ignore_eos)
        for body in bodies
    ]
    return [body.prompt for body in bodies], params


def record(request: Request, output: RequestOutput, start: float, end: float) -> Record:
    """What became of one request; one whose length is wrong has failed."""
    tokens = sum(len(choice.token_ids) for choice in output.outputs)
    wrong = request.output_tokens >= 0 and tokens != request.output_tokens
    return Record(
        request.index, request.variant, start, end=end, tokens=tokens, prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens or 0, error="token count" if wrong else "",
        detail=f"{tokens} of {request.output_tokens}" if wrong else "",
    )  # fmt: skip


def measure(llm: LLM, workload: Workload) -> Offline:
    """Warm the engine up, give it the load in one call, and return the figures."""
    prompts, params = asked(list(requests(workload, warmup=True)))
    llm.generate(prompts, params, use_tqdm=False)
    load = list(requests(workload))
    prompts, params = asked(load)
    before, own = spent(), time.process_time()
    start = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    end = time.monotonic()
    own = time.process_time() - own
    after = spent()
    records = [record(request, output, start, end) for request, output in zip(load, outputs, strict=True)]
    roles = {role: round(seconds - before.get(role, 0.0), 3) for role, seconds in after.items()}
    result = Result(workload=workload, summary=summarize(records), variants={}, processes=0, client_cpu_seconds=own)
    device = llm.status.device if llm.status is not None else ""
    return Offline(result=result, cpu_seconds={**roles, "program": round(own, 3)}, device=device)


def spent() -> dict[str, float]:
    """CPU seconds so far of the engine that this program started."""
    found: dict[str, float] = {}
    for launcher in children(os.getpid()):
        for role, seconds in cpu_seconds(launcher).items():
            found[role] = found.get(role, 0.0) + seconds
    return found
