"""How a batch of attention is cut into programs: sizes on the host decide alone, so that nothing waits for the device.

The numbers are the best of `benchmarks.kernels --sweep` on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

LOW = 16  # rows of the lowest tile that the matrix units take
PACKED = 64  # rows up to which all queries of a sequence are packed into one tile
LONG_CHUNK = 4096  # queries of a row from which the tallest tiles measure best
FEW_TILES = 8  # SMs for each tile of a whole sequence from which longer iterations of more warps measure best
FEW_CHUNKS = 4  # SMs for each tile of 128 rows from which splitting its keys does
LONG_REACH = 2048  # keys from which it does
TALL_WAVES = 2  # tall tiles per processor up to which their keys are cut
WAVES = 4  # tiles of whole rows per processor up to which their keys are cut
MIN_SPLIT_KEYS = 128  # fewest keys that are worth a program
MAX_PROGRAMS = 64
INVARIANT_SPLIT_KEYS = 512  # fewest keys of a split whose bounds may not depend on the batch
MAX_INVARIANT_SPLITS = 128  # splits of the longest sequence: each takes memory for its partial results


@dataclass(frozen=True)
class Tiling:
    """One launch."""

    block_m: int  # of a tile: queries times the heads of a group, the rest idle; a power of 2, at least 16
    block_n: int  # keys of one iteration; a power of 2, at least 16
    programs: int  # that share the keys of a tile (split-K)
    warps: int
    stages: int
    by_row: bool = False  # a tile is a sequence, and sequences whose queries do not fit are left out
    split_keys: int = 0  # keys of a split; 0: as many as a program has, at least `min_split_keys`
    min_split_keys: int = MIN_SPLIT_KEYS


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


def low_tiling(shape: Shape, queries: int, num_sms: int) -> Tiling:
    """A tile for each row of up to `queries`; keys are cut where rows are too few for the device."""
    need = power_of_2(queries * shape.group)
    if need > LOW:  # heights between measure no better
        programs = split_programs(shape, shape.rows, WAVES, num_sms)
        return fitted(Tiling(max(PACKED, need), 64, programs, 4, 4, True), shape)
    if shape.rows * shape.kv_heads * FEW_TILES <= num_sms:
        return fitted(Tiling(LOW, 128, split_programs(shape, shape.rows, 1, num_sms), 4, 3, True), shape)
    return fitted(Tiling(LOW, 64, split_programs(shape, shape.rows, WAVES, num_sms), 2, 4, True), shape)


def tall_tiling(shape: Shape, num_sms: int) -> Tiling:
    """Tiles of up to 128 rows over all sequences."""
    need = power_of_2(shape.group)
    if shape.max_query < LONG_CHUNK:
        block_m, block_n, warps = max(64, need), 64, 4 if need <= 64 else 8
    else:
        block_m, block_n, warps = max(128, need), 128, 8
    tiles = min(shape.tokens, shape.tokens // (block_m // shape.group) + shape.rows)
    return fitted(Tiling(block_m, block_n, split_programs(shape, tiles, TALL_WAVES, num_sms), warps, 3), shape)


def wants_split_k(shape: Shape, num_sms: int) -> bool:
    """Whether chunks are so short, and see so many keys, that splitting keys gains more than Hopper's instructions."""
    tiles = -(-shape.tokens * shape.group // 128)
    return tiles * shape.kv_heads * FEW_CHUNKS <= num_sms and shape.reach >= LONG_REACH


def invariant_tiling(shape: Shape, num_sms: int) -> Tiling:
    """The form in which a query's result has the same bits whatever the batch, the chunk and the number of programs.

    All that orders its arithmetic follows from the sizes of the heads: iterations, tiles, where splits begin. Only the
    number of programs, which take splits in turn, follows the batch.
    """
    block_m = max(PACKED, power_of_2(shape.group))
    by_row = shape.max_query * shape.group <= block_m
    tiles = shape.rows if by_row else min(shape.tokens, shape.tokens // (block_m // shape.group) + shape.rows)
    split_keys = invariant_split_keys(shape.longest)
    programs = min(split_programs(shape, tiles, WAVES, num_sms), -(-shape.reach // split_keys))
    return fitted(Tiling(block_m, 64, programs, 4, 3, by_row, split_keys), shape)


def invariant_split_keys(longest: int) -> int:
    """Keys of a split for a longest sequence: a power of 2 that depends on nothing else.

    The bits of a result are the same for every server with up to 65,536 keys, and for all of one length beyond.
    """
    return max(INVARIANT_SPLIT_KEYS, power_of_2(-(-longest // MAX_INVARIANT_SPLITS)))


def split_programs(shape: Shape, tiles: int, waves: int, num_sms: int) -> int:
    """Programs for each tile so that each SM has about `waves` of them."""
    return max(1, min(waves * num_sms // (tiles * shape.kv_heads), -(-shape.reach // MIN_SPLIT_KEYS), MAX_PROGRAMS))


def fitted(tiling: Tiling, shape: Shape) -> Tiling:
    """The same within the shared memory, for wide elements or large heads."""
    size = shape.dtype.itemsize
    if size < 4 and shape.dim <= 128:
        return tiling
    block_n = (64 if shape.dim > 128 else 128) // size
    block_m = min(tiling.block_m, max(PACKED, power_of_2(shape.group)))
    return replace(tiling, block_m=block_m, block_n=block_n, warps=4 if block_m <= LOW else 8, stages=2)
