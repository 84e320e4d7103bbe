"""How a batch of attention is cut into programs: sizes on the host decide alone, so that nothing waits for the device.

The numbers are the best of `benchmarks.kernels --sweep` on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

LOW = 16  # lines of the lowest tile that the matrix units take
PACKED = 64  # lines up to which a whole row's queries are packed into one tile
LONG_CHUNK = 4096  # queries of a row from which the tallest tiles measure best
FEW_TILES = 8  # processors for each tile of whole rows from which longer turns of more warps measure best
FEW_CHUNKS = 4  # processors for each tile of 128 lines from which cutting its keys does
LONG_REACH = 2048  # keys from which it does
TALL_WAVES = 2  # tall tiles per processor up to which their keys are cut
WAVES = 4  # tiles of whole rows per processor up to which their keys are cut
SHARE_KEYS = 128  # fewest keys that are worth a program
MAX_SPLITS = 64
INVARIANT_SHARE = 512  # fewest keys of a share whose bounds may not depend on the batch
MAX_SHARES = 128  # of them that the longest sequence has: partial results take memory for each


@dataclass(frozen=True)
class Tiling:
    """One launch."""

    lines: int  # of a tile: queries times the heads of a group, the rest idle; a power of 2, at least 16
    keys: int  # of one turn of its loop; a power of 2, at least 16
    splits: int  # programs that share the keys of a tile
    warps: int
    stages: int
    by_row: bool = False  # a tile is a row, and rows whose queries do not fit are left out
    share: int = 0  # keys after which partial results are joined; 0: as many as a program has, at least
    least: int = SHARE_KEYS


@dataclass(frozen=True)
class Shape:
    """What the choice depends on: bounds that the host knows."""

    rows: int
    tokens: int
    max_query: int
    max_context: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    window: int = 0
    longest: int = 0  # keys that the block tables have room for: the same for every batch of a server

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def reach(self) -> int:
        """Keys that a row's queries see between them, at most."""
        return min(self.max_context, self.window + self.max_query) if self.window else self.max_context


def power_of_2(least: int) -> int:
    """The smallest that is not less."""
    return 1 << max(least - 1, 0).bit_length()


def low_tiling(shape: Shape, queries: int, processors: int) -> Tiling:
    """A tile for each row of up to `queries`; keys are cut where rows are too few for the device."""
    need = power_of_2(queries * shape.group)
    if need > LOW:  # heights between measure no better
        return fitted(Tiling(max(PACKED, need), 64, cuts(shape, shape.rows, WAVES, processors), 4, 4, True), shape)
    if shape.rows * shape.kv_heads * FEW_TILES <= processors:
        return fitted(Tiling(LOW, 128, cuts(shape, shape.rows, 1, processors), 4, 3, True), shape)
    return fitted(Tiling(LOW, 64, cuts(shape, shape.rows, WAVES, processors), 2, 4, True), shape)


def tall_tiling(shape: Shape, processors: int) -> Tiling:
    """Tiles of up to 128 lines over all rows."""
    need = power_of_2(shape.group)
    if shape.max_query < LONG_CHUNK:
        lines, keys, warps = max(64, need), 64, 4 if need <= 64 else 8
    else:
        lines, keys, warps = max(128, need), 128, 8
    tiles = min(shape.tokens, shape.tokens // (lines // shape.group) + shape.rows)
    return fitted(Tiling(lines, keys, cuts(shape, tiles, TALL_WAVES, processors), warps, 3), shape)


def wants_cuts(shape: Shape, processors: int) -> bool:
    """Whether chunks are so short and see so much that sharing their keys out matters more than the instructions."""
    tiles = -(-shape.tokens * shape.group // 128)
    return tiles * shape.kv_heads * FEW_CHUNKS <= processors and shape.reach >= LONG_REACH


def invariant_tiling(shape: Shape, processors: int) -> Tiling:
    """The form in which a query's result has the same bits whatever the batch, the chunk and the number of programs.

    Everything that orders its arithmetic follows from the sizes of the heads: how keys are taken by turns, what a tile
    looks like, where shares begin. Only the number of programs that take the shares by turns follows the batch.
    """
    lines = max(PACKED, power_of_2(shape.group))
    by_row = shape.max_query * shape.group <= lines
    tiles = shape.rows if by_row else min(shape.tokens, shape.tokens // (lines // shape.group) + shape.rows)
    share = invariant_share(shape.longest)
    splits = min(cuts(shape, tiles, WAVES, processors), -(-shape.reach // share))
    return fitted(Tiling(lines, 64, splits, 4, 3, by_row, share), shape)


def invariant_share(longest: int) -> int:
    """Keys of a share where the longest sequence has so many: a power of 2 that depends on nothing else.

    The bits of a result are the same for every server with up to 65,536 keys, and for all of one length beyond.
    """
    return max(INVARIANT_SHARE, power_of_2(-(-longest // MAX_SHARES)))


def cuts(shape: Shape, tiles: int, waves: int, processors: int) -> int:
    """Programs for each tile so that about `waves` of them stand on each processor."""
    return max(1, min(waves * processors // (tiles * shape.kv_heads), -(-shape.reach // SHARE_KEYS), MAX_SPLITS))


def fitted(tiling: Tiling, shape: Shape) -> Tiling:
    """The same within the shared memory, for wide elements or large heads."""
    size = shape.dtype.itemsize
    if size < 4 and shape.dim <= 128:
        return tiling
    keys = (64 if shape.dim > 128 else 128) // size
    lines = min(tiling.lines, max(PACKED, power_of_2(shape.group)))
    return replace(tiling, lines=lines, keys=keys, warps=4 if lines <= LOW else 8, stages=2)
