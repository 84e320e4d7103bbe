"""Which product is cut how: the best of `python -m benchmarks.linear_kernels --sweep` on an H200.

Sizes alone decide. The rows of an invariant product are the same to the last bit in every `Tiling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WIDE = 16384  # outputs of a product whose tiles fill the device however large they are
SMALL = 4096 * 1024  # elements of a weight whose product is short: launches weigh more than tiles
PROCESSORS = 132  # of an H200
MEMORY = 227 << 10  # bytes of shared memory that the programs of a processor may have
WELL_FILLED = 0.8  # share of the processors that have one of a product's tiles
RING_ROWS = 8  # rows up to which weights are fetched ahead: with more, the rows are too much of what is fetched
RING_INPUTS = 256  # of a turn
RING_STAGES = 8
SMALLER_TILES = 0.87  # speed of tiles of 128 by 128 relative to those of 128 by 256, where both fill the device


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
    ahead: bool = True  # may begin before the kernel before it has ended, see `kernels.launch`


@dataclass(frozen=True)
class RingTiling:
    """How a product of few rows is cut whose weights are fetched ahead. Powers of 2."""

    rows: int  # all of them, at least 8
    warps: int  # each of which computes 16 outputs
    stages: int  # turns of RING_INPUTS that are held


# Each processor has one tile at most and keeps its matrix units at it, while cuBLAS cuts the inputs and adds up parts.
SQUARE = Tiling(64, 64, 128, 4, 6, described=True, gated=False, resident=2)


SINGLE = Tiling(16, 64, 32, 4, 2)  # of single precision, which is for tests: nobody serves it on a GPU for speed


def choose_tiling(
    rows: int, width: int, inputs: int, dtype: torch.dtype, *, gated: bool, invariant: bool
) -> Tiling | VectorTiling | RingTiling | None:
    """How to multiply `[rows, inputs]` with a weight of `width` outputs, or twice as many if `gated`; None: cuBLAS."""
    if dtype.itemsize > 2:
        return SINGLE if invariant else None
    if rows == 1 and not invariant:
        return vector_tiling(width, inputs, gated=gated)
    if rows <= RING_ROWS and not invariant and (gated or width < WIDE):
        return ring_tiling(width, inputs, gated=gated)
    if rows <= 64:
        return low_tiling(rows, width, gated=gated)
    if invariant:
        return tall_tiling(rows, width, inputs, gated=gated)
    if rows <= 256 and not gated and width * inputs <= SMALL:
        return tall_tiling(rows, width, inputs, gated=False)
    if rows <= 128 and not gated and WELL_FILLED * PROCESSORS <= 2 * -(-width // 64) <= PROCESSORS:
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


def ring_tiling(width: int, inputs: int, *, gated: bool) -> RingTiling:
    """Of 2 to 8 rows: as long a ring as lets all programs stand on the device at once, where that is two turns."""
    programs = -(-width // (16 * PROCESSORS))  # of a processor
    turn = 2 * RING_INPUTS * (RING_ROWS + (32 if gated else 16))
    stages = min(MEMORY // programs // turn, -(-inputs // RING_INPUTS), RING_STAGES)
    return RingTiling(RING_ROWS, 1, max(stages, 2))


def low_tiling(rows: int, width: int, *, gated: bool) -> Tiling:
    """Of up to 64 rows: the weights are read once, and the tiles are as many as keep the memory busy."""
    if rows <= 16:
        height = 8 if rows <= 8 else 16
        if gated and width >= 8192:
            return Tiling(height, 64, 64, 4, 8, swapped=True)
        if gated or width >= WIDE:
            return Tiling(height, 32, 128, 2, 5, swapped=True)
        return Tiling(height, 16, 256, 2, 4, swapped=True)
    if width <= 2048 or (gated and width < 8192):
        return Tiling(64, 32, 128, 4, 6, described=True, resident=2)
    if gated:
        return Tiling(32 if rows <= 32 else 64, 64, 128, 4, 4, swapped=True)
    if rows <= 32:
        if width >= WIDE:
            return Tiling(32, 128, 64, 4, 5, swapped=True)
        return Tiling(32, 64, 128, 4, 6, swapped=True, described=True, resident=2)
    if width >= WIDE:
        return Tiling(64, 128, 128, 4, 4, described=True, resident=2)
    return Tiling(64, 64, 128, 4, 6, described=True, resident=2)


def tall_tiling(rows: int, width: int, inputs: int, *, gated: bool) -> Tiling:
    """Of more rows: as tall and wide as leaves every processor a tile. The gate is a kernel of its own.

    Where such products are long, beginning ahead costs 7 % of all layers' time (8B, 256 rows).
    """
    ahead = width * inputs <= SMALL
    outputs = 2 * width if gated else width
    if rows <= 256 and width <= 2048:
        return SQUARE
    if rows <= 256 and outputs <= max(4096, inputs):
        return Tiling(64, 128, 128, 4, 4, described=True, gated=False, ahead=ahead)
    if turns(rows, outputs, 128) < SMALLER_TILES * 2 * turns(rows, outputs, 256):
        return Tiling(128, 128, 64, 8, 5, described=True, gated=False, flat=rows > 256, ahead=ahead)
    return Tiling(128, 256, 64, 8, 4, described=True, gated=False, flat=rows > 256, ahead=ahead)


def turns(rows: int, outputs: int, wide: int) -> int:
    """How many tiles, 128 rows high and so wide, each processor of the chip they were measured on takes at most."""
    return -(-(-(-rows // 128) * -(-outputs // wide)) // PROCESSORS)


@dataclass(frozen=True)
class ExpertTiling:
    """How products of the tokens of one expert are cut: both have tiles of as many rows."""

    gate_up: Tiling  # of whose outputs each has its gate
    down: Tiling

    def __post_init__(self) -> None:
        assert self.gate_up.rows == self.down.rows


SINGLES = ExpertTiling(SINGLE, SINGLE)


LOWEST = ExpertTiling(
    Tiling(16, 64, 128, 4, 4, swapped=True),
    Tiling(16, 128, 128, 4, 4, swapped=True),
)


LOW = ExpertTiling(
    Tiling(32, 64, 128, 4, 4, swapped=True),
    Tiling(32, 128, 128, 4, 4, swapped=True),
)


MIDDLE = ExpertTiling(
    Tiling(64, 128, 64, 4, 4, described=True),
    Tiling(64, 256, 64, 4, 4, described=True),
)


HIGH = ExpertTiling(
    Tiling(128, 128, 64, 8, 4, described=True),
    Tiling(128, 256, 64, 8, 4, described=True),
)


BY_MEAN = ((8, LOWEST), (16, LOW), (32, MIDDLE))  # up to so many tokens to an expert


def choose_expert_tiling(pairs: int, experts: int, dtype: torch.dtype) -> ExpertTiling:
    """How to multiply so many pairs of a token and one of all `experts`, on every rank alike."""
    if dtype.itemsize > 2:
        return SINGLES
    mean = pairs / experts
    return next((tiling for most, tiling in BY_MEAN if mean <= most), HIGH)
