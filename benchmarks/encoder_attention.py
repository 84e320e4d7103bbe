"""Attention of vision encoders, with heads padded and not: `python -m benchmarks.encoder_attention`.

On one GPU, microseconds of a layer: images of 448 and of 1,024 pixels, by the tile that the product takes and by
others, each held to torch's attention of the same numbers in fp32 first. Calls stand in a CUDA graph.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import report
from penstock.kernels import varlen_attention_triton as kernel
from penstock.kernels.records import AttentionOptions

HEADS = 16
CALLS = 12
MOST_OFF = 0.01  # relative distance from torch's result
FILE = Path("benchmarks/results/h200/encoder_attention.json")


class Case(NamedTuple):
    """Images of a step. Qwen3-VL and Qwen3.5 have patches of 16 pixels; heads of 72 in their larger encoders, 64 in the
    2B's, and 80 in Qwen2.5-VL's."""

    dim: int
    patches: int  # of an image
    images: int = 1

    @property
    def name(self) -> str:
        return f"{self.images} x {self.patches} patches, heads of {self.dim}"


CASES = tuple(Case(dim, *size) for dim in (64, 72, 80) for size in ((784, 1), (784, 4), (4096, 1)))
TILES = ((64, 64, 4, 3), (128, 32, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2))


def padded(dim: int) -> tuple[int, int]:
    """Columns of a tile before heads had a second one."""
    return triton.next_power_of_2(dim), 0


class Form(NamedTuple):
    """How heads and queries are cut."""

    name: str
    columns: tuple[int, int]  # see `varlen_attention_triton.columns_of`
    tile: tuple[int, int, int, int]  # see `varlen_attention_triton.tile_of`


class Scene:
    """Queries, keys and values of one case, as views of one product."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.dim)
        tokens, shape = case.images * case.patches, (case.images, case.patches, HEADS, case.dim)
        product = torch.randn(tokens, 3 * HEADS, case.dim, dtype=torch.bfloat16, device="cuda")
        self.case, self.parts = case, product.chunk(3, dim=1)
        self.starts = torch.arange(0, tokens + 1, case.patches, dtype=torch.int32, device="cuda")
        self.options = AttentionOptions(case.dim**-0.5)
        q, k, v = (part.view(shape).transpose(1, 2).float() for part in self.parts)
        self.expected = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(tokens, HEADS, case.dim)

    def call(self) -> Tensor:
        return kernel.attend_sequences(*self.parts, self.starts, self.case.patches, self.options)

    def library(self) -> Tensor:
        """torch's own kernel, where images are as long as one another."""
        shape = self.case.images, self.case.patches, HEADS, self.case.dim
        return scaled_dot_product_attention(*(part.view(shape).transpose(1, 2) for part in self.parts))


def timed(function: Callable[[], object]) -> float:
    """Microseconds of one call."""
    from benchmarks.kernels import timed

    return timed(lambda _: function(), CALLS)


def forms_of(dim: int) -> Iterator[Form]:
    """All of them, and nothing twice."""
    ways = {"padded": padded(dim), "apart": kernel.columns_of(dim)}
    for (name, columns), tile in itertools.product(ways.items(), TILES):
        if name == "padded" or columns != padded(dim):
            yield Form(name, columns, tile)


@contextmanager
def taken_by_the_product(form: Form) -> Iterator[None]:
    columns, tile = {"return_value": form.columns}, {"return_value": form.tile}
    with mock.patch.object(kernel, "columns_of", **columns), mock.patch.object(kernel, "tile_of", **tile):
        yield


def launch(scene: Scene, form: Form) -> None:
    with taken_by_the_product(form):
        scene.call()


def measure(scene: Scene, form: Form) -> dict[str, Any]:
    """Time and error of one form, or why it has none."""
    with taken_by_the_product(form):
        try:
            found = scene.call()
            off = float((found.float() - scene.expected).norm() / scene.expected.norm())
            return {"us": round(timed(scene.call), 2), "off": off}
        except triton.runtime.errors.OutOfResources as problem:
            return {"problem": str(problem)}  # a tile that the chip has no room for


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoder_attention")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    from benchmarks.kernels import compiled

    scenes = [Scene(case) for case in CASES]
    first = {scene.case.dim: scene for scene in scenes}
    count = compiled(partial(launch, scene, form) for dim, scene in first.items() for form in forms_of(dim))
    print(f"{count} kernels compiled", flush=True)
    figures: list[dict[str, Any]] = []
    table: list[str] = []
    for scene in scenes:
        case = scene.case
        own, flops = kernel.tile_of(case.dim, 2), 4 * case.images * case.patches**2 * case.dim * HEADS
        table.append(f"{case.name}: torch {timed(scene.library):.1f} us")
        for form in forms_of(case.dim):
            taken = measure(scene, form)
            figures.append({"case": case.name, "form": form.name, "tile": form.tile, **taken})
            text = taken.get("problem") or f"{taken['us']:8.1f} us {flops / taken['us'] / 1e6:6.0f} TFLOP/s"
            wrong = f", {taken['off']:.4f} off" * (taken.get("off", 0.0) > MOST_OFF)
            size = "x".join(map(str, form.tile))
            table.append(f"{'*' if form.tile == own else ' '} {form.name:8} {size:12} {text}{wrong}")
            print(table[-1], flush=True)
    report.write(options.output, "encoder_attention", {"figures": figures}, arguments)
    print("\n".join(table))
    return int(any(row.get("off", 0.0) > MOST_OFF for row in figures))


if __name__ == "__main__":
    sys.exit(main())
