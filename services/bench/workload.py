"""Workloads as data, the requests of a workload, and the record of each request.

A workload and its seed fix every request to the last token id, so two servers are given the same load.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

FIRST_ID = 10  # ids below are special tokens in most vocabularies
WORDS = (
    *("water", "river", "stone", "light", "early", "seven", "paper", "green", "carry", "under", "table", "north"),
    *("because", "between", "morning", "country", "turbine", "measure", "against", "nothing", "through", "another"),
)


class Variant(msgspec.Struct, frozen=True):
    """Extra body fields for a share of a workload's requests; results are also reported per variant."""

    name: str = "all"
    body: dict[str, Any] = {}


FREE = Variant("free")


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One load. Ranges are inclusive; a fixed length has equal ends.

    With `concurrency` alone, that many requests are open at any time. With `rate`, requests arrive as a Poisson process
    however many are open, unless `concurrency` caps it.
    """

    name: str = "custom"
    requests: int = 64
    concurrency: int = 0
    rate: float = 0.0  # requests per second
    input: tuple[int, int] = (128, 128)  # prompt tokens (words, for text prompts) after the shared prefix
    output: tuple[int, int] = (128, 128)  # max_tokens
    prefix: int = 0  # shared tokens in front of each prompt
    prefixes: int = 1  # number of different shared prefixes
    warmup: int = 8
    warmup_output: int = 1 << 20  # max_tokens of a warm-up request
    variants: tuple[Variant, ...] = (Variant(),)
    endpoint: str = "completions"  # or chat, which takes text
    text: bool = False
    vocab: int = 1000  # random ids are below
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request with its encoded body."""

    index: int
    variant: int
    due: float  # seconds after the start; 0 in a closed loop
    prompt_tokens: int  # -1 if only the server knows
    output_tokens: int  # -1 if the model may stop earlier
    body: bytes


class Record(msgspec.Struct, gc=False):
    """The outcome of one request. Times are seconds of the system's monotonic clock, the same in every process."""

    index: int
    variant: int
    start: float = 0.0
    first: float = 0.0  # first token
    last: float = 0.0  # last token
    end: float = 0.0
    events: int = 0  # chunks with tokens
    tokens: int = 0  # by the server's usage
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""  # kind; empty on success
    detail: str = ""
    gaps: bytes = b""  # float64 seconds between consecutive events


def arrivals(workload: Workload) -> list[float]:
    """When each request is due, in seconds after the start."""
    if not workload.rate:
        return [0.0] * workload.requests
    chance, now, due = random.Random(f"arrivals {workload.seed}"), 0.0, []
    for _ in range(workload.requests):
        now += chance.expovariate(workload.rate)
        due.append(now)
    return due


def request_chance(workload: Workload, index: int, *, warmup: bool = False) -> random.Random:
    """The source of a request's output length, prompt length and ids, in this order. No two workloads share one, so a
    prefix cache filled by one workload does not help another."""
    return random.Random(f"{'warmup' if warmup else 'request'} {workload.name} {workload.seed} {index}")


def prompt(workload: Workload, chance: random.Random, count: int) -> list[Any]:
    if workload.text or workload.endpoint == "chat":
        return chance.choices(WORDS, k=count)
    return [chance.randrange(FIRST_ID, workload.vocab) for _ in range(count)]


def requests(workload: Workload, model: str = "", *, warmup: bool = False, extra: Mapping[str, Any] | None = None,
             worker: int = 0, workers: int = 1) -> Iterator[Request]:  # fmt: skip
    """The requests of one of `workers` client processes; a request does not depend on their number."""
    count = workload.warmup if warmup else workload.requests
    due = [0.0] * count if warmup else arrivals(workload)
    shared = [prompt(workload, random.Random(f"prefix {workload.seed} {n}"), workload.prefix)
              for n in range(workload.prefixes if workload.prefix else 0)]  # fmt: skip
    ids = not workload.text and workload.endpoint != "chat"
    for index in range(worker, count, workers):
        chance = request_chance(workload, index, warmup=warmup)
        variant = index % len(workload.variants)
        tokens = chance.randint(*workload.output)
        if warmup:
            tokens = min(tokens, workload.warmup_output)
        content = shared[index % len(shared)] if shared else []
        content = content + prompt(workload, chance, chance.randint(*workload.input))
        body: dict[str, Any] = {"model": model} if model else {}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens}
        body |= {"temperature": workload.temperature, "ignore_eos": workload.ignore_eos}
        if workload.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": " ".join(content)}]
        else:
            body["prompt"] = content if ids else " ".join(content)
        yield Request(
            index=index,
            variant=variant,
            due=due[index],
            prompt_tokens=len(content) if ids else -1,
            output_tokens=tokens if workload.ignore_eos else -1,
            body=msgspec.json.encode(body | dict(extra or {}) | workload.variants[variant].body),
        )
