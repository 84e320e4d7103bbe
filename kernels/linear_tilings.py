"""Which product is cut how: the best of `python -m benchmarks.linear_kernels --sweep` on an H200.

Sizes alone decide. The rows of an invariant product are the same to the last bit in every `Tiling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from penstock.kernels.chip import CHIPS

WIDE = 16384  # outputs of a product whose tiles fill the device however large they are
SMALL = 4096 * 1024  # elements of a weight whose product is short: launches weigh more than tiles
NUM_SMS = CHIPS["sm_90"].num_sms
MEMORY = CHIPS["sm_90"].shared_memory
WELL_FILLED = 0.8  # share of the SMs that have one of a product's tiles
PIPELINED_ROWS = 8  # rows up to which weights are prefetched: with more, too much of what is loaded is rows
PIPELINED_INPUTS = 256  # of an iteration
PIPELINED_STAGES = 8
SMALLER_TILES = 0.87  # speed of tiles of 128 by 128 relative to those of 128 by 256, where both fill the device


@dataclass(frozen=True)
class VectorTiling:
    """How a product of one row is cut."""

    outputs: int  # of a program
    inputs: int  # of one iteration
    warps: int


@dataclass(frozen=True)
class Tiling:
    """How a product of several rows is cut. Powers of 2."""

    rows: int
    outputs: int
    inputs: int  # of one iteration, at least 16
    warps: int
    stages: int
    swap_ab: bool = False  # the weight is operand A of the matrix units, which take 64 rows of A and as few as 8 of B
    tma: bool = False  # both operands are loaded by TMA
    gated: bool = True  # the gate of the MLP is taken in the same kernel, which doubles the sums
    ctas_per_sm: int = 1  # if tma
    flat: bool = False  # if tma: tiles are one loop
    pdl: bool = True  # may start before the previous kernel has ended, see `kernels.launch`


@dataclass(frozen=True)
class PipelinedTiling:
    """How a product of few rows is cut whose weights are prefetched. Powers of 2."""

    rows: int  # all of them, at least 8
    warps: int  # each of which computes 16 outputs
    stages: int  # of the pipeline, PIPELINED_INPUTS each


# Each SM has one tile at most, while cuBLAS splits the inputs (split-K) and adds up the parts.
SQUARE = Tiling(64, 64, 128, 4, 6, tma=True, gated=False, ctas_per_sm=2)


SINGLE = Tiling(16, 64, 32, 4, 2)  # of single precision, which is for tests: nobody serves it on a GPU for speed


def choose_tiling(
    rows: int, width: int, inputs: int, dtype: torch.dtype, *, gated: bool, invariant: bool
) -> Tiling | VectorTiling | PipelinedTiling | None:
    """How to multiply `[rows, inputs]` with a weight of `width` outputs, or twice as many if `gated`; None: cuBLAS."""
    if dtype.itemsize > 2:
        return SINGLE if invariant else None
    if rows == 1 and not invariant:
        return vector_tiling(width, inputs, gated=gated)
    if rows <= PIPELINED_ROWS and not invariant and (gated or width < WIDE):
        return pipelined_tiling(width, inputs, gated=gated)
    if rows <= 64:
        return low_tiling(rows, width, gated=gated)
    if invariant:
        return tall_tiling(rows, width, inputs, gated=gated)
    if rows <= 256 and not gated and width * inputs <= SMALL:
        return tall_tiling(rows, width, inputs, gated=False)
    if rows <= 128 and not gated and WELL_FILLED * NUM_SMS <= 2 * -(-width // 64) <= NUM_SMS:
        return SQUARE
    return None


def vector_tiling(width: int, inputs: int, *, gated: bool) -> VectorTiling:
    """Of one row."""
    if gated:
        return VectorTiling(1, 2048, 4) if inputs > 2048 else VectorTiling(4, 512, 4)
    if width >= WIDE:
        return VectorTiling(2, 2048, 4) if inputs > 2048 else VectorTiling(8, 512, 4)
    if width > 2048:
        return VectorTiling(1, 1024, 4) if width <= inputs else VectorTiling(8, 512, 4)
    return VectorTiling(2, 2048, 8)


def pipelined_tiling(width: int, inputs: int, *, gated: bool) -> PipelinedTiling:
    """Of 2 to 8 rows: as long a pipeline as lets all programs be resident at once, at least two stages."""
    programs = -(-width // (16 * NUM_SMS))  # of an SM
    stage = 2 * PIPELINED_INPUTS * (PIPELINED_ROWS + (32 if gated else 16))
    stages = min(MEMORY // programs // stage, -(-inputs // PIPELINED_INPUTS), PIPELINED_STAGES)
    return PipelinedTiling(PIPELINED_ROWS, 1, max(stages, 2))


def low_tiling(rows: int, width: int, *, gated: bool) -> Tiling:
    """Of up to 64 rows: the weights are read once, and the tiles are as many as keep the memory busy."""
    if rows <= 16:
        height = 8 if rows <= 8 else 16
        if gated and width >= 8192:
            return Tiling(height, 64, 64, 4, 8, swap_ab=True)
        if gated or width >= WIDE:
            return Tiling(height, 32, 128, 2, 5, swap_ab=True)
        return Tiling(height, 16, 256, 2, 4, swap_ab=True)
    if width <= 2048 or (gated and width < 8192):
        return Tiling(64, 32, 128, 4, 6, tma=True, ctas_per_sm=2)
    if gated:
        return Tiling(32 if rows <= 32 else 64, 64, 128, 4, 4, swap_ab=True)
    if rows <= 32:
        if width >= WIDE:
            return Tiling(32, 128, 64, 4, 5, swap_ab=True)
        return Tiling(32, 64, 128, 4, 6, swap_ab=True, tma=True, ctas_per_sm=2)
    if width >= WIDE:
        return Tiling(64, 128, 128, 4, 4, tma=True, ctas_per_sm=2)
    return Tiling(64, 64, 128, 4, 6, tma=True, ctas_per_sm=2)


def tall_tiling(rows: int, width: int, inputs: int, *, gated: bool) -> Tiling:
    """Of more rows: as tall and wide as leaves every SM a tile. The gate is a kernel of its own.

    Where such products are long, PDL costs 7 % of all layers' time (8B, 256 rows).
    """
    pdl = width * inputs <= SMALL
    outputs = 2 * width if gated else width
    if rows <= 256 and width <= 2048:
        return SQUARE
    if rows <= 256 and outputs <= max(4096, inputs):
        return Tiling(64, 128, 128, 4, 4, tma=True, gated=False, pdl=pdl)
    if waves(rows, outputs, 128) < SMALLER_TILES * 2 * waves(rows, outputs, 256):
        return Tiling(128, 128, 64, 8, 5, tma=True, gated=False, flat=rows > 256, pdl=pdl)
    return Tiling(128, 256, 64, 8, 4, tma=True, gated=False, flat=rows > 256, pdl=pdl)


def waves(rows: int, outputs: int, wide: int) -> int:
    """Waves: how many tiles, 128 rows high and so wide, an SM of an H200 takes at most."""
    return -(-(-(-rows // 128) * -(-outputs // wide)) // NUM_SMS)


@dataclass(frozen=True)
class ExpertTiling:
    """How products of the tokens of one expert are cut: both have tiles of as many rows."""

    gate_up: Tiling  # of whose outputs each has its gate
    down: Tiling

    def __post_init__(self) -> None:
        assert self.gate_up.rows == self.down.rows


# The tiling for up to so many tokens to an expert.
BY_MEAN = (
    (8, ExpertTiling(Tiling(16, 64, 128, 4, 4, swap_ab=True), Tiling(16, 128, 128, 4, 4, swap_ab=True))),
    (16, ExpertTiling(Tiling(32, 64, 128, 4, 4, swap_ab=True), Tiling(32, 128, 128, 4, 4, swap_ab=True))),
    (32, ExpertTiling(Tiling(64, 128, 64, 4, 4, tma=True), Tiling(64, 256, 64, 4, 4, tma=True))),
    (math.inf, ExpertTiling(Tiling(128, 128, 64, 8, 4, tma=True), Tiling(128, 256, 64, 8, 4, tma=True))),
)


def choose_expert_tiling(pairs: int, experts: int, dtype: torch.dtype) -> ExpertTiling:
    """How to multiply so many pairs of a token and one of all `experts`, on every rank alike."""
    if dtype.itemsize > 2:
        return ExpertTiling(SINGLE, SINGLE)
    return next(tiling for most, tiling in BY_MEAN if pairs / experts <= most)
