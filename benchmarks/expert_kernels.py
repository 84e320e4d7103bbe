"""Products with experts, part by part, on one GPU: `python -m benchmarks.expert_kernels`.

Layers of Qwen3-30B-A3B and Mixtral-8x7B, whole or as one of `--ranks` has them, with random routes: time, bytes, FLOPs
and the share of the chip's limit. Of the experts' weights those count that the routes go to, once each. `--sweep` times
other tilings of both products; the distance is that of a result from the product's own. Calls stand in a CUDA graph and
go round routes and inputs of their own, so that neither launches nor the cache are measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from msgspec.structs import replace
from torch import Tensor

from benchmarks.linear_kernels import Clock, Figure, figure, record, text
from penstock.kernels.chip import chip_of
from penstock.kernels.experts import expert_mlp, route
from penstock.kernels.experts_triton import multiply_sorted
from penstock.kernels.linear import linear
from penstock.kernels.linear_tilings import ExpertTiling, Product, Tiling, describe, ruled
from penstock.kernels.records import Routes, Routing
from penstock.kernels.routing_triton import sort_pairs

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 8192)
ROUNDS = 6  # of other routes and inputs
BYTES = 2  # of a number


class Model(NamedTuple):
    """A layer's experts."""

    name: str
    experts: int
    chosen: int
    width: int
    hidden: int


MODELS = (Model("qwen", 128, 8, 768, 2048), Model("8x7b", 8, 2, 14336, 4096))


