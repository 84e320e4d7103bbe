"""Products with weights of 4 bits in groups of 128, in every way worth trying: `python -m benchmarks.grouped_kernels`.

Each way is held to double precision, then timed in a CUDA graph over weights that do not stay in the cache, with what
serves and with cuBLAS in bfloat16. Then the four products and two norms of a layer in a row, as it serves and by the
best of what was found. A worker process does it all: where a kernel does not end, the worker is killed, and another one
goes on with the next way.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report

ROWS = (1, 8, 16, 32, 64, 128, 256, 1024)
SHAPES = {
    "qkv": (6144, 4096, False), "output": (4096, 4096, False), "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
}  # fmt: skip
OUTLAST = 200 << 20  # bytes of weights before one is read again
PATIENCE = 20.0  # seconds that a way may take
WARMING = 200.0  # and the first one, behind the compilation of all
PROCESSES = 14
REPLAYS = 5
SMS = 132
Way = tuple[str, tuple[Any, ...]]  # kernel, and the fields of its tiling

RINGS = (
    *((16, 4, 4, 2), (16, 4, 4, 3), (16, 4, 4, 4), (16, 8, 8, 2), (16, 2, 2, 4), (16, 2, 2, 8), (16, 1, 1, 8)),
    *((32, 4, 4, 2), (32, 4, 4, 3), (32, 2, 2, 4), (32, 4, 8, 2), (32, 4, 8, 3), (32, 8, 8, 2)),
)  # outputs, parts, warps, stages
WIDES = {
    16: ((64, 4, 4, 16), (128, 8, 4, 16), (128, 4, 4, 16), (256, 8, 3, 16)),
    32: ((64, 4, 4, 8), (128, 8, 3, 8), (128, 4, 3, 8), (256, 8, 3, 12)),
    64: ((64, 4, 4, 8), (128, 8, 3, 6), (128, 4, 3, 6), (256, 8, 3, 8)),
    128: ((64, 4, 3, 5), (128, 8, 3, 8), (128, 4, 2, 4), (256, 8, 2, 6), (256, 8, 3, 6)),
    256: ((128, 8, 2, 4), (128, 8, 3, 4)),
}  # lines, warps, stages of weights and of rows
OLD = (
    *((8, 128, 4, 4, 1, 4), (16, 128, 4, 4, 1, 4), (32, 128, 8, 3, 1, 4), (32, 256, 8, 3, 1, 8), (64, 128, 8, 3, 1, 8)),
    *((64, 256, 8, 3, 1, 1), (64, 256, 8, 3, 1, 4), (64, 256, 8, 3, 1, 8), (64, 256, 8, 3, 1, 4, True)),
)  # tilings of `kernels.grouped_linear_triton` that are not among the product's candidates


def ways_of(rows: int, shape: str) -> list[Way]:
    """What is worth trying: "plan" first, which is what serves."""
    outputs, inputs, gated = SHAPES[shape]
    found: list[Way] = [("plan", ()), ("cublas", ())]
    if rows <= 16:
        height = 8 if rows <= 8 else 16
        found += [("ring", (height, *form)) for form in RINGS if not (gated and form[0] > 16 and form[1] > 4)]
        if rows == 16:
            found += [("ring", (16, 64, 2, 4, 2)), ("ring", (16, 64, 2, 8, 2))]
    if rows >= 8:
        heights = [max(16, rows)] if rows <= 64 else [128] if rows != 256 else [128, 256]
        for height in heights:
            for lines, warps, stages, x_stages in WIDES[height]:
                wide = lines // 2 if gated else lines
                if wide < 16 * warps:
                    continue  # a gate and its up would be sums of two warps
                tiles = -(-rows // height) * -(-outputs // lines)
                for splits in splits_of(tiles, inputs // 256):
                    if splits > 4 and lines * height >= 256 * 128:
                        continue  # sums of so many programs do not fit the registers
                    found.append(("wide", (height, wide, warps, stages, x_stages, splits)))
    found += [("tile", one) for one in OLD if rows <= one[0] < 4 * rows or (rows == 1 and one[0] == 8)]
    return found


def splits_of(tiles: int, blocks: int) -> list[int]:
    """Programs for each tile: as many as fill the device once or twice."""
    fitting = [
        count
        for count in (1, 2, 3, 4, 6, 8, 12)
        if tiles * count <= 2 * SMS + 8 and -(-blocks // count) * (count - 1) < blocks
    ]
    fitting = fitting or [1]
    return sorted({fitting[-1], max((one for one in fitting if tiles * one <= SMS), default=1)})


class Bench:
    """Weights and rows of one shape on the GPU."""

    def __init__(self, shape: str, zeros: bool = False) -> None:
        from penstock.kernels.grouped_linear import planes_of
        from penstock.kernels.quantized import GroupedWeight

        outputs, inputs, self.gated = SHAPES[shape]
        torch.manual_seed(outputs + inputs)
        size = outputs * inputs // 2
        self.copies = max(2, min(24, -(-OUTLAST // size)))
        self.weights = []
        for at in range(self.copies):
            values = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device="cuda")
            scales = ((torch.rand(outputs, inputs // 128, device="cuda") + 0.5) * inputs**-0.5 / 4).bfloat16()
            given = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device="cuda") if zeros else None
            weight = GroupedWeight(4, 128, values, scales, given)
            if at == 0:
                self.exact = weight.dequantized(torch.float32).double()
            planes = planes_of(weight)
            assert planes is not None
            self.weights.append(planes)
        dense = max(2, min(8, -(-OUTLAST // (4 * size))))
        self.dense = [self.exact.bfloat16() for _ in range(dense)]
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}

    def case(self, rows: int) -> tuple[Tensor, Tensor]:
        """Rows and their exact product."""
        if rows not in self.rows:
            x = torch.randn(rows, self.exact.shape[1], device="cuda").bfloat16()
            product = x.double() @ self.exact.T
            if self.gated:
                gate, up = product.bfloat16().double().chunk(2, dim=1)
                product = gate / (1 + (-gate).exp()) * up
            self.rows[rows] = x, product
        return self.rows[rows]

    def call(self, x: Tensor, way: Way, at: int) -> Tensor:
        return multiply(x, self.weights[at % self.copies], self.dense[at % len(self.dense)], way, gated=self.gated)


def multiply(x: Tensor, weight: Any, dense: Tensor, way: Way, *, gated: bool) -> Tensor:
    """The product in one way."""
    from penstock.kernels import grouped_hopper
    from penstock.kernels.grouped_linear_triton import multiply as multiply_planned
    from penstock.kernels.grouped_linear_triton import multiply_planes
    from penstock.kernels.grouped_tilings import GroupedTiling
    from penstock.kernels.linear import gated_linear, linear

    kernel, fields = way
    if kernel == "plan":
        return multiply_planned(x, weight, None, gated=gated, invariant=False)
    if kernel == "cublas":
        return gated_linear(x, dense) if gated else linear(x, dense)
    if kernel == "ring":
        return grouped_hopper.multiply_ring(x, weight, None, grouped_hopper.RingTiling(*fields), gated=gated)
    if kernel == "wide":
        return grouped_hopper.multiply_wide(x, weight, None, grouped_hopper.WideTiling(*fields), gated=gated)
    return multiply_planes(x, weight, None, GroupedTiling(*fields), gated=gated)


class Layer:
    """The products of a layer with norms before them, over weights that do not stay in the cache."""

    def __init__(self, benches: dict[str, Bench], rows: int) -> None:
        self.benches = benches
        self.x, self.residual = (torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.norm = torch.ones(4096, dtype=torch.bfloat16, device="cuda")

    def run(self, ways: dict[str, Way], at: int) -> Tensor:
        from penstock.kernels.norm import add_norm

        def product(name: str, x: Tensor) -> Tensor:
            return self.benches[name].call(x, ways[name], at)

        x, residual = add_norm(self.x, self.residual, self.norm, 1e-5)
        x = product("output", product("qkv", x)[:, :4096].contiguous())
        x, residual = add_norm(x, residual, self.norm, 1e-5)
        return product("down", product("gate_up", x))


def work(pipe: Connection, tasks: Sequence[tuple[int, str, Way]], compiled: bool, layers: Any) -> None:
    """A worker: answers each task with its name, time and error, or why there is none."""
    from benchmarks.linear_kernels import Clock
    from penstock.engine_core.execution.compilation import prewarm
    from penstock.engine_core.execution.product_bench import load_kernels

    benches = {shape: Bench(shape) for shape in dict.fromkeys(shape for _, shape, _ in tasks)}
    if layers is not None:
        benches = {shape: Bench(shape) for shape in SHAPES}
    if not compiled:
        with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
            with prewarm(pool) as found:
                for rows, shape, way in tasks:
                    try:
                        benches[shape].call(benches[shape].case(rows)[0], way, 0)
                    except Exception as error:  # guard: the compiler's; it fails again below
                        print(f"{rows} {shape} {name(way)}: {type(error).__name__}: {error}"[:300], flush=True)
            print(f"{len(found)} kernels to compile", flush=True)
            load_kernels(found, torch.device("cuda", torch.cuda.current_device()))
        print("compiled", flush=True)
    clock = Clock()
    pipe.send("ready")
    with torch.inference_mode():
        for rows, shape, way in tasks:
            pipe.send(measured(clock, benches[shape], rows, way))
        for rows, _, ways in layers or ():
            layer = Layer(benches, rows)
            taken = clock.time(lambda at: layer.run(ways, at), 12)  # noqa: B023
            pipe.send({"us": taken})
    pipe.send("done")
    pipe.recv()


def measured(clock: Any, bench: Bench, rows: int, way: Way) -> dict[str, Any]:
    """The time and the relative error of one way."""
    x, exact = bench.case(rows)
    worst = 0.0
    try:
        fewer = max(1, rows - 3) if way[0] in ("ring", "wide") else rows  # rows of a tile that is not full
        for count in dict.fromkeys((rows, fewer)):
            for _ in range(2):  # again, for counters that were not set back
                found = bench.call(x[:count], way, 0).double()
                error = ((found - exact[:count]).norm() / exact[:count].norm()).item()
                worst = max(worst, error if error == error else 9.0)
        if worst > 0.01:
            return {"error": worst, "problem": f"wrong: {worst:.4f}"}
        taken = min(clock.time(lambda at: bench.call(x, way, at), max(12, bench.copies)) for _ in range(2))
        return {"us": taken, "error": worst}
    except Exception as error:  # guard: a compiler or driver fails in any way, and the others are still wanted
        return {"problem": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]}


class Runner:
    """Keeps a worker at work, and starts another one where it hangs or dies."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.compiled = False

    def results(self, tasks: Sequence[Any], layers: Any = None) -> Iterator[tuple[int, dict[str, Any]]]:
        first, total = 0, len(tasks if layers is None else layers)
        while first < total:
            pipe, other = self.context.Pipe()
            rest = (tasks[first:], self.compiled, None) if layers is None else ((), True, layers[first:])
            worker = self.context.Process(target=work, args=(other, *rest))
            worker.start()
            other.close()
            try:
                assert pipe.poll(WARMING), "the worker was not ready in time"
                assert pipe.recv() == "ready"
                self.compiled = True
                while first < total:
                    if not pipe.poll(PATIENCE):
                        raise EOFError("it does not end")
                    yield first, pipe.recv()
                    first += 1
            except (EOFError, AssertionError) as error:
                yield first, {"problem": f"the worker was ended: {error}"}
                first += 1
            finally:
                worker.kill()
                worker.join()


