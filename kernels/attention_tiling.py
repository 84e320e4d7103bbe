"""How a batch of attention is cut into programs: sizes on the host decide alone, so that nothing waits for the device.

The tiles stand in attention_tilings.json, in the order of preference: the best of `benchmarks.kernels --sweep` on an
H200 first; those of windows by `benchmarks.window_kernels`. The first that the chip has the shared memory for is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import msgspec
import torch

from penstock.kernels.chip import Chip
from penstock.protocol.errors import ConfigError

LOW = 16  # rows of the lowest tile that the matrix units take
PACKED = 64  # rows up to which all queries of a sequence are packed into one tile
LONG_CHUNK = 4096  # queries of a row from which the tallest tiles measure best
FEW_TILES = 8  # SMs for each tile of a whole sequence from which longer iterations of more warps measure best
FEW_CHUNKS = 4  # SMs for each tile of 128 rows from which splitting its keys does
LONG_REACH = 2048  # keys from which it does
TALL_WAVES = 2  # programs of tall tiles per processor where their keys are cut
WAVES = 4  # tiles of whole rows per processor up to which their keys are cut
MIN_SPLIT_KEYS = 128  # fewest keys that are worth a program
MAX_PROGRAMS = 64
INVARIANT_SPLIT_KEYS = 512  # fewest keys of a split whose bounds may not depend on the batch
MAX_INVARIANT_SPLITS = 128  # splits of the longest sequence: each takes memory for its partial results
PARTIAL_BYTES = 256 << 20  # that the partial results of a layer may take
WIDEST = 512  # numbers of a head
RESIDENT = 2  # low tiles that an SM wants at once: one waits for its keys while another multiplies


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A tile for heads of up to `dim` numbers of `item` bytes."""

    kind: str  # low, few, window, packed: of a sequence's queries; short, long: of a chunk's
    item: int  # 1: keys and values, of which products take copies in 2 bytes, as queries are
    dim: int
    block_m: int
    block_n: int
    warps: int
    stages: int

    def shared_bytes(self, dim: int, chip: Chip) -> int:
        """That a program takes for heads of `dim`, or a little less: keys and values of the iterations in flight, the
        queries, the weights."""
        buffers = max((self.stages - 1) // 2, 1)  # an iteration's blocks are looked up one iteration before its keys
        if self.block_m >= 64 and self.item == 2 and chip.shared_operands:  # products are waited for later
            buffers += 1
        width = max(LOW, power_of_2(dim))
        keys, queries = 2 * buffers * self.block_n * width, self.block_m * (width + self.block_n)
        return keys * self.item + queries * max(self.item, 2) + 1024


@dataclass(frozen=True)
class Tiling:
    """One launch."""

    block_m: int  # of a tile: queries times the heads of a group, the rest idle; a power of 2, at least 16
    block_n: int  # keys of one iteration; a power of 2, at least 16
    programs: int  # that share the keys of a tile (split-K); where `dealt`, that all tiles of a key-value head share
    warps: int
    stages: int
    by_row: bool = False  # a tile is a sequence, and sequences whose queries do not fit are left out
    split_keys: int = 0  # keys of a split; 0: as many as a program has, at least `min_split_keys`
    min_split_keys: int = MIN_SPLIT_KEYS
    one_loop: bool = False  # all keys are masked, in one loop, and keys and values have one layout

    @property
    def dealt(self) -> bool:
        """Whether programs are dealt out to the tiles on the device, which alone knows how many there are."""
        return self.programs > 1 and not self.by_row and not self.split_keys

    def grid(self, kv_heads: int, tiles: int) -> tuple[int, int, int]:
        """Of a launch over so many tiles, see `attention_triton.find_tile`."""
        if self.by_row:
            return kv_heads, tiles, self.programs
        return (max(tiles, self.programs), kv_heads, 1) if self.dealt else (tiles, kv_heads, self.programs)


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
    dtype: torch.dtype  # of keys and values; of queries in fp32
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


@lru_cache(maxsize=1)
def rows() -> tuple[Row, ...]:
    """All of them, those of a kind in the order of preference."""
    return msgspec.json.decode(Path(__file__).with_name("attention_tilings.json").read_bytes(), type=tuple[Row, ...])


@lru_cache(maxsize=256)
def find_row(kinds: tuple[str, ...], lines: int, dim: int, item: int, chip: Chip) -> Row | None:
    """The first row, of the first kind that has one, whose tiles hold so many lines and fit the chip. A low tile fits
    RESIDENT times if any does.
    """
    found = []
    for kind in kinds:
        wide = [row for row in rows() if row.kind == kind and row.item == item and row.dim >= dim]
        narrowest = min((row.dim for row in wide), default=0)
        found += [row for row in wide if row.dim == narrowest and row.block_m >= lines]
    room = chip.shared_memory or 1 << 30  # Triton's interpreter knows no limit
    for programs in (RESIDENT if kinds[-1] == "low" else 1, 1):
        for row in found:
            if programs * row.shared_bytes(dim, chip) <= room:
                return row
    return None


def cut(kinds: tuple[str, ...], lines: int, shape: Shape, chip: Chip) -> Tiling:
    """A tile of at least so many lines. Raises ConfigError if the chip has no room for one."""
    item = shape.dtype.itemsize
    row = find_row(kinds, lines, shape.dim, item, chip)
    if row is None:
        problem = f"with {shape.group} heads to a key-value head and {item} bytes a number their attention needs more"
        memory = f"than the {chip.shared_memory} bytes of shared memory of {chip.name}"
        raise ConfigError("head_dim", shape.dim, f"{problem} {memory}; heads may have {WIDEST} numbers, in bfloat16")
    return Tiling(row.block_m, row.block_n, 1, row.warps, row.stages)


def packed_lines(shape: Shape, chip: Chip) -> int:
    """Lines up to which all queries of a sequence are packed into one tile."""
    item = shape.dtype.itemsize
    fit = (lines for lines in (PACKED, PACKED // 2) if find_row(("packed", "short"), lines, shape.dim, item, chip))
    return max(next(fit, LOW), shape.group)


def low_tiling(shape: Shape, queries: int, chip: Chip) -> Tiling:
    """A tile for each row of up to `queries`; keys are cut where rows are too few for the device."""
    lines, tiles = power_of_2(queries * shape.group), shape.rows * shape.kv_heads
    few = lines <= LOW and tiles * FEW_TILES <= chip.num_sms
    programs = split_programs(shape, shape.rows, 1 if few else WAVES, chip)
    if lines > LOW:
        return replace(cut(("packed", "short"), lines, shape, chip), programs=programs, by_row=True)
    first = "few" if few else "window" if shape.window and tiles * programs >= chip.num_sms else "low"
    tiling = cut((first, "low"), lines, shape, chip)
    return replace(tiling, programs=programs, by_row=True, one_loop=shape.window > 0)


def tall_tiling(shape: Shape, chip: Chip) -> Tiling:
    """Tiles of up to 128 rows over all sequences."""
    kinds = ("short",) if shape.max_query < LONG_CHUNK else ("long", "short")
    tiling = cut(kinds, power_of_2(shape.group), shape, chip)
    return replace(tiling, programs=tall_programs(shape, tiling, chip))


def tall_programs(shape: Shape, tiling: Tiling, chip: Chip) -> int:
    """Programs of each key-value head for tall tiles, or 1 where as many tokens as there may be fill half the chip. In
    a step that mixes chunks with other rows they are far fewer than any bound of theirs."""
    programs = max(TALL_WAVES * chip.num_sms // shape.kv_heads, 1)
    full = shape.tokens // (tiling.block_m // shape.group)
    return programs if 2 * full <= programs and shape.reach >= 2 * MIN_SPLIT_KEYS else 1


def tall_tiles(shape: Shape, tiling: Tiling) -> int:
    """A bound of the tiles of all sequences."""
    return min(shape.tokens, shape.tokens // (tiling.block_m // shape.group) + shape.rows)


def wants_split_k(shape: Shape, chip: Chip) -> bool:
    """Whether chunks are so short, and see so many keys, that splitting keys gains more than Hopper's instructions."""
    tiles = -(-shape.tokens * shape.group // 128)
    return tiles * shape.kv_heads * FEW_CHUNKS <= chip.num_sms and shape.reach >= LONG_REACH


def invariant_tiling(shape: Shape, chip: Chip) -> Tiling:
    """The form in which a query's result has the same bits whatever the batch, the chunk and the number of programs.

    All that orders its arithmetic follows from the sizes of the heads: iterations, tiles, where splits begin. Only the
    number of programs, which take splits in turn, follows the batch. One program keeps its results to itself, so that
    one it is where partial results would take too much memory.
    """
    return with_invariant_splits(cut(("short",), power_of_2(shape.group), shape, chip), shape, chip)


def with_invariant_splits(tiling: Tiling, shape: Shape, chip: Chip) -> Tiling:
    """The tile with such splits of keys."""
    by_row = shape.max_query * shape.group <= tiling.block_m
    tiles = shape.rows if by_row else tall_tiles(shape, tiling)
    tiling = replace(tiling, by_row=by_row, split_keys=invariant_split_keys(shape.longest))
    programs = min(split_programs(shape, tiles, WAVES, chip), -(-shape.reach // tiling.split_keys))
    tiling = replace(tiling, programs=programs)
    return tiling if partial_bytes(shape, tiling, tiles) <= PARTIAL_BYTES else replace(tiling, programs=1)


def partial_bytes(shape: Shape, tiling: Tiling, tiles: int) -> int:
    """Of the partial results of so many tiles."""
    if tiling.programs == 1:
        return 0
    lines = tile_lines(tiling, shape.group, shape.max_query)
    return tiles * shape.kv_heads * most_splits(tiling, shape.reach + tiling.block_n) * lines * (shape.dim + 1) * 4


def tile_lines(tiling: Tiling, group: int, max_query: int) -> int:
    """Lines of a tile that have partial results."""
    return group * min(tiling.block_m // group, max_query) if tiling.by_row else tiling.block_m


def most_splits(tiling: Tiling, reach: int) -> int:
    """Splits of a tile that sees so many keys, wherever they begin."""
    return -(-reach // tiling.split_keys) + 1 if tiling.split_keys else tiling.programs


def invariant_split_keys(longest: int) -> int:
    """Keys of a split for a longest sequence: a power of 2 that depends on nothing else.

    The bits of a result are the same for every server with up to 65,536 keys, and for all of one length beyond.
    """
    return max(INVARIANT_SPLIT_KEYS, power_of_2(-(-longest // MAX_INVARIANT_SPLITS)))


def split_programs(shape: Shape, tiles: int, waves: int, chip: Chip) -> int:
    """Programs for each tile so that each SM has about `waves` of them."""
    wanted = waves * chip.num_sms // (tiles * shape.kv_heads)
    return max(1, min(wanted, -(-shape.reach // MIN_SPLIT_KEYS), MAX_PROGRAMS))
