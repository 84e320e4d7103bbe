"""How products with weights in groups are cut, see `kernels.grouped_linear_triton`."""

from __future__ import annotations

import msgspec

from penstock.kernels.chip import Chip

BLOCK = 256  # inputs of a block of the largest form
LINE = 128  # bytes of a line's block
MANY = 16384  # lines of a product that fills the device with wide tiles
LONG = 8192  # inputs beyond which programs take shares of them
DENSE_ROWS = 256  # beyond them the library multiplies by slices that are made dense


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

    def smaller(self) -> GroupedTiling:
        """One that needs less shared memory; its rows are the same to the bit."""
        if self.rows > 8:
            return msgspec.structs.replace(self, rows=self.rows // 2)
        assert self.lines > 16
        return msgspec.structs.replace(self, lines=self.lines // 2)


def grouped_tiling(
    rows: int, width: int, inputs: int, chip: Chip, *, gated: bool, invariant: bool
) -> GroupedTiling | None:
    """The rule; None: dense slices and the library."""
    if rows > DENSE_ROWS and not invariant:
        return None
    lines = 2 * width if gated else width
    if rows > 64:
        return GroupedTiling(64 if rows <= 128 else 128, 128, 8, 3)
    height = next(height for height in (8, 16, 32, 64) if rows <= height)
    if rows <= 8 and not invariant and inputs <= LONG and lines < MANY:
        return GroupedTiling(8, 16, 4, 3, parts=4)
    tile = 128 if lines >= MANY and rows <= 32 else 64
    shares = 1
    while not invariant and shares < 8 and lines // tile * shares < 2 * chip.num_sms and inputs >= 8 * shares * BLOCK:
        shares *= 2
    return GroupedTiling(height, tile, 4, 4 if rows <= 16 else 3, shares=shares)


def grouped_bytes(tiling: GroupedTiling, itemsize: int) -> int:
    """Shared memory of one program, at most: the stages of its pipeline, or its sums at the end.

    Weights are unpacked in registers, so their last stage is there, and that of few rows, too.
    """
    weights = tiling.lines * (LINE // tiling.cut + 8)  # and words of scales and zero points
    rows = BLOCK // tiling.cut * tiling.rows * itemsize
    stages = tiling.stages if tiling.rows > 8 and tiling.parts == 1 else tiling.stages - 1
    pipeline = tiling.parts * ((tiling.stages - 1) * weights + stages * rows)
    return max(pipeline, 4 * tiling.lines * (tiling.rows + 8) * min(tiling.parts, 2))
