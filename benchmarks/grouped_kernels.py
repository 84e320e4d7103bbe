"""Products with weights of 4 bits in groups of 128, on one GPU: `python -m benchmarks.grouped_kernels`.

The four products of an 8B layer in every way that tuning may try, beside the rule of the general kernels ("plan", which
serves where there is no Gluon) and cuBLAS in bfloat16. Each way is held to double precision, then timed in a CUDA graph
over weights that do not stay in the cache. Then the products and norms of a layer in a row: by the general kernels, in
bfloat16, by the rules as they are, and by the fastest ways.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from benchmarks import report
from penstock.kernels.chip import Chip
from penstock.kernels.grouped_tilings import WideTiling
from penstock.kernels.linear_tilings import Product, Way, candidates, choose_grouped_tiling, fitted, ruled

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
FORM = "int4-128-bf16"
SHAPES = {
    "qkv": Product(6144, 4096, torch.bfloat16, weight=FORM),
    "output": Product(4096, 4096, torch.bfloat16, weight=FORM),
    "gate_up": Product(14336, 4096, torch.bfloat16, gated=True, weight=FORM),
    "down": Product(4096, 14336, torch.bfloat16, weight=FORM),
}
OUTLAST = 200 << 20  # bytes of weights before one is read again
CALLS = 12
MOST_OFF = 0.01  # relative distance from the exact product
FILE = Path("benchmarks/results/h200/grouped_kernels.json")


class Named(NamedTuple):
    """A way by its name in the file."""

    name: str
    way: Way
    dense: bool = False  # by a weight in bfloat16


CUBLAS = Named("cublas", None, dense=True)


def ways_of(shape: str, rows: int, chip: Chip) -> list[Named]:
    """The general rule first, then cuBLAS, what the rules choose, and what tuning tries."""
    product = SHAPES[shape]
    general = fitted(choose_grouped_tiling(rows, product, chip, invariant=False), product, chip)
    others = dict.fromkeys((ruled(product, chip, invariant=False).way(rows), *candidates(product, rows, chip)))
    return [Named("plan", general), CUBLAS, *(Named(name_of(way), way) for way in others if way not in (None, general))]


def name_of(way: Way) -> str:
    kind = "wide" if isinstance(way, WideTiling) else "tile"
    return f"{kind} " + "x".join(str(int(size)) for size in msgspec.structs.astuple(way))  # type: ignore[arg-type]


class Bench:
    """Weights and rows of one shape on the GPU."""

    def __init__(self, shape: str) -> None:
        from penstock.kernels.grouped_linear import planes_of
        from penstock.kernels.quantized import GroupedWeight

        self.product = SHAPES[shape]
        inputs, self.gated = self.product.inputs, self.product.gated
        outputs = self.product.width * (2 if self.gated else 1)
        torch.manual_seed(outputs + inputs)
        size = outputs * inputs // 2
        self.weights = []
        for at in range(max(2, min(24, -(-OUTLAST // size)))):
            values = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device="cuda")
            scales = ((torch.rand(outputs, inputs // 128, device="cuda") + 0.5) * inputs**-0.5 / 4).bfloat16()
            weight = GroupedWeight(4, 128, values, scales)
            if at == 0:
                self.exact = weight.dequantized(torch.float32).double()
            planes = planes_of(weight)
            assert planes is not None
            self.weights.append(planes)
        self.dense = [self.exact.bfloat16() for _ in range(max(2, min(8, -(-OUTLAST // (4 * size)))))]

    def case(self, rows: int) -> tuple[Tensor, Tensor]:
        """Rows and their exact product."""
        x = torch.randn(rows, self.product.inputs, device="cuda").bfloat16()
        product = x.double() @ self.exact.T
        if self.gated:
            gate, up = product.bfloat16().double().chunk(2, dim=1)
            product = gate / (1 + (-gate).exp()) * up
        return x, product

    def call(self, x: Tensor, named: Named, at: int) -> Tensor:
        from penstock.kernels.grouped_linear_triton import multiply_by
        from penstock.kernels.linear import gated_linear, linear

        if named.dense:
            dense = self.dense[at % len(self.dense)]
            found = gated_linear(x, dense) if self.gated else linear(x, dense)
            assert isinstance(found, Tensor)
            return found
        return multiply_by(named.way, x, self.weights[at % len(self.weights)], None, gated=self.gated)


class Layer:
    """The products of a layer with norms before them."""

    def __init__(self, benches: Mapping[str, Bench], rows: int) -> None:
        self.benches = benches
        self.x, self.residual = (torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.norm = torch.ones(4096, dtype=torch.bfloat16, device="cuda")

    def run(self, ways: Mapping[str, Named], at: int) -> Tensor:
        from penstock.kernels.norm import add_norm

        x, residual = add_norm(self.x, self.residual, self.norm, 1e-5)
        qkv = self.benches["qkv"].call(x, ways["qkv"], at)
        x = self.benches["output"].call(qkv[:, :4096].contiguous(), ways["output"], at)
        x, _ = add_norm(x, residual, self.norm, 1e-5)
        return self.benches["down"].call(self.benches["gate_up"].call(x, ways["gate_up"], at), ways["down"], at)


def calls_of(benches: Mapping[str, Bench], rows: Sequence[int], chip: Chip) -> Iterator[Callable[[], object]]:
    """One of every way."""
    for shape, bench in benches.items():
        for count in rows:
            x = torch.zeros(count, bench.product.inputs, dtype=torch.bfloat16, device="cuda")
            for named in ways_of(shape, count, chip):
                yield partial(bench.call, x, named, 0)


def measured(clock: Any, bench: Bench, rows: int, ways: Sequence[Named]) -> Iterator[tuple[Named, dict[str, Any]]]:
    """Time and relative error of each way, or why it has none."""
    x, exact = bench.case(rows)
    for named in ways:
        try:
            fewer = x[: max(1, rows - 3)]  # a tile that is not full
            errors = [
                float((bench.call(some, named, 0).double() - exact[: len(some)]).norm() / exact[: len(some)].norm())
                for some in (x, x, fewer)  # again: counters are set back
            ]
            if not max(errors) <= MOST_OFF:
                yield named, {"problem": f"it is {max(errors):.4f} off"}
                continue
            taken = min(clock.time(lambda at: bench.call(x, named, at), CALLS) for _ in range(2))  # noqa: B023
            yield named, {"us": taken, "error": max(errors)}
        except Exception as error:  # guard: a compiler or driver fails in any way, and the others are still wanted
            yield named, {"problem": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]}


def layers_of(figures: Sequence[Mapping[str, Any]], rows: int, chip: Chip) -> dict[str, dict[str, Named]]:
    """The ways of a layer's products: by the general rule, dense, by the rules as they are, and the fastest."""
    found: dict[str, dict[str, Named]] = {"plan": {}, "bfloat16": {}, "served": {}, "best": {}}
    for shape, product in SHAPES.items():
        ways = {named.name: named for named in ways_of(shape, rows, chip)}
        own = [one for one in figures if (one["rows"], one["shape"]) == (rows, shape) and "us" in one]
        times = {one["way"]: one["us"] for one in own}
        found["plan"][shape], found["bfloat16"][shape] = ways["plan"], CUBLAS
        found["served"][shape] = Named("served", ruled(product, chip, invariant=False).way(rows))
        found["best"][shape] = ways[min((name for name in times if name != "cublas"), key=times.__getitem__)]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grouped_kernels")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="batch sizes, with commas")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    from benchmarks.kernels import compiled
    from benchmarks.linear_kernels import Clock
    from penstock.kernels.chip import chip_of

    chip, rows = chip_of(torch.device("cuda", 0)), [int(one) for one in options.rows.split(",")]
    figures: list[dict[str, Any]] = []
    benches = {shape: Bench(shape) for shape in SHAPES}
    compiled(calls_of(benches, rows, chip))
    clock = Clock()
    with torch.inference_mode():
        for count in rows:
            for shape, bench in benches.items():
                for named, taken in measured(clock, bench, count, ways_of(shape, count, chip)):
                    figures.append({"rows": count, "shape": shape, "way": named.name, **taken})
                    print(count, shape, named.name, taken, flush=True)
            layer = Layer(benches, count)
            for label, ways in layers_of(figures, count, chip).items():
                taken = {"us": clock.time(lambda at: layer.run(ways, at), CALLS)}  # noqa: B023
                figures.append({"rows": count, "shape": "layer", "way": label, **taken})
                print(count, "layer", label, taken, flush=True)
    report.write(options.output, "grouped_kernels", {"figures": figures}, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