def name(way: Way) -> str:
    kernel, fields = way
    return kernel + (" " + "x".join(str(int(one)) for one in fields) if fields else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grouped_kernels")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="batch sizes, with commas")
    parser.add_argument("--only", default="", help="kernels, with commas: ring, wide, tile")
    parser.add_argument("--seconds", type=float, default=240, help="after which nothing new is begun")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/grouped_kernels.json"))
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    only = {"plan", "cublas", *filter(None, options.only.split(","))}
    rows = [int(one) for one in options.rows.split(",")]
    tasks = [
        (count, shape, way)
        for count in rows
        for shape in SHAPES
        for way in ways_of(count, shape)
        if not options.only or way[0] in only
    ]
    print(f"{len(tasks)} ways", flush=True)
    figures: list[dict[str, Any]] = []
    runner = Runner()
    options.output.parent.mkdir(parents=True, exist_ok=True)

    def left() -> bool:
        return time.monotonic() - begun < options.seconds

    def keep(figure: dict[str, Any]) -> None:
        figures.append(figure)
        options.output.with_suffix(".jsonl").open("a").write(json.dumps(figure) + "\n")

    for at, found in runner.results(tasks):
        count, shape, way = tasks[at]
        keep({"rows": count, "shape": shape, "way": name(way), **found})
        if "problem" in found:
            print(count, shape, name(way), found["problem"], flush=True)
        if not left():
            print("out of time", flush=True)
            break
    best = picks(tasks, figures)
    layers = [
        (count, label, {shape: choose(best, count, shape) for shape in SHAPES})
        for count in rows
        for label, choose in CHOICES.items()
    ]
    layers = [one for one in layers if all(one[2].values())]
    sums: dict[int, list[str]] = {}
    for at, found in runner.results((), layers):
        count, label, _ = layers[at]
        keep({"rows": count, "shape": "layer", "way": label, **found})
        sums.setdefault(count, []).append(f"{label} {found.get('us', 0.0):.1f}")
    table(figures, rows, sums)
    report.write(options.output, "grouped_kernels", {"chip": "H200", "figures": figures}, arguments)
    return 0


Best = dict[tuple[int, str], list[tuple[float, Way]]]


def picks(tasks: Sequence[tuple[int, str, Way]], figures: Sequence[dict[str, Any]]) -> Best:
    """The ways of each product, the fastest first."""
    found: Best = {}
    for (count, shape, way), figure in zip(tasks, figures, strict=False):
        if "us" in figure:
            found.setdefault((count, shape), []).append((figure["us"], way))
    for ways in found.values():
        ways.sort(key=lambda one: one[0])
    return found


def plan_of(best: Best, count: int, shape: str) -> Way | None:
    return ("plan", ())


def dense_of(best: Best, count: int, shape: str) -> Way | None:
    return ("cublas", ())


def best_of(best: Best, count: int, shape: str) -> Way | None:
    return next((way for _, way in best.get((count, shape), ()) if way[0] != "cublas"), None)


CHOICES: dict[str, Callable[[Best, int, str], Way | None]] = {"plan": plan_of, "bfloat16": dense_of, "best": best_of}


def table(figures: Sequence[dict[str, Any]], rows: Sequence[int], sums: dict[int, list[str]]) -> None:
    """The three best of each kernel, and what serves."""
    for count in rows:
        for shape in SHAPES:
            own = [one for one in figures if (one["rows"], one["shape"]) == (count, shape) and "us" in one]
            own.sort(key=lambda one: one["us"])
            words = [f"{one['way']} {one['us']:.1f}" for one in own if one["way"] in ("plan", "cublas")]
            for kernel in ("ring", "wide", "tile"):
                words += [f"{one['way']} {one['us']:.1f}" for one in own if one["way"].startswith(kernel)][:2]
            print(f"{count:5} {shape:8}", " | ".join(words))
        if count in sums:
            print(f"{count:5} layer   ", " | ".join(sums[count]))


if __name__ == "__main__":
    sys.exit(main())
