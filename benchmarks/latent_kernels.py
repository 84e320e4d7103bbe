"""Latent attention of a prompt's chunk on one GPU: `python -m benchmarks.latent_kernels`.

By absorbed queries and over expanded latents, with the products before and behind in both, microseconds of a layer; and
the expanded one's attention alone, by the FLOPs of its pairs of a query and a key. Results of both, of chunks beside
decoding rows too, are held against double precision on random inputs of their own first. `--memory` expands within so
many MiB, `--bounds` looks for the number of queries from which expanding pays.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.kernels import replayed
from penstock.engine_core.execution.compilation import compile_kernels, prewarm
from penstock.engine_core.execution.long_rows import find_long_rows
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.attention_device import arrival_counters
from penstock.kernels.latent_attention import latent_attention, multiply_heads
from penstock.kernels.latent_expansion import (
    LONG,
    MEMORY,
    attend,
    attend_expanded,
    expand,
    heads_first,
    others_of,
    rows_of_heads,
)
from penstock.kernels.records import AttentionBatch, AttentionOptions

RESULTS = report.ROOT / "benchmarks" / "results" / "h200" / "latent_kernels.json"
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
BOUND = 6e-3  # of an error's norm, beside that of the result: rounded to bfloat16 it is 2e-3
SAMPLED = 48  # queries of each row that are held against double precision
REPLAYS = 3

Rows = Sequence[tuple[int, int]]  # queries and context of each row


class Model(NamedTuple):
    """A rank's heads."""

    name: str
    heads: int
    nope: int
    value: int
    rank: int = 512
    dim: int = 64


MODELS = (Model("glm-4.7-flash", 20, 192, 256), Model("v2-lite, v3 / 8", 16, 128, 128), Model("v3 / 4", 32, 128, 128))
CHUNKS = (512, 1024, 2048, 8192)
CACHED = 8192
MIXTURES: tuple[Rows, ...] = (
    [(1, 700)] * 3 + [(300, 300), (5, 90), (1000, 3333)],
    [(129, 8200), (2048, 2048), (640, 641)],
)


