"""Placement by prefix against round robin: `python -m benchmarks.placement`.

64 conversations over 4 replicas: a beginning that all share, a long first message each, then turns that each add a
little to what was said. Several are open at once, the next turn of each comes after those of the others. One replica's
cache holds a part of all that is said; the replicas' caches together hold it. Each policy gets a fresh server and the
same conversations, policies in turns. Prints the share of prompt tokens that were found in a cache, output tokens per
second, and the same rate with prompt tokens, cached ones included; writes benchmarks/results/placement_cpu.json, or
`--to`. `--recompute` derives the rates of such a file again from its counts.

On GPUs: `python -m benchmarks.placement --model MODEL --turns 8 --history 6000 --open 64 --to FILE -- --device cuda`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks import report
from benchmarks.report import ROOT
from benchmarks.server import serving
from penstock.engine_core import folder
from penstock.engine_core.models.memory_estimate import block_bytes
from penstock.engine_core.models.spec import ModelSpec, read_spec

RESULTS = ROOT / "benchmarks" / "results" / "placement_cpu.json"
BLOCK = 16
POLICIES = ("prefix", "round_robin")
SPARE = 1.3  # times a fair share of everything that is said, in each replica's cache


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the conversations are like; lengths in tokens."""

    conversations: int
    turns: int
    shared: int  # what all begin with
    history: int  # each one's own first message
    more: int  # what a later turn adds
    output: int
    open: int  # conversations that wait for an answer at once
    seed: int = 1

    @property
    def own(self) -> int:
        """Tokens of one conversation, less what all begin with."""
        return self.history + (self.turns - 1) * self.more + self.turns * self.output

    def total(self) -> int:
        """Tokens of everything that is said."""
        return self.shared + self.conversations * self.own


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `shares`: of the prompt tokens, what each replica had."""

    policy: str
    seconds: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    tokens_per_second: float  # of outputs and prompts, cached prompt tokens included
    hit_rate: float  # cached_tokens of prompt_tokens
    shares: tuple[float, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds, and how many times as fast placement by prefix is."""

    hit_rate: dict[str, float]
    output_tokens_per_second: dict[str, float]
    tokens_per_second: dict[str, float]
    ratio: float


async def converse(url: str, load: Load, vocab: int, model: str) -> tuple[float, int, int]:
    """Hold every conversation; seconds, requests and output tokens."""
    chance = random.Random(load.seed)
    words = range(256, vocab - 64)
    shared = chance.choices(words, k=load.shared)
    histories = [[*shared, *chance.choices(words, k=load.history)] for _ in range(load.conversations)]
    extras = [[chance.choices(words, k=load.more) for _ in range(load.turns)] for _ in histories]
    waiting = deque((number, 0) for number in range(load.conversations))
    outputs = requests = 0

    async def worker(client: httpx.AsyncClient) -> None:
        nonlocal outputs, requests
        while waiting:
            number, turn = waiting.popleft()
            history = histories[number]
            body = {"model": model, "prompt": history, "max_tokens": load.output, "temperature": 0,
                    "ignore_eos": True, "return_token_ids": True}  # fmt: skip
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            found = answer.json()
            requests += 1
            outputs += found["usage"]["completion_tokens"]
            history += [*found["choices"][0]["token_ids"], *extras[number][turn]]
            if turn + 1 < load.turns:
                waiting.append((number, turn + 1))

    limits = httpx.Limits(max_connections=load.open)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        began = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(load.open)))
        return time.perf_counter() - began, requests, outputs


def settled(url: str, requests: int) -> dict[str, Any]:
    """/health once the heartbeats count all that was asked."""
    with httpx.Client(base_url=url, timeout=60) as client:
        while True:
            health: dict[str, Any] = client.get("/health").json()
            if health["engine"]["finished"] >= requests:
                return health


def run(policy: str, load: Load, spec: ModelSpec, options: argparse.Namespace) -> Figures:
    """One policy on a server of its own."""
    blocks = int(SPARE * load.total() / options.replicas / BLOCK)
    cache = blocks * block_bytes(spec, BLOCK, options.item_bytes)
    arguments = [
        *([options.model] if options.model else []), "--data-parallel-size", str(options.replicas),
        "--placement", policy, "--max-model-len", str(load.shared + load.own + load.more),
        "--block-size", str(BLOCK), "--kv-cache-memory", str(cache),
        "--api-processes", "1", "--tokenizer-processes", "1", *options.rest,
    ]  # fmt: skip
    with serving(arguments) as server:
        health = settled(server.url, 0)
        seconds, requests, outputs = asyncio.run(converse(server.url, load, spec.vocab_size, health["model"]))
        health = settled(server.url, requests)
    engine, replicas = health["engine"], health["replicas"]
    prompts, cached = engine["prompt_tokens"], engine["cached_tokens"]
    return Figures(
        policy=policy,
        seconds=seconds,
        requests=requests,
        prompt_tokens=prompts,
        cached_tokens=cached,
        output_tokens=outputs,
        output_tokens_per_second=outputs / seconds,
        tokens_per_second=(prompts + outputs) / seconds,
        hit_rate=cached / prompts,
        shares=tuple(replica["prompt_tokens"] / prompts for replica in replicas),
    )


