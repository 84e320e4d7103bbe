"""Which product is cut how: the best of `python -m benchmarks.linear_kernels --sweep` on an H200.

Sizes alone decide. The rows of an invariant product are the same to the last bit in every `Tiling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FEW_ROWS = 16  # up to here a tile's height is that of the rows
WIDE = 16384  # outputs


@dataclass(frozen=True)
class VectorTiling:
    """How a product of one row is cut."""

    outputs: int  # of a program
    inputs: int  # of one turn of its loop
    warps: int


@dataclass(frozen=True)
class Tiling:
    """How a product of several rows is cut. Powers of 2."""

    rows: int
    outputs: int
    inputs: int  # of one turn of its loop, at least 16
    warps: int
    stages: int
    swapped: bool = False  # the weight is the left operand: the matrix units take 64 lines of it and as few as 8 rows
    described: bool = False  # both are fetched by the tensor memory accelerator
    gated: bool = True  # the gate of the MLP is taken in the same kernel, which doubles the sums
    resident: int = 1  # programs per processor, if described
    flat: bool = False  # if described: tiles are one loop


def choose_tiling(
    rows: int, width: int, inputs: int, dtype: torch.dtype, *, gated: bool, invariant: bool
) -> Tiling | VectorTiling | None:
    """How to multiply `[rows, inputs]` with a weight of `width` outputs, or twice as many if `gated`; None: cuBLAS."""
    if dtype.itemsize > 2:
        return Tiling(16, 64, 32, 4, 2) if invariant else None
    if invariant:
        return invariant_tiling(rows, width, inputs, gated=gated)
    if rows == 1:
        return vector_tiling(width, inputs, gated=gated)
    return None


def vector_tiling(width: int, inputs: int, *, gated: bool) -> VectorTiling:
    if gated:
        return VectorTiling(1, 2048, 4) if inputs > 2048 else VectorTiling(4, 512, 4)
    if width >= WIDE:
        return VectorTiling(2, 2048, 4) if inputs > 2048 else VectorTiling(8, 512, 4)
    if width > 2048:
        return VectorTiling(1, 1024, 4) if width <= inputs else VectorTiling(8, 512, 4)
    return VectorTiling(2, 2048, 8)


def invariant_tiling(rows: int, width: int, inputs: int, *, gated: bool) -> Tiling:
    if rows <= 8:
        return Tiling(8, 16, 128, 2, 6, swapped=True)
    if rows <= 32:
        return Tiling(16 if rows <= 16 else 32, 64, 128, 4, 4, swapped=True)
    if rows <= 64:
        if gated:
            return Tiling(64, 64, 128, 4, 4, described=True, resident=2)
        if width >= WIDE:
            return Tiling(64, 128, 128, 4, 4, described=True, resident=2)
        return Tiling(64, 64, 128, 4, 6, swapped=True, described=True, resident=2)
    if rows <= 256:
        if width >= WIDE or gated:
            return Tiling(128, 128, 64, 8, 5, swapped=True, described=True, gated=False)
        if width * 2 > 3 * inputs:
            return Tiling(128, 128, 64, 8, 5, swapped=True, described=True)
        return Tiling(64, 128, 128, 4, 4, described=True, resident=2)
    if rows * width < 132 * 128 * 256 * 2:
        return Tiling(128, 128, 64, 8, 5, described=True, gated=False, flat=True)
    return Tiling(128, 256, 64, 8, 4, described=True, gated=False, flat=True)