class Step:
    """Random latents, queries and matrices of one layer, and a step's rows over shuffled pages whose other slots are
    not numbers."""

    def __init__(self, model: Model, rows: Rows, shortest: int = LONG, device: str = "cuda") -> None:
        self.device = torch.device(device)
        width = model.rank + model.dim
        wide = -(-max(context for _, context in rows) // BLOCK_SIZE)
        tokens = sum(count for count, _ in rows)
        tables = (torch.randperm(len(rows) * wide, device=self.device) + 1).int().view(len(rows), wide)
        self.model, self.rows, self.tokens = model, rows, tokens
        self.pages = torch.full((1 + tables.numel(), BLOCK_SIZE, width), torch.nan, dtype=DTYPE, device=self.device)
        self.latents: list[Tensor] = []
        for table, (_, context) in zip(tables, rows, strict=True):
            own = torch.randn(context, width, device=self.device).to(DTYPE)
            places = torch.arange(context, device=self.device)
            slots = table[places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE
            self.pages.flatten(0, 1)[slots] = own
            self.latents.append(own)
        both = torch.randn(model.heads, model.nope + model.value, model.rank, device=self.device) / model.rank**0.5
        keys, values = both.to(DTYPE).split([model.nope, model.value], dim=1)
        self.keys, self.values = keys, values.transpose(1, 2)  # [heads, nope, rank], [heads, rank, value]
        self.q = torch.randn(tokens, model.heads, model.nope + model.dim, device=self.device).to(DTYPE)
        self.scale = (model.nope + model.dim) ** -0.5
        query_start = np.array([0, *accumulate(count for count, _ in rows)], np.int32)
        starts = np.array([context - count for count, context in rows], np.int32)
        upload = Upload(self.device)
        sent, contexts = upload.send((query_start, np.array([context for _, context in rows], np.int32)))
        slots = torch.arange(len(rows), dtype=torch.int32, device=self.device)
        longest = max(count for count, _ in rows), max(context for _, context in rows)
        self.batch = AttentionBatch(
            sent, contexts, slots, tables, torch.zeros(tokens, dtype=torch.int64, device=self.device), *longest,
            arrivals=arrival_counters(self.q.device), long_rows=find_long_rows(query_start, starts, upload, shortest),
        )  # fmt: skip

    def absorbed(self, q: Tensor, batch: AttentionBatch) -> Tensor:
        """As `LatentAttention` has it."""
        model = self.model
        queries = torch.empty(len(q), model.heads, model.rank + model.dim, dtype=DTYPE, device=self.device)
        multiply_heads(q[..., : model.nope], self.keys, queries[..., : model.rank], False)
        queries[..., model.rank :] = q[..., model.nope :]
        attended = latent_attention(queries, self.pages, batch, model.rank, self.scale)
        out = torch.empty(len(q), model.heads, model.value, dtype=DTYPE, device=self.device)
        multiply_heads(attended, self.values, out, False)
        return out

    def all_absorbed(self) -> Tensor:
        return self.absorbed(self.q, replace(self.batch, long_rows=None))

    def mixed(self, memory: int = MEMORY) -> Tensor:
        """Long rows over expanded latents, others by absorbed queries."""
        out = torch.full((self.tokens, self.model.heads, self.model.value), torch.nan, dtype=DTYPE, device=self.device)
        keys = self.keys.transpose(1, 2)
        attend_expanded(self.q, self.pages, self.batch, keys, self.values, self.scale, out, memory)
        assert self.batch.long_rows is not None
        if (others := self.batch.long_rows.others) is not None:
            out[others.tokens] = self.absorbed(self.q[others.tokens], others_of(self.batch))
        return out

    def attention(self) -> Callable[[], object]:
        """The expanded one's attention alone, of all heads."""
        assert self.batch.long_rows is not None
        group, width = self.batch.long_rows.groups[0], max(self.q.shape[2], self.model.value)
        rows, places = rows_of_heads(self.batch, BLOCK_SIZE, 0, group, self.model.heads)
        scratch = torch.empty(2 * self.model.heads * len(places) * width, dtype=DTYPE, device=self.device)
        k, v = expand(self.pages, places, self.keys.transpose(1, 2), self.values, self.q.shape[2], scratch, width)
        q = heads_first(self.q, group.own, width).flatten(0, 1)[:, None]
        return lambda: attend(q, k, v, rows, AttentionOptions(self.scale))

    def error(self, found: Tensor) -> float:
        """The largest of any row: of some of its queries, in the first and the last head."""
        model, start, worst = self.model, 0, 0.0
        heads = torch.tensor([0, model.heads - 1], device=self.device)
        for own, (count, context) in zip(self.latents, self.rows, strict=True):
            picked = torch.randint(count, (SAMPLED,), device=self.device)
            picked[:2] = torch.tensor([0, count - 1], device=self.device)
            latents, turned = own.double().split([model.rank, model.dim], dim=1)
            k = torch.einsum("kr,hnr->hkn", latents, self.keys[heads].double())
            k = torch.cat((k, turned.expand(len(heads), -1, -1)), dim=2)
            v = torch.einsum("kr,hrv->hkv", latents, self.values[heads].double())
            q = self.q[start + picked][:, heads].double()
            scores = torch.einsum("qhd,hkd->hqk", q, k) * self.scale
            seen = torch.arange(context, device=self.device) <= (context - count + picked)[:, None]
            exact = torch.einsum("hqk,hkv->qhv", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
            own_error = ((found[start + picked][:, heads].double() - exact).norm() / exact.norm()).item()
            worst = own_error if not own_error <= worst else worst  # not a number is worst
            start += count
        return worst


def timed(call: Callable[[], object], least: float = 0.02) -> float:
    """Microseconds of one call, of as many in a graph as take so many seconds, 12 at most."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = max(1, min(12, round(least / (time.perf_counter() - began))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return replayed(graph, REPLAYS) / calls


def check(model: Model, device: str = "cuda") -> tuple[float, float]:
    """Errors of both ways over the mixtures, in little memory too. Raises AssertionError where one is too large, or
    where three runs have different bits."""
    errors = []
    for rows in MIXTURES:
        step = Step(model, rows, device=device)
        ways: tuple[Callable[[], Tensor], ...] = step.all_absorbed, step.mixed, lambda own=step: own.mixed(1)
        for way in ways:
            runs = [way() for _ in range(3)]
            assert all(torch.equal(run.view(torch.int16), runs[0].view(torch.int16)) for run in runs), "it moves"
            errors.append(step.error(runs[0]))
    torch.testing.assert_close(torch.tensor(errors), torch.zeros(len(errors)), atol=BOUND, rtol=0)
    return max(errors[::3]), max(errors[1::3] + errors[2::3])


def compile_all(steps: Iterable[Step]) -> None:
    """All that they launch, in parallel."""
    with prewarm() as uncompiled:
        for step in steps:
            step.all_absorbed()
            step.mixed()
    compile_kernels(uncompiled, torch.device("cuda"))


def flops(model: Model, count: int, context: int) -> int:
    """Of the pairs that a chunk's expanded attention has to multiply."""
    pairs = count * (context - count) + count * (count + 1) // 2
    return 2 * pairs * model.heads * (model.nope + model.dim + model.value)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's attention for one chunk. Times in microseconds."""

    model: str
    queries: int
    keys: int
    absorbed: float
    expanded: float
    attention: float  # the part of `expanded` that is not expansion
    tflops: float  # of `attention`
    error: float  # of `expanded`, against fp64


def measure(model: Model, count: int, context: int, memory: int, shortest: int) -> Figures:
    step = Step(model, [(count, context)], shortest)
    absorbed, expanded = timed(step.all_absorbed), timed(lambda: step.mixed(memory))
    alone = timed(step.attention())
    error = step.error(step.mixed(memory))
    assert error < BOUND, f"{model.name}, {count} of {context}: {error}"
    return Figures(
        model=model.name, queries=count, keys=context, absorbed=round(absorbed, 1), expanded=round(expanded, 1),
        attention=round(alone, 1), tflops=round(flops(model, count, context) / alone / 1e6, 1), error=error,
    )  # fmt: skip


def table(figures: Sequence[Figures]) -> str:
    heads = ["model", "queries", "keys", "absorbed, us", "expanded, us", "times", "attention, us", "TFLOP/s", "error"]
    rows = [
        f"| {one.model} | {one.queries:,} | {one.keys:,} | {one.absorbed:,.0f} | {one.expanded:,.0f} "
        f"| {one.absorbed / one.expanded:.1f} | {one.attention:,.0f} | {one.tflops:.0f} | {one.error:.1e} |"
        for one in figures
    ]
    return "\n".join(["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latent_kernels", description=__doc__)
    parser.add_argument("--only", default="", help="models whose name begins so")
    parser.add_argument("--memory", type=int, default=MEMORY >> 20, help="MiB of expanded keys and values")
    parser.add_argument("--bounds", action="store_true", help="short chunks alone, all of which are expanded")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the figures")
    parser.add_argument("--commit", default="", help="of this tree, where git cannot tell: in a copy")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    figures, memory = [], options.memory << 20
    cases = [(count, count) for count in CHUNKS] + [(count, CACHED + count) for count in CHUNKS]
    shortest = LONG
    if options.bounds:
        cases = [(count, cached + count) for cached in (0, 2048, CACHED, 4 * CACHED) for count in (32, 64, 128, 192)]
        shortest = 1
    models = [model for model in MODELS if model.name.startswith(options.only)]
    every = *MIXTURES, *([case] for case in cases)
    compile_all(Step(model, rows, shortest) for model in models for rows in every)
    for model in models:
        absorbed, expanded = check(model)
        print(f"{model.name}: errors {absorbed:.1e} absorbed, {expanded:.1e} expanded", flush=True)
        figures += [measure(model, count, context, memory, shortest) for count, context in cases]
    report.write(options.output, "latent_kernels", {"memory": memory, "figures": figures}, arguments, options.commit)
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