def share(model: Model, ranks: int, expert_parallel: bool) -> tuple[int, int]:
    """Experts and width that one of so many ranks has."""
    return (model.experts // ranks, model.width) if expert_parallel else (model.experts, model.width // ranks)


def work(model: Model, tokens: int, pairs: int, used: int, width: int) -> tuple[int, int]:
    """Bytes and FLOPs of tokens that make so many pairs with so many experts of such a width."""
    weights = 3 * used * width * model.hidden
    return BYTES * (weights + 2 * tokens * model.hidden), 6 * pairs * width * model.hidden


def candidates(tokens: int, model: Model) -> list[ExpertTiling]:
    """Tilings worth trying: both products of a form are of one kind, since they share their rows."""
    mean = tokens * model.chosen / model.experts
    found: list[ExpertTiling] = []
    low = (32, 128, 4, 4), (32, 128, 4, 6), (64, 64, 4, 4), (64, 64, 4, 8), (64, 128, 4, 4), (128, 64, 4, 5)
    tall = (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (128, 64, 8, 4), (128, 64, 4, 4)
    high = (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 4), (64, 128, 8, 3)
    if mean <= 16:
        found += [paired(Tiling(rows, *form, swap_ab=True)) for rows in (8, 16, 32) for form in low]
    if 2 <= mean <= 64:
        found += [paired(Tiling(64, *form, tma=boxes)) for form in tall for boxes in (False, True)]
    if mean >= 16:
        found += [paired(Tiling(128, *form, tma=boxes)) for form in high for boxes in (False, True)]
    return list(dict.fromkeys(found))


def paired(gate_up: Tiling) -> ExpertTiling:
    """Tiles of the second product are twice as wide: it has no gates."""
    return ExpertTiling(gate_up, replace(gate_up, outputs=2 * gate_up.outputs))


def name_of(tiling: ExpertTiling) -> str:
    return describe(tiling.gate_up)


class Layer:
    """One rank's experts and router, inputs and routes of several rounds."""

    def __init__(self, model: Model, ranks: int, expert_parallel: bool, device: str = "cuda") -> None:
        self.model = model
        self.held, self.width = share(model, ranks, expert_parallel)
        shapes = (self.held, 2 * self.width, model.hidden), (self.held, model.hidden, self.width)
        self.gate_up, self.down = (
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=shape[2] ** -0.5) for shape in shapes
        )
        self.router = torch.randn(model.experts, model.hidden, device=device).mul_(model.hidden**-0.5).bfloat16()
        self.inputs: list[Tensor] = []
        self.routes: list[Routes] = []

    def take(self, tokens: int) -> None:
        """Have rounds of so many tokens."""
        shape, device = (tokens, self.model.hidden), self.router.device
        self.inputs = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(ROUNDS)]
        self.routes = [self.route(at) for at in range(ROUNDS)]

    def route(self, at: int) -> Routes:
        return route(linear(self.inputs[at % ROUNDS], self.router), Routing(self.model.chosen, normalised=True))

    def sort(self, at: int) -> object:
        return sort_pairs(self.routes[at % ROUNDS].experts, 0, self.held, 16)

    def run(self, at: int) -> Tensor:
        return expert_mlp(self.inputs[at % ROUNDS], self.routes[at % ROUNDS], self.gate_up, self.down)

    def cut(self, at: int, tiling: ExpertTiling) -> Tensor:
        x, routes = self.inputs[at % ROUNDS], self.routes[at % ROUNDS]
        return multiply_sorted(x, routes, self.gate_up, self.down, 0, tiling)

    def work(self, tokens: int) -> tuple[int, int]:
        """Of a round, on average."""
        pairs = used = 0
        for routes in self.routes:
            held = routes.experts[routes.experts < self.held]
            pairs += held.numel()
            used += int(held.bincount().count_nonzero())
        return work(self.model, tokens, pairs // ROUNDS, -(-used // ROUNDS), self.width)


def measure(clock: Clock, layer: Layer, tokens: int, sweep: bool) -> Iterator[Figure]:
    """Of a layer at so many tokens: its parts, the product's own choice first among the ways of the products."""
    model = layer.model
    layer.take(tokens)
    routed = BYTES * model.hidden * (tokens + model.experts), 2 * tokens * model.hidden * model.experts
    sorted_bytes = 2 * 4 * tokens * model.chosen

    def one(product: str, way: str, call: Callable[[int], object], size: tuple[int, int], distance: float) -> Figure:
        return figure(
            size, clock.time(call, ROUNDS), model=model.name, product=product, rows=tokens, way=way,
            chosen=way == "own", distance=distance,
        )  # fmt: skip

    yield one("routes", "own", layer.route, routed, 0.0)
    yield one("sorting", "own", layer.sort, (sorted_bytes, 0), 0.0)
    size, own = layer.work(tokens), layer.run(0).double()

    def distance(found: Tensor) -> float:
        return float((found.double() - own).norm() / own.norm())

    yield one("experts", "own", layer.run, size, 0.0)
    for tiling in candidates(tokens, model) if sweep else ():

        def call(at: int, tiling: ExpertTiling = tiling) -> Tensor:
            return layer.cut(at, tiling)

        try:
            far = distance(call(0))
        except triton.runtime.errors.OutOfResources:  # more shared memory than the chip has
            continue
        assert far < 0.02, f"{tiling} is wrong"
        yield one("experts", name_of(tiling), call, size, far)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expert_kernels")
    parser.add_argument("--sweep", action="store_true", help="every tiling worth trying")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="of a step, with commas")
    parser.add_argument("--ranks", type=int, default=1, help="that share a layer, of which one is measured")
    parser.add_argument("--expert-parallel", action="store_true", help="each has whole experts")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/expert_kernels.json"))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    clock = Clock()
    figures: list[Figure] = []
    for model in MODELS:
        layer = Layer(model, options.ranks, options.expert_parallel)
        for tokens in map(int, options.tokens.split(",")):
            product = Product(layer.width, model.hidden, torch.bfloat16, experts=model.experts)
            plan = ruled(product, chip_of(torch.device("cuda")), invariant=False)
            chosen = plan.way(tokens * model.chosen / model.experts)
            print(f"{model.name}, {tokens} tokens: {describe(chosen)}", flush=True)
            for found in measure(clock, layer, tokens, options.sweep):
                figures.append(found)
                print(text(found), flush=True)
        del layer
    record(figures, options.output, "expert_kernels", arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
