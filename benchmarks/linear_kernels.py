"""Products with weights, alone and in the sequence of a decode step, on one GPU: `python -m benchmarks.linear_kernels`.

Each product of two models' layers at the batch sizes that are served: time, bytes, FLOPs and the share of the chip's
limit, for cuBLAS and for the own choice, or with `--sweep` for every tiling worth trying. Then the layers of a model
in one CUDA graph: as plain torch functions with cuBLAS, by the product's kernels, by them without overlapping launches,
and invariant. Weights go round copies that are larger together than the cache.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import triton
from torch import Tensor
from torch.nn import functional

from benchmarks import report
from benchmarks.kernels import replayed
from benchmarks.limits import CHIPS
from benchmarks.linear_shapes import MODELS, Model, Product, candidates, products, work
from penstock.kernels.activation import activate
from penstock.kernels.attention import paged_attention
from penstock.kernels.chip import Chip, chip_of
from penstock.kernels.linear import gated_linear, linear
from penstock.kernels.linear_plans import plans_of
from penstock.kernels.linear_tilings import Tiling, Way, describe
from penstock.kernels.linear_triton import multiply_by
from penstock.kernels.norm import add_norm
from penstock.kernels.records import AttentionBatch, AttentionOptions, Rotation
from penstock.kernels.rope import rotate_and_store

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS = (1024, 8192)
CONTEXT, BLOCK = 64, 16  # keys of each row of a decode step: products are the matter here
OUTLAST = 200 << 20  # bytes of weights before one is read again
CALLS, REPLAYS = 6, 5
PROCESSES = 14  # that compile beside each other


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One product, or all products of a model's layers, in one way."""

    model: str
    product: str
    rows: int
    way: str
    chosen: bool  # by the product
    microseconds: float
    bytes: int
    flops: int
    limit: str  # the nearer one: read or matrix
    share: float  # of it
    distance: float = 0.0  # of the result from the plain one, relative


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and on what."""

    chip: str
    torch: str
    triton: str
    reduced_sums: bool  # whether cuBLAS may add parts of bf16 products in bf16
    figures: list[Figure]


def figure(work: tuple[int, int], microseconds: float, **named: Any) -> Figure:
    """The figure of so many bytes and FLOPs done in that time."""
    size, flops = work
    chip = CHIPS["H200"]
    read, multiplied = size / chip.bytes_per_second, flops / chip.flops_per_second
    return Figure(
        microseconds=round(microseconds, 2), bytes=size, flops=flops, limit="read" if read > multiplied else "matrix",
        share=round(max(read, multiplied) / (microseconds * 1e-6), 4), **named,
    )  # fmt: skip


def text(one: Figure) -> str:
    return (
        f"{'*' if one.chosen else ' '} {one.model:5}{one.product:12}{one.rows:5} rows {one.way:32}"
        f"{one.microseconds:9.2f} us {one.bytes / 1e6:8.1f} MB {one.flops / 1e9:8.1f} GFLOP"
        f" {100 * one.share:5.1f} % of {one.limit}" + (f", distance {one.distance:.4f}" if one.distance else "")
    )


def call(product: Product, x: Tensor, weight: Tensor, way: Way) -> Tensor:
    """The product in one way; None: cuBLAS."""
    return multiply_by(way, x, weight, None, gated=product.gated)


class Clock:
    """Times calls in CUDA graphs that share one memory pool; garbage is left alone, for collecting it takes longer."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.held = torch.zeros(1, device="cuda")
        self.anchor = self.record(self.touch, 1)  # keeps the pool while others come and go

    def touch(self, at: int) -> None:
        self.kept = self.held.neg()

    def record(self, function: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool)
            try:
                for at in range(calls):
                    function(at)
            finally:
                graph.capture_end()
        return graph

    def time(self, function: Callable[[int], object], calls: int) -> float:
        """Microseconds of one call; the function gets its number."""
        function(0)
        graph = self.record(function, calls)
        return replayed(graph, REPLAYS) / calls


