"""How products with weights in groups are cut, see `kernels.grouped_linear_triton` and `kernels.grouped_hopper`."""

from __future__ import annotations

import msgspec

from penstock.kernels.chip import Chip

BLOCK = 256  # inputs of a block of the largest form
LINE = 128  # bytes of a line's block
MANY = 16384  # lines of a product that fills the device with wide tiles
LONG = 8192  # inputs beyond which programs take shares of them
DENSE_ROWS = 512  # beyond them the library multiplies by slices that are made dense
LARGE = 4096 * 4096  # elements of a weight: smaller ones were not measured with `WideTiling`
WIDE_ROWS = 1536  # where it and slices should take as long, by figures of 1,024 and 8,192 rows


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
    pdl: bool = True  # may start before the previous kernel has ended, see `kernels.launch`

    def smaller(self) -> GroupedTiling:
        """One that needs less shared memory; its rows are the same to the bit."""
        if self.rows > 8:
            return msgspec.structs.replace(self, rows=self.rows // 2)
        assert self.lines > 16
        return msgspec.structs.replace(self, lines=self.lines // 2)


class WideTiling(msgspec.Struct, frozen=True, array_like=True, tag="wide"):
    """How a product is cut that Hopper's own matrix instructions make with weights from registers. Values are
    multiplied with their scales, rounded to their type."""

    rows: int  # of a tile, a power of 2
    outputs: int  # of a tile, 16 for each warp at least; of gates, which have as many ups. A power of 2
    warps: int  # 4 or 8
    stages: int  # of the pipeline of weights, a block each
    x_stages: int  # of the pipeline of rows, a plane each
    splits: int = 1  # programs that share the inputs of a tile

    def split(self, blocks: int) -> bool:
        """Whether each of the programs has some of so many blocks."""
        return -(-blocks // self.splits) * (self.splits - 1) < blocks


def wide_tiling(rows: int, width: int, inputs: int, chip: Chip, *, gated: bool) -> WideTiling | None:
    """The rule, by measurement on an H200 (`benchmarks.grouped_kernels`); None: `grouped_tiling` is as fast, or this
    was not measured."""
    if not 32 < rows <= WIDE_ROWS or width * (2 if gated else 1) * inputs < LARGE:
        return None
    height = 64 if rows <= 64 else 128
    high, blocks = -(-rows // height), -(-inputs // BLOCK)
    tiles, large = high * -(-width // 64), high * -(-width // 128)
    if gated:
        if tiles < chip.num_sms:
            return None
        return WideTiling(64, 64, 4, 3, 6) if height == 64 else WideTiling(128, 64, 4, 2, 4)
    if rows <= 64 or (rows <= 128 and inputs <= LONG):
        return None
    if tiles <= 2 * chip.num_sms:
        splits = (1, 2, 4)
        found = [WideTiling(128, 64, 4, 3, 5, each) for each in splits if tiles * each <= 2 * chip.num_sms]
        return next(way for way in reversed(found) if way.split(blocks))
    # Two programs to a processor, unless one to each leaves fewer idle at the end.
    if filled(large, 2 * chip.num_sms) < 0.9 * filled(large, chip.num_sms):
        return WideTiling(128, 128, 8, 3, 8)
    return WideTiling(128, 128, 4, 2, 4)


def filled(tiles: int, places: int) -> float:
    """Share of the places that have a tile, over all waves."""
    return tiles / (-(-tiles // places) * places)


def grouped_tiling(
    rows: int, width: int, inputs: int, chip: Chip, *, gated: bool, invariant: bool, weight: str, exact: bool
) -> GroupedTiling | None:
    """The rule of a general kernel, by measurement on an H200; None: dense slices and the library. exact: values may be
    scaled."""
    if rows > DENSE_ROWS and not invariant:
        return None
    lines = 2 * width if gated else width
    if rows > 64:
        return tall_grouped(rows, lines, chip, invariant=invariant, exact=exact)
    height = next(height for height in (8, 16, 32, 64) if rows <= height)
    scaled = exact and weight.startswith("e2m1") and not invariant
    if rows <= 8 and not invariant and (scaled or (inputs <= LONG and lines < MANY)):
        return GroupedTiling(8, 16 if lines < MANY and inputs <= LONG else 32, 4, 3, parts=4, scaled=scaled)
    tile = 128 if lines >= MANY and rows <= 32 else 64
    wanted = chip.num_sms * {8: 2, 16: 2, 32: 1.5, 64: 1}[height]
    shares = 1
    while not invariant and shares < 8 and lines < MANY and lines // tile * shares < wanted and inputs > BLOCK * shares:
        shares *= 2
    return GroupedTiling(height, tile, 4, 4 if tile == 128 and rows <= 16 else 3, shares=shares, scaled=scaled)


def tall_grouped(rows: int, lines: int, chip: Chip, *, invariant: bool, exact: bool) -> GroupedTiling:
    """Of more than 64 rows."""
    if lines >= MANY and exact and not invariant:
        return GroupedTiling(128, 256, 8, 3, scaled=True, cut=2)
    tiles = lines // 128 * -(-rows // 64)
    if lines >= MANY or tiles > chip.num_sms:
        return GroupedTiling(64 if rows <= 128 else 128, 128, 8, 3)
    return GroupedTiling(64, 128, 8, 3, shares=2 if 2 * tiles <= chip.num_sms and not invariant else 1)


def grouped_bytes(tiling: GroupedTiling, chip: Chip, itemsize: int) -> int:
    """Shared memory of one program, at most: the stages of its pipeline, or its sums at the end.

    Weights are unpacked in registers, so their last stage is there, and that of the rows unless matrix units read it.
    """
    weights = tiling.lines * (LINE // tiling.cut + 8)  # and words of scales and zero points
    rows = BLOCK // tiling.cut * tiling.rows * itemsize
    read_there = chip.shared_operands and tiling.parts == 1
    stages = tiling.stages if read_there else tiling.stages - 1
    pipeline = tiling.parts * ((tiling.stages - 1) * weights + stages * rows)
    return max(pipeline, 4 * tiling.lines * (tiling.rows + 8) * min(tiling.parts, 2))


def wide_bytes(tiling: WideTiling, *, gated: bool) -> int:
    """Shared memory of one program: both pipelines."""
    outputs = tiling.outputs * (2 if gated else 1)
    return LINE * (tiling.stages * outputs + tiling.x_stages * tiling.rows)
