"""Finds ways for products by the time of whole layers: `python -m benchmarks.layer_plans --weights fp8 --rows 64`.

Some layers of 8B stand in a CUDA graph in the order of a decode step, with pages of their own and the bounds of a
captured graph. One product after another takes each of its ways while the others stay as they are, and keeps the one
with which the layers are fastest. `penstock tune` times each product by itself, which is what a start has time for, and
a product that is fastest alone may delay the next one. What comes out here stands in kernels/measured/h200.json.

Every way is held to a product in fp32 first. `--without` times the layers with a part of them left out, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.kernels import compiled, replayed
from benchmarks.linear_kernels import Clock
from benchmarks.linear_shapes import MODELS, products
from penstock.engine_core.execution.product_bench import scaled_weight
from penstock.kernels.attention import paged_attention, prepare_attention
from penstock.kernels.attention_device import arrival_counters
from penstock.kernels.chip import Chip, chip_of
from penstock.kernels.linear import Operand, gated_linear, linear, rows_wanted
from penstock.kernels.linear_plans import MeasuredPlan, MeasuredTable, Plans, plans_of
from penstock.kernels.linear_tilings import Product, SplitTiling, Way, candidates, describe, fits
from penstock.kernels.linear_triton import multiply_by
from penstock.kernels.norm import add_norm, add_norm_rounded
from penstock.kernels.quantize import quantize
from penstock.kernels.quantized import Float8Weight, RowFormat, Rows
from penstock.kernels.quantized_linear import multiply_quantized_by
from penstock.kernels.records import AttentionBatch, AttentionOptions, Rotation
from penstock.kernels.rope import rotate_and_store

LAYERS = 8
BLOCK = 16
BOUND = 40960  # keys of a row that a graph has room for
CONTEXTS = {1: 256, 8: 640, 16: 640, 32: 640, 64: 640, 128: 384, 256: 384}  # keys of a row, by rows
FEW = 16  # keys of a row of any more, which stand for a prompt
NAMES = ("qkv", "output", "gate_up", "down")
PARTS = ("rounding", "norm", "rope", "attention")
TOLERANCE = 0.02  # relative distance from the product in fp32
EPS = 1e-5


class Scene:
    """Layers of 8B at one number of rows."""

    def __init__(self, kind: str, layers: int, device: torch.device) -> None:
        self.kind, self.layers, self.device = kind, layers, device
        self.model = MODELS[0]
        shapes = dict(zip(NAMES, products(self.model), strict=False))
        self.products = {
            name: Product(one.width, one.inputs, torch.bfloat16, one.gated, 0, kind) for name, one in shapes.items()
        }
        self.weights = [
            {name: self.weight(one.outputs, one.inputs) for name, one in shapes.items()} for _ in range(layers)
        ]
        self.gains = torch.ones(self.model.hidden, dtype=torch.bfloat16, device=device)
        self.formats = {name: rows_wanted(weight) for name, weight in self.weights[0].items()}
        self.options = AttentionOptions(self.model.dim**-0.5)
        self.without = ""  # one of PARTS

    def weight(self, outputs: int, inputs: int) -> Operand:
        if self.kind:
            return scaled_weight(self.kind, (outputs, inputs), self.device)
        return torch.empty(outputs, inputs, dtype=torch.bfloat16, device=self.device).normal_(std=0.02)

    def take(self, rows: int, context: int) -> None:
        """So many rows with contexts of about so many keys."""
        model, device = self.model, self.device
        wide = -(-(context + BLOCK) // BLOCK)
        lengths = context - torch.arange(rows, dtype=torch.int32, device=device) % BLOCK
        table = torch.zeros(rows, BOUND // BLOCK, dtype=torch.int32, device=device)
        table[:, :wide] = torch.randperm(rows * wide, device=device).int().view(rows, wide) + 1
        line = torch.arange(rows + 1, dtype=torch.int32, device=device)
        last = lengths.long() - 1
        slots = table.gather(1, (last // BLOCK)[:, None])[:, 0].long() * BLOCK + last % BLOCK
        self.rows = rows
        self.batch = partial(
            AttentionBatch, line, lengths, line[:-1], table, slots, 1, BOUND, arrivals=arrival_counters(device)
        )
        made = partial(torch.randn, dtype=torch.bfloat16, device=device)
        shape = rows * wide + 1, BLOCK, model.kv_heads, model.dim
        self.pages = [(made(shape), made(shape)) for _ in range(self.layers)]
        angles = torch.rand(rows, 1, model.dim, device=device) * 6
        self.rotation = Rotation(angles.cos(), angles.sin())
        self.x, self.residual = made(rows, model.hidden), made(rows, model.hidden)
        self.given = {name: self.rows_of(name) for name in NAMES}
        self.attended = made(rows, model.heads, model.dim)

    def rows_of(self, name: str) -> Rows:
        """Rows of a product that nobody has seen, as its kernels take them."""
        x = torch.randn(self.rows, self.products[name].inputs, device=self.device).bfloat16()
        form = self.formats[name]
        return x if form is None else quantize(x, form)

    def join(self, x: Tensor, residual: Tensor, name: str) -> tuple[Rows, Tensor]:
        form: RowFormat | None = self.formats[name]
        if self.without == "norm":
            return (x if form is None else self.given[name]), residual
        if form is None:
            return add_norm(x, residual, self.gains, EPS)
        return add_norm_rounded(x, residual, self.gains, EPS, form)

    def attend(self, fused: Tensor, pages: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        model = self.model
        if self.without == "attention":
            return self.attended
        q, k, v = fused.view(self.rows, -1, model.dim).split((model.heads, model.kv_heads, model.kv_heads), dim=1)
        prepare_attention(q, pages[0], batch, self.options)
        if self.without != "rope":
            q = rotate_and_store(q, k, v, self.rotation, *pages, batch.slot_mapping)
        return paged_attention(q, *pages, batch, self.options)

    def rounded(self, x: Rows, name: str) -> Rows:
        """x, or other rows where roundings are left out."""
        return self.given[name] if self.without == "rounding" and self.kind and isinstance(x, Tensor) else x

    def run(self) -> Tensor:
        x, residual, batch = self.x, self.residual, self.batch()
        for weights, pages in zip(self.weights, self.pages, strict=True):
            normed, residual = self.join(x, residual, "qkv")
            attended = self.attend(linear(normed, weights["qkv"]), pages, batch)
            x = linear(self.rounded(attended.flatten(1), "output"), weights["output"])
            normed, residual = self.join(x, residual, "gate_up")
            inner = gated_linear(normed, weights["gate_up"], rows=self.formats["down"])
            x = linear(self.rounded(inner, "down"), weights["down"])
        return x

    def call(self, name: str, way: Way, rows: Rows) -> Tensor:
        """One product in one way."""
        weight, gated = self.weights[0][name], self.products[name].gated
        if isinstance(weight, Float8Weight):
            found = multiply_quantized_by(way, rows, weight, None, gated=gated)
        else:
            assert isinstance(weight, Tensor)
            assert isinstance(rows, Tensor)
            found = multiply_by(way, rows, weight, None, gated=gated)
        assert isinstance(found, Tensor)
        return found

    def error(self, name: str, way: Way) -> float:
        """Of a way, against fp32."""
        rows, weight = self.rows_of(name), self.weights[0][name]
        plain = rows.float() if isinstance(rows, Tensor) else rows.values.float() * rows.scales
        assert isinstance(weight, Tensor | Float8Weight)
        exact = plain @ (weight.float() if isinstance(weight, Tensor) else weight.dequantized(torch.float32)).T
        if self.products[name].gated:
            gate, up = exact.chunk(2, dim=1)
            exact = gate * gate.sigmoid() * up
        return ((self.call(name, way, rows).float() - exact).norm() / exact.norm()).nan_to_num(9.0).item()


def ways_of(product: Product, rows: int, chip: Chip) -> list[Way]:
    """What `penstock tune` tries, and more ways to share inputs."""
    found: list[Way] = [None, *candidates(product, rows, chip)]
    if product.weight and rows <= 64:
        height = max(8, 1 << (rows - 1).bit_length())
        found += (SplitTiling(height, splits, stages) for splits in (1, 2, 3, 4) for stages in (2, 3, 4))
    return [way for way in dict.fromkeys(found) if fits(way, product, chip)]


def set_ways(plans: Plans, scene: Scene, ways: dict[str, Way]) -> None:
    """The ways of these products from now on."""
    table = (
        MeasuredPlan(one.width, one.inputs, "bfloat16", ((scene.rows, ways[name]),), one.gated, weight=one.weight)
        for name, one in scene.products.items()
    )
    plans.learn(MeasuredTable(plans.chip.name, "", tuple(table)))


def first_calls(kind: str, batches: Sequence[int], device: torch.device) -> Iterator[Callable[[], object]]:
    """Of all kernels; none works long."""
    scene = Scene(kind, 1, device)
    for rows in batches:
        scene.take(rows, FEW)
        for name, product in scene.products.items():
            rows_of = scene.given[name]
            yield from (partial(scene.call, name, way, rows_of) for way in ways_of(product, rows, chip_of(device)))
        yield scene.run


def right(scene: Scene) -> dict[str, list[Way]]:
    """The ways whose results are right; others are named."""
    found: dict[str, list[Way]] = {name: [] for name in NAMES}
    for name, product in scene.products.items():
        for way in ways_of(product, scene.rows, chip_of(scene.device)):
            try:
                error = scene.error(name, way)
            except Exception as problem:  # guard: a compiler or driver fails in any way
                print(f"   failed: {name} {describe(way)}: {str(problem)[:150]!r}", flush=True)
                continue
            if error <= TOLERANCE:
                found[name].append(way)
            else:
                print(f"   wrong: {name} {describe(way)}: {error:.4f} off", flush=True)
    return found


def listed(ways: dict[str, Way]) -> str:
    return ", ".join(f"{name} {describe(way)}" for name, way in ways.items())


class Search:
    """For the ways of one number of rows with which a layer is fastest."""

    def __init__(self, clock: Clock, plans: Plans, scene: Scene) -> None:
        self.clock, self.plans, self.scene = clock, plans, scene

    def time(self, ways: dict[str, Way]) -> float:
        """Microseconds of a layer."""
        set_ways(self.plans, self.scene, ways)
        self.scene.run()
        graph = self.clock.record(lambda at: self.scene.run(), 1)
        return replayed(graph, 7) / self.scene.layers

    def descend(self, ways: dict[str, Way], choices: dict[str, list[Way]]) -> Iterator[tuple[str, Way, float]]:
        """Each product's ways in turn, and what a layer takes with them; `ways` are the best at the end."""
        best = self.time(ways)
        for name in NAMES:
            for way in choices[name]:
                if way == ways[name]:
                    continue
                taken = self.time(ways | {name: way})
                yield name, way, taken
                if taken < best:
                    best, ways[name] = taken, way

    def find(self, passes: int, parts: Sequence[str]) -> Iterator[dict[str, Any]]:
        """What was timed, the best at the end."""
        scene, rows = self.scene, self.scene.rows
        best: dict[str, Way] = {  # what is in use
            name: self.plans.find((one.width, one.inputs, one.dtype, one.gated, 0, one.weight, False)).way(rows)
            for name, one in scene.products.items()
        }
        good, start = right(scene), self.time(best)
        print(f"== {scene.kind or 'bf16'} {rows} rows, {start:.2f} us a layer: {listed(best)}", flush=True)
        for nth in range(passes):
            for name, way, taken in self.descend(best, good):
                yield {"rows": rows, "pass": nth, "product": name, "way": describe(way), "us": round(taken, 3)}
        taken = self.time(best)
        print(f"   {taken:.2f} us: {listed(best)}", flush=True)
        ways = {name: msgspec.to_builtins(way) for name, way in best.items()}
        yield {"rows": rows, "best": ways, "us": round(taken, 3), "before": round(start, 3)}
        for part in parts:
            scene.without = part
            taken = self.time(best)
            print(f"   without {part} {taken:.2f} us", flush=True)
            yield {"rows": rows, "without": part, "us": round(taken, 3)}
        scene.without = ""


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer_plans")
    parser.add_argument("--weights", default=["fp8"], nargs="+", choices=("", "fp8"), help="format; empty: bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--passes", type=int, default=2, help="over all products")
    parser.add_argument("--without", action="store_true", help="time the layers without some of their parts, too")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0)
    began = time.monotonic()
    for kind in options.weights:
        print(f"{compiled(first_calls(kind, options.rows, device))} kernels compiled, {time.monotonic() - began:.0f} s")
    plans, clock, figures = plans_of(device), Clock(), []
    known = dict(plans.measured)
    for kind in options.weights:
        scene = Scene(kind, LAYERS, device)
        for rows in options.rows:
            scene.take(rows, CONTEXTS.get(rows, FEW))
            plans.measured = dict(known)
            plans.learn(MeasuredTable(plans.chip.name, "", ()))  # what it was asked before is forgotten
            found = Search(clock, plans, scene).find(options.passes, PARTS if options.without else ())
            figures += [{"weights": kind, **one} for one in found]
    if options.output is not None:
        report.write(options.output, "layer_plans", {"figures": figures}, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