def measure(
    clock: Clock, memory: Tensor, product: Product, rows: int, sweep: bool
) -> Iterator[tuple[str, float, bool]]:
    """Way, microseconds, and whether it is the product's choice."""
    size = product.outputs * product.inputs
    copies = max(1, min(24, -(-OUTLAST // (2 * size))))
    weights = [memory[at * size : (at + 1) * size].view(product.outputs, product.inputs) for at in range(copies)]
    x = torch.randn(rows, product.inputs, dtype=torch.bfloat16, device="cuda")
    plans, key = plans_of(x.device), (product.width, product.inputs, x.dtype, product.gated, 0, "")
    own, fixed = (plans.find((*key, invariant)).way(rows) for invariant in (False, True))
    ways = [None, own, fixed, *(candidates(rows, product.gated) if sweep else ())]
    exact = None
    for tiling in dict.fromkeys(ways):
        name = "cuBLAS" if tiling is None else describe(tiling)

        def one(at: int, tiling: Way = tiling) -> Tensor:
            return call(product, x, weights[at % copies], tiling)

        try:
            found = one(0).float()
            exact = found if exact is None else exact
            assert ((found - exact).norm() / exact.norm()).item() < 0.02, f"{tiling} is wrong"
            yield name + (" invariant" if tiling == fixed else ""), clock.time(one, max(copies, CALLS)), tiling == own
        except triton.runtime.errors.OutOfResources:  # more shared memory than the chip has
            continue


class Layers:
    """All layers of a model at a decode step: weights, pages and a batch of rows with short contexts."""

    def __init__(self, model: Model, rows: int) -> None:
        self.model = model
        self.rows = rows
        made = products(model)[:-1]
        self.weights = [
            [torch.empty(p.outputs, p.inputs, dtype=torch.bfloat16, device="cuda").normal_(std=0.01) for p in made]
            for _ in range(model.layers)
        ]
        self.batch(rows)
        self.norm = torch.ones(model.hidden, dtype=torch.bfloat16, device="cuda")

    def batch(self, rows: int) -> None:
        """Take so many rows."""
        model, wide = self.model, CONTEXT // BLOCK
        self.rows = rows
        line = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        context = torch.full((rows,), CONTEXT, dtype=torch.int32, device="cuda")
        table = torch.arange(rows * wide, dtype=torch.int32, device="cuda").view(rows, wide)
        slots = torch.arange(rows, device="cuda") * CONTEXT + CONTEXT - 1
        self.attention = AttentionBatch(line, context, line[:-1], table, slots, 1, CONTEXT)
        shape = rows * wide, BLOCK, model.kv_heads, model.dim
        self.pages = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        self.rotation = Rotation(*(torch.rand(rows, 1, model.dim, device="cuda") for _ in range(2)))
        self.x, self.residual = (torch.randn(rows, model.hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def attend(self, fused: Tensor) -> Tensor:
        model = self.model
        heads = fused.view(self.rows, -1, model.dim)
        last = model.heads + model.kv_heads
        q, k, v = heads[:, : model.heads], heads[:, model.heads : last], heads[:, last:]
        q = rotate_and_store(q, k, v, self.rotation, self.pages[0], self.pages[1], self.attention.slot_mapping)
        return paged_attention(
            q, self.pages[0], self.pages[1], self.attention, AttentionOptions(model.dim**-0.5)
        ).flatten(1)

    def run(self, invariant: bool = False, attention: bool = False) -> Tensor:
        """By the product's kernels; invariant: the products, and the attention if asked too."""
        x, residual = self.x, self.residual
        self.attention = replace(self.attention, invariant=attention)
        for qkv, output, gate_up, down in self.weights:
            x, residual = add_norm(x, residual, self.norm, 1e-5)
            x = linear(self.attend(linear(x, qkv, invariant=invariant)), output, invariant=invariant)
            x, residual = add_norm(x, residual, self.norm, 1e-5)
            x = linear(gated_linear(x, gate_up, invariant=invariant), down, invariant=invariant)
        return x

    def run_plain(self) -> Tensor:
        """Products by cuBLAS, the gate by itself."""
        x, residual = self.x, self.residual
        for qkv, output, gate_up, down in self.weights:
            x, residual = add_norm(x, residual, self.norm, 1e-5)
            x = functional.linear(self.attend(functional.linear(x, qkv)), output)
            x, residual = add_norm(x, residual, self.norm, 1e-5)
            x = functional.linear(activate(functional.linear(x, gate_up)), down)
        return x


def chip_without_pdl(device: torch.device) -> Chip:
    return replace(chip_of(device), pdl=False)


@contextmanager
def without_overlap() -> Iterator[None]:
    """Every kernel as it would be launched on a GPU before Hopper."""
    with ExitStack() as patches:
        for name in ("activation", "linear", "norm", "rope"):
            patches.enter_context(mock.patch(f"penstock.kernels.{name}_triton.chip_of", chip_without_pdl))
        yield


def sequences(clock: Clock, model: Model, batches: Sequence[int]) -> Iterator[tuple[int, str, float, float]]:
    """Rows, way, microseconds of all layers, and the distance of the result from the plain one."""
    layers = Layers(model, 1)
    for rows in batches:
        layers.batch(rows)
        plain = layers.run_plain().double()

        def single(at: int, invariant: bool = False) -> Tensor:
            with without_overlap():
                return layers.run(invariant)

        ways: dict[str, Callable[[int], Tensor]] = {
            "cuBLAS": lambda at: layers.run_plain(),
            "own": lambda at: layers.run(),
            "own, no overlap": single,
            "invariant products": lambda at: layers.run(invariant=True),
            "the same, no overlap": lambda at: single(at, invariant=True),
            "invariant": lambda at: layers.run(invariant=True, attention=True),
        }
        for name, way in ways.items():
            distance = ((way(0).double() - plain).norm() / plain.norm()).item()
            yield rows, name, clock.time(way, 1), distance


def compile_part(part: list[tuple[int, bool, Way]]) -> None:
    """Compile on a process of its own, into Triton's cache on disk."""
    for rows, gated, tiling in part:
        product = Product("", 512, 512, gated)
        x, weight = (torch.zeros(count, 512, dtype=torch.bfloat16, device="cuda") for count in (rows, product.outputs))
        with suppress(triton.runtime.errors.OutOfResources):
            call(product, x, weight, tiling)
    torch.cuda.synchronize()


def compile_all(batches: Sequence[int]) -> None:
    """Every candidate once, many at a time."""
    jobs: dict[tuple[bool, Way, bool], tuple[int, bool, Way]] = {}
    for rows in batches:
        for gated in (False, True):
            for tiling in candidates(rows, gated):
                fused = gated and (not isinstance(tiling, Tiling) or tiling.gated)
                jobs.setdefault((fused, tiling, rows == 1), (rows, fused, tiling))
    parts = [list(jobs.values())[at::PROCESSES] for at in range(PROCESSES)]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.map(compile_part, parts, chunksize=1)


def measure_layers(clock: Clock, models: Sequence[Model], batches: Sequence[int]) -> Iterator[Figure]:
    for model in models:
        for rows, way, taken, distance in sequences(clock, model, batches):
            found = [work(product, rows) for product in products(model)[:-1]]
            both = model.layers * sum(size for size, _ in found), model.layers * sum(flops for _, flops in found)
            yield figure(
                both, taken, model=model.name, product="all layers", rows=rows, way=way, chosen=way == "own",
                distance=distance,
            )  # fmt: skip


def measure_products(
    clock: Clock, models: Sequence[Model], batches: Sequence[int], sweep: bool
) -> Iterator[list[Figure]]:
    """Each product's ways, the fastest first."""
    memory = torch.empty(640 << 20, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
    for model in models:
        for product in products(model):
            for rows in batches:
                if product.name == "logits" and rows > max(BATCHES):
                    continue  # of a prompt only the last position has logits
                ways = sorted(measure(clock, memory, product, rows, sweep), key=lambda way: way[1])
                yield [
                    figure(
                        work(product, rows), taken, model=model.name, product=product.name, rows=rows, way=way,
                        chosen=own,
                    )
                    for way, taken, own in ways
                ]  # fmt: skip


def notable(one: Figure) -> bool:
    return one.chosen or one.way.startswith("cuBLAS") or one.way.endswith("invariant")


def record(figures: list[Figure], path: Path, benchmark: str, words: Sequence[str] | None) -> None:
    """Write the figures with their chip and libraries."""
    results = Report(
        chip=torch.cuda.get_device_name(), torch=str(torch.__version__), triton=triton.__version__,
        reduced_sums=bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction), figures=figures,
    )  # fmt: skip
    report.write(path, benchmark, results, words)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear_kernels")
    parser.add_argument("--sweep", action="store_true", help="every tiling worth trying")
    parser.add_argument("--rows", default=",".join(map(str, (*BATCHES, *CHUNKS))), help="batch sizes, with commas")
    parser.add_argument("--model", choices=[model.name for model in MODELS], help="one of them alone")
    parser.add_argument("--best", type=int, default=5, help="how many ways of each product are printed at least")
    parser.add_argument("--skip", choices=("layers", "products"), help="one half of it")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/linear_kernels.json"))
    options = parser.parse_args(arguments)
    batches = [int(rows) for rows in options.rows.split(",")]
    models = [model for model in MODELS if options.model in (None, model.name)]
    if options.sweep:
        compile_all(batches)
    gc.freeze()
    gc.disable()
    torch.manual_seed(0)
    clock = Clock()
    figures: list[Figure] = []
    if options.skip != "products":
        for ways in measure_products(clock, models, batches, options.sweep):
            figures += ways
            kept = [one for at, one in enumerate(ways) if at < options.best or notable(one)]
            print("\n".join(text(one) for one in kept), flush=True)
    if options.skip != "layers":
        for one in measure_layers(clock, models, [rows for rows in batches if rows <= max(BATCHES)]):
            figures.append(one)
            print(text(one), flush=True)
    record(figures, options.output, "linear_kernels", arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
