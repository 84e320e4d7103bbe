"""What adapters cost the products of an 8B layer on one GPU: `python -m benchmarks.low_rank_kernels`.

Norms and products of a step's 32 layers, by the weights of eight, are in one CUDA graph. It is timed without adapters
("base"), with kernels of their own before and behind the products ("before"), and as served ("now"). Up to 8 rows are
also multiplied by a product that fetches weights early ("early"), and by tiles that shrink and add ("tiles"). All
products are held to double precision first, and a graph's replays to its first. The last lines say by how many percent
each is slower.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from penstock.kernels.records import AdapterRows, LowRankInputs, LowRankWeight

ROWS, ADAPTERS, RANKS = (1, 2, 4, 8, 16, 64, 256, 1024), (1, 8), (16, 32, 64)
PLACES = 8
LAYERS, TURNS = 8, 4  # of a step; each turn goes through all layers
HIDDEN, WIDTH, KEYS = 4096, 14336, 1024
SHAPES = {
    "qkv": (HIDDEN, (HIDDEN, KEYS, KEYS)), "output": (HIDDEN, (HIDDEN,)), "gate_up": (HIDDEN, (WIDTH, WIDTH)),
    "down": (WIDTH, (HIDDEN,)),
}  # fmt: skip  # inputs, and outputs of each part
WAYS = ("base", "before", "now", "early", "tiles")
FEW = 8  # rows up to which these are ways of their own
MOST_OFF = 0.01  # relative distance from the exact product
REPLAYS, AGAIN = 9, 20
FILE = Path("benchmarks/results/h200/low_rank_kernels.json")


class Case(NamedTuple):
    rows: int
    adapters: int  # that rows have in turns
    rank: int

    @property
    def ways(self) -> tuple[str, ...]:
        return WAYS if self.rows <= FEW else WAYS[:3]


def cases(rows: Sequence[int]) -> list[Case]:
    found = [Case(one, min(adapters, one), rank) for one, adapters, rank in itertools.product(rows, ADAPTERS, RANKS)]
    return list(dict.fromkeys(found))


class Layer:
    """Weights of a layer, and adapters of one rank for each place."""

    def __init__(self, device: str) -> None:
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
        self.weights = {
            name: torch.randn(sum(outputs), inputs, dtype=torch.bfloat16, device=device).mul_(inputs**-0.5)
            for name, (inputs, outputs) in SHAPES.items()
        }
        self.added: dict[str, LowRankWeight] = {}

    def adapt(self, rank: int) -> None:
        from penstock.kernels.low_rank import output_tiles

        self.added = {}
        for name, (inputs, outputs) in SHAPES.items():
            ends, device = list(itertools.accumulate(outputs, initial=0)), self.norm.device
            parts = tuple(map(slice, ends, ends[1:]))
            a = torch.randn(PLACES, len(parts) * rank, inputs, dtype=torch.bfloat16, device=device).mul_(inputs**-0.5)
            b = torch.randn(PLACES, ends[-1], rank, dtype=torch.bfloat16, device=device).mul_(rank**-0.5)
            self.added[name] = LowRankWeight(a, b, parts, output_tiles(parts, rank, device))

    def product(self, name: str, x: Tensor, rows: AdapterRows | None, way: str) -> Tensor:
        from penstock.kernels.linear import gated_linear, linear
        from penstock.kernels.linear_tilings import PipelinedTiling
        from penstock.kernels.linear_triton import multiply_by, pipelined_product, way_of
        from penstock.kernels.low_rank_triton import shrink_rows

        weight, gated = self.weights[name], name == "gate_up"
        added = None if rows is None or way == "base" else LowRankInputs(x, rows, self.added[name])
        if (
            added is not None
            and way == "early"
            and isinstance(found := way_of(x, weight, gated, False, 2), PipelinedTiling)
        ):
            return pipelined_product()(x, weight, None, found, gated=gated, addition=shrink_rows(*added))
        if added is not None and way in ("early", "tiles"):
            return multiply_by(way_of(x, weight, gated, invariant=True), x, weight, None, gated=gated, added=added)
        found = (gated_linear if gated else linear)(x, weight, addition=added)
        assert isinstance(found, Tensor)
        return found

    def exact(self, name: str, x: Tensor, places: Tensor) -> Tensor:
        added = self.added[name]
        found = x.double() @ self.weights[name].double().T
        for place in set(places.tolist()) - {0}:
            own = places == place
            for at, part in enumerate(added.parts):
                shrunk = x[own].double() @ added.a[place - 1, at * added.rank : (at + 1) * added.rank].double().T
                found[own, part] += shrunk @ added.b[place - 1, part].double().T
        if name == "gate_up":
            gate, up = found.bfloat16().double().chunk(2, dim=1)
            return gate / (1 + (-gate).exp()) * up
        return found

    def run(self, x: Tensor, residual: Tensor, rows: AdapterRows | None, way: str) -> tuple[Tensor, Tensor]:
        from penstock.kernels.norm import add_norm

        x, residual = add_norm(x, residual, self.norm, 1e-5)
        qkv = self.product("qkv", x, rows, way)
        x, residual = add_norm(self.product("output", qkv[:, :HIDDEN], rows, way), residual, self.norm, 1e-5)
        return self.product("down", self.product("gate_up", x, rows, way), rows, way), residual


def rows_of(places: Tensor, way: str) -> AdapterRows | None:
    """Sorted as they are served; of kernels before and behind the product they have no counters."""
    from penstock.kernels.low_rank import adapter_rows

    if way == "base":
        return None
    found = adapter_rows(places, PLACES)
    return found._replace(counts=None, turns=None, arrivals=None) if way == "before" else found


def places_of(case: Case, device: torch.device, base: bool = False) -> Tensor:
    """base: every fifth row has none."""
    row = torch.arange(case.rows, dtype=torch.int32, device=device)
    return (row % case.adapters + 1).masked_fill((row % 5 == 4) & base, 0)


def calls_of(layer: Layer, wanted: Sequence[Case]) -> Iterator[Callable[[], object]]:
    """One of every way, with the layer adapted for it."""
    for rank in dict.fromkeys(case.rank for case in wanted):
        layer.adapt(rank)
        for case in wanted:
            x = torch.zeros(case.rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
            for way in case.ways if case.rank == rank else ():
                yield partial(layer.run, x, x, rows_of(places_of(case, x.device), way), way)


def off(layer: Layer, case: Case, way: str) -> float:
    """The largest relative error of a product, with rows of the base model among those of adapters, and without."""
    errors, device = [], layer.norm.device
    for places in (places_of(case, device), places_of(case, device, base=True)):
        for name, (inputs, _) in SHAPES.items():
            x = torch.randn(case.rows, inputs, dtype=torch.bfloat16, device=device)
            found, exact = layer.product(name, x, rows_of(places, way), way), layer.exact(name, x, places)
            errors.append(float(((found.double() - exact).norm(dim=1) / exact.norm(dim=1)).max()))
    return max(errors)


def timed(clock: Any, layers: Sequence[Layer], case: Case, way: str) -> dict[str, Any]:
    """Microseconds of a layer, and how many of the replays have other bits than the first."""
    from benchmarks.kernels import replayed

    places = places_of(case, layers[0].norm.device)
    start = [torch.randn(case.rows, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    held = torch.empty_like(start[0])

    def step(at: int) -> None:
        x, residual, rows = start[0].clone(), start[1].clone(), rows_of(places, way)
        for layer in (*layers,) * TURNS:
            x, residual = layer.run(x, residual, rows, way)
        held.copy_(x)

    step(0)
    graph = clock.record(step, 1)
    taken = replayed(graph, REPLAYS) / (TURNS * len(layers))
    first, others = held.clone(), 0
    for _ in range(AGAIN):
        graph.replay()
        others += int(not torch.equal(held, first))
    return {"us": round(taken, 2), "others": others}


def measured(case: Case, way: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A figure, or why there is none."""
    told: dict[str, Any] = {**case._asdict(), "way": way}
    try:
        told |= call()
    except Exception as error:  # guard: a compiler or driver fails in any way, and the others are still wanted
        told["problem"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    print(told, flush=True)
    return told


def table(figures: Sequence[dict[str, Any]]) -> str:
    """A line for each case: microseconds of base, then percent more."""
    lines = [f"{'rows':>5}{'adapters':>9}{'rank':>5}{'base us':>9}" + "".join(f"{way:>9}" for way in WAYS[1:])]
    for case in dict.fromkeys(Case(one["rows"], one["adapters"], one["rank"]) for one in figures):
        times = {one["way"]: one["us"] for one in figures if case == (one["rows"], one["adapters"], one["rank"])
                 and "us" in one}  # fmt: skip
        base = times.get("base")
        cells = [f"{100 * (times[way] / base - 1):+8.1f}%" if base and way in times else f"{'':9}" for way in WAYS[1:]]
        lines.append(f"{case.rows:5}{case.adapters:9}{case.rank:5}{base or 0:9.2f}" + "".join(cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.low_rank_kernels")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="batch sizes, with commas")
    parser.add_argument("--limit", type=float, default=170, help="seconds after which it ends, wherever it stands")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    from benchmarks.kernels import compiled
    from benchmarks.linear_kernels import Clock

    faulthandler.dump_traceback_later(options.limit, exit=True)
    wanted = cases([int(one) for one in options.rows.split(",")])
    figures: list[dict[str, Any]] = []
    torch.manual_seed(0)
    with torch.inference_mode():
        layers = [Layer("cuda") for _ in range(LAYERS)]
        compiled(calls_of(layers[0], wanted))
        clock = Clock()
        for rank in RANKS:
            for layer in layers:
                layer.adapt(rank)
            for case in (one for one in wanted if one.rank == rank):
                for way in case.ways:

                    def call(case: Case = case, way: str = way) -> dict[str, Any]:
                        error = 0.0 if way == "base" else off(layers[0], case, way)
                        found = timed(clock, layers, case, way) if error <= MOST_OFF else {"problem": "wrong"}
                        return {"error": round(error, 5), **found}

                    figures.append(measured(case, way, call))
                report.write(options.output, "low_rank_kernels", {"figures": figures}, arguments)
    print(table(figures), flush=True)
    return int(any("problem" in one or one.get("others") for one in figures))


if __name__ == "__main__":
    sys.exit(main())