def compared(runs: list[Figures]) -> Comparison:
    """Both policies' medians."""

    def medians(field: str) -> dict[str, float]:
        return {name: statistics.median(getattr(found, field) for found in runs if found.policy == name)
                for name in POLICIES}  # fmt: skip

    outputs = medians("output_tokens_per_second")
    return Comparison(
        hit_rate=medians("hit_rate"),
        output_tokens_per_second=outputs,
        tokens_per_second=medians("tokens_per_second"),
        ratio=outputs["prefix"] / outputs["round_robin"],
    )


def recomputed(report: dict[str, Any]) -> dict[str, Any]:
    """A report with its rates derived anew from its counts and seconds."""
    runs = []
    for run in report["runs"]:
        prompts, outputs, seconds = run["prompt_tokens"], run["output_tokens"], run["seconds"]
        rates = {"output_tokens_per_second": outputs / seconds, "tokens_per_second": (prompts + outputs) / seconds,
                 "hit_rate": run["cached_tokens"] / prompts}  # fmt: skip
        runs.append(msgspec.convert(run | rates, Figures))
    found = {"comparison": compared(runs), "runs": runs}
    return report | msgspec.json.decode(msgspec.json.encode(found), type=dict[str, Any])


def line(found: Figures) -> str:
    shares = " ".join(f"{share:.0%}" for share in found.shares)
    return (
        f"{found.policy:12} {found.seconds:7.1f} s {found.output_tokens_per_second:9.1f} output tokens/s "
        f"{found.tokens_per_second:9.0f} with prompts "
        f"{found.hit_rate:6.1%} found, by replica {shares}"
    )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__.partition("\n")[0])
    found.add_argument("--model", default="", help="empty: the embedded one")
    found.add_argument("--replicas", type=int, default=4)
    found.add_argument("--conversations", type=int, default=64)
    found.add_argument("--turns", type=int, default=4)
    found.add_argument("--shared", type=int, default=256)
    found.add_argument("--history", type=int, default=1200)
    found.add_argument("--more", type=int, default=64)
    found.add_argument("--output", type=int, default=8)
    found.add_argument("--open", type=int, default=16)
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--item-bytes", type=int, default=0, help="of the KV cache; 0: 4 on a CPU, else 2")
    found.add_argument("--to", type=Path, default=RESULTS)
    found.add_argument("--recompute", action="store_true", help="derive the rates of the file again, and end")
    found.add_argument("rest", nargs="*", help="further options of the server, behind --")
    return found


def main() -> None:
    options = parser().parse_args()
    if options.recompute:
        options.to.write_text(json.dumps(recomputed(json.loads(options.to.read_text())), indent=1) + "\n")
        return
    options.rest = options.rest or ["--device", "cpu", "--cpu-threads", "1"]
    options.item_bytes = options.item_bytes or (4 if "cpu" in options.rest else 2)
    load = Load(**{name: getattr(options, name) for name in Load.__struct_fields__ if name != "seed"})
    spec = read_spec(folder.resolve(options.model, ""))
    print(f"{load.conversations} conversations of {load.turns} turns, {load.total()} tokens in all, {options.replicas} "
          f"replicas, each with a cache for {SPARE / options.replicas:.0%} of them")  # fmt: skip
    runs: list[Figures] = []
    for _ in range(options.rounds):
        for policy in POLICIES:
            runs.append(run(policy, load, spec, options))
            print(line(runs[-1]), flush=True)
        write(options, load, runs)
    print(f"by prefix {compared(runs).ratio:.2f} times the throughput of round robin")


def write(options: argparse.Namespace, load: Load, runs: list[Figures]) -> None:
    """What is known after each round."""
    report.write(options.to, "placement", {
        "model": options.model or "embedded", "replicas": options.replicas, "server": options.rest,
        "cache_tokens_per_replica": int(SPARE * load.total() / options.replicas), "load": load,
        "comparison": compared(runs), "runs": runs,
    })  # fmt: skip


if __name__ == "__main__":
    main()
