"""How products with weights in groups are cut, see `kernels.grouped_linear_triton`."""

from __future__ import annotations

import msgspec

from penstock.kernels.chip import Chip

BLOCK = 256  # inputs of a block of the largest form
LINE = 128  # bytes of a line's block
DENSE_ROWS = 512  # beyond them the library multiplies by slices that are made dense


class GroupedTiling(msgspec.Struct, frozen=True, array_like=True, tag="grouped"):
    """How a product with a weight in groups is cut. Powers of 2."""

    rows: int
    lines: int  # outputs of a tile, gates and ups, 16 at least
    warps: int  # one for each part, if there are several
    stages: int
    parts: int = 1  # of the inputs, each summed by a warp
    shares: int = 1  # of the inputs, each summed by a program
    scaled: bool = False  # values are multiplied with their scales, rounded to their type, instead of the sums
    cut: int = 1  # runs are cut in so many iterations, if scaled
    early: bool = False  # the next kernel may start at once, not when this one's programs end
    prefetched: int = 0  # iterations whose weights are fetched into the L2 cache before the rows are known
    pdl: bool = True  # may start before the previous kernel has ended, see `kernels.launch`


def grouped_tiling(
    rows: int, width: int, inputs: int, chip: Chip, *, gated: bool, invariant: bool
) -> GroupedTiling | None:
    """The rule; None: dense slices and the library."""
    if rows > DENSE_ROWS and not invariant:
        return None
    lines = 2 * width if gated else width
    if rows <= 16 and not invariant:
        height = 8 if rows <= 8 else 16
        return GroupedTiling(height, 32 if lines > 16384 or rows > 4 else 16, 4, 4, parts=4)
    if rows <= 64:
        height = next(height for height in (8, 16, 32, 64) if rows <= height)
        tiles = -(-lines // 64)
        shares = 1
        while not invariant and shares < 8 and tiles * shares < chip.num_sms and inputs >= 2 * shares * 4 * BLOCK:
            shares *= 2
        return GroupedTiling(height, 64, 4, 4, shares=shares)
    return GroupedTiling(128, 128, 8, 3, pdl=False)


def grouped_bytes(tiling: GroupedTiling, itemsize: int) -> int:
    """Shared memory of one program, at most: the stages of its pipeline, or its sums at the end."""
    stage = (tiling.lines * LINE + BLOCK * tiling.rows * itemsize) // tiling.cut + 8 * tiling.lines
    return max(tiling.parts * tiling.stages * stage, 4 * tiling.lines * (tiling.rows + 8))
