"""The work of each attention program, found on the device once for all layers of a step.

Chunks are cut into tiles of queries, which are listed: most rows of a step in a CUDA graph have none, and a program
that searched all rows for its tile would take as long as many a tile does.

Rows of one query that begin with the same blocks, as prefix reuse leaves them, stand together in groups. The keys that
a group has in common are attended by all of its rows at once (`kernels.attention_prefix`), in splits of some units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention_tiling import Tiling, most_splits, tile_lines
from penstock.kernels.chip import chip_of
from penstock.kernels.records import AttentionBatch

ROWS = 256  # whose tiles are listed at once: one kernel serves steps of any number of rows
SHORT = 4  # units from which a common prefix is worth a tile of its own
FEWEST = 2  # units of a split
BLOCKS = 32  # of a table that are compared at once
COLUMNS = 16  # rows that every row is compared with at once
LONER = 1 << 30  # the prefix of a row that shares none, plus its number; block numbers are less

# A schedule: the header, then lists.
HEADER: tl.constexpr = tl.constexpr(3)  # groups; splits of all groups; units of a split
PREFIX: tl.constexpr = tl.constexpr(0)  # by row: units that it shares; only these are there where no group is
PLACE: tl.constexpr = tl.constexpr(1)  # by row: where its result of the first split stands
STEP: tl.constexpr = tl.constexpr(2)  # by row: how far behind it the next one stands
ORDER: tl.constexpr = tl.constexpr(3)  # rows, those of a group beside each other
FIRST: tl.constexpr = tl.constexpr(4)  # by group: where its rows begin in that order
MEMBERS: tl.constexpr = tl.constexpr(5)  # by group: how many rows it has
STARTS: tl.constexpr = tl.constexpr(6)  # by group: splits of those before it
LISTS = 7
UNIT: tl.constexpr = tl.constexpr(64)  # keys that are shared or not, and of one iteration over them


def schedule_prefixes(
    batch: AttentionBatch, block_size: int, together: int, kv_heads: int, programs: int, least: int
) -> Tensor:
    """int32 [HEADER + LISTS * rows], see above; no group where sharing would save fewer than `least` reads of a unit.

    Units are a multiple of the block size. together: rows whose queries fit one tile. Served are the rows of one
    query that have keys; each keeps one of its own. Splits are such that there are about as many as programs, for so
    many key-value heads.
    """
    rows = len(batch.context)
    found = torch.empty(HEADER.value + LISTS * rows, dtype=torch.int32, device=batch.context.device)
    pdl = chip_of(found.device).pdl
    tile = max(COLUMNS, triton.next_power_of_2(rows))
    wide = max(tile // ROWS, 1)  # more threads have fewer registers each
    schedule_kernel[(1,)](
        batch.query_start, batch.context, batch.slots, batch.block_tables, found, rows, batch.block_tables.stride(0),
        programs, kv_heads, least,
        TILE=tile, BLOCK_SIZE=block_size, TOGETHER=together,
        SHORT=SHORT, FEWEST=FEWEST, BLOCKS=BLOCKS // wide, COLUMNS=COLUMNS // wide, LONER=LONER, PDL=pdl,
        num_warps=8 * wide, launch_pdl=pdl,
    )  # fmt: skip
    return found


def launched_tiles(batch: AttentionBatch, tokens: int, tiling: Tiling, group: int, shortest: int) -> tuple[Tensor, int]:
    """What tells the programs of a launch their tiles, and how many tiles there are at most. group: heads that share
    keys; shortest: fewest queries of rows that are listed."""
    if tiling.by_row:
        return batch.query_start, len(batch.context)
    queries = tiling.block_m // group
    listed = tiles_of(batch, tokens, queries, shortest)
    return listed, most_tiles(len(batch.context), tokens, queries, shortest)


def partial_results(
    batch: AttentionBatch, out: Tensor, tiling: Tiling, group: int, kv_heads: int, tiles: int, reach: int
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Memory for what the splits of each tile give, fp32 [tiles, places, lines, dim], and the logarithms of their
    weights, [tiles, places, lines]; counters of the programs that are done; places and lines. Where programs are dealt
    out, those of a key-value head have their places in their order, whatever their tiles.

    tiles: of each key-value head; reach: keys that one sees, at most.
    """
    lines = tile_lines(tiling, group, batch.max_query)
    if tiling.programs == 1:
        return out, out, batch.query_start, 1, lines  # of which nothing is read or written
    places = most_splits(tiling, reach)
    tiles = kv_heads if tiling.dealt else tiles * kv_heads
    shape = tiles, places, lines
    partials = torch.empty(*shape, out.shape[2], dtype=torch.float32, device=out.device)
    lses = torch.empty(*shape, dtype=torch.float32, device=out.device)
    counters = tiles * places if tiling.dealt else tiles
    arrivals = batch.query_start.new_zeros(counters) if batch.arrivals is None else batch.arrivals
    assert len(arrivals) >= counters
    return partials, lses, arrivals, places, lines


def tiles_of(batch: AttentionBatch, tokens: int, queries: int, shortest: int) -> Tensor:
    """The list of a step's tiles, launched when it is asked for first: see `list_tiles`."""
    key = tokens, queries, shortest
    found = batch.tiles.get(key)
    if found is None:
        found = batch.tiles[key] = list_tiles(batch, tokens, queries, shortest)
    return found


def most_tiles(rows: int, tokens: int, queries: int, shortest: int) -> int:
    """A bound of the tiles in that list: a row that is served has count // queries + 1 at most."""
    return tokens // queries + min(rows, max(tokens // shortest, 1))


def list_tiles(batch: AttentionBatch, tokens: int, queries: int, shortest: int) -> Tensor:
    """int32 [1 + 2 * most tiles]: how many tiles of so many queries the rows of at least `shortest` have between them,
    then for each its row and the first of its queries there. Rows come in their order, tiles of a row the last first.
    """
    rows = len(batch.context)
    most = most_tiles(rows, tokens, queries, shortest)
    found = torch.empty(1 + 2 * most, dtype=torch.int32, device=batch.context.device)
    pdl = chip_of(found.device).pdl
    tiles_kernel[(1,)](
        batch.query_start, found, rows, shortest,
        TILE=ROWS, QUERIES=queries, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=("rows", "shortest"), do_not_specialize_on_alignment=("query_start",))
def tiles_kernel(
    query_start, found, rows, shortest, TILE: tl.constexpr, QUERIES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """All rows of a step in one program, TILE at once."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    before = 0
    for first in range(0, rows, TILE):
        row = first + tl.arange(0, TILE)
        real = row < rows
        count = tl.load(query_start + row + 1, mask=real, other=0) - tl.load(query_start + row, mask=real, other=0)
        tiles = tl.where(real & (count >= shortest), tl.cdiv(count, QUERIES), 0)
        start = before + tl.cumsum(tiles, 0) - tiles
        for at in range(tl.max(tiles, 0)):
            place = found + 1 + 2 * (start + at)
            tl.store(place, row, mask=at < tiles)
            tl.store(place + 1, (tiles - 1 - at) * QUERIES, mask=at < tiles)
        before += tl.sum(tiles, 0)
    tl.store(found, before)


@triton.jit
def count_equal(own, others, rows, COLUMNS: tl.constexpr):
    """How many of the rows have the value that each has, itself among them. others: where all rows' values stand."""
    counts = tl.zeros([own.shape[0], COLUMNS], tl.int32)
    for start in range(0, rows, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        value = tl.load(others + other, mask=other < rows, other=-1)
        counts += (own[:, None] == value[None, :]).to(tl.int32)
    return tl.sum(counts, 1)


@triton.jit
def choose_prefixes(
    lines, most, scratch, rows,
    BLOCK_SIZE: tl.constexpr, TOGETHER: tl.constexpr, SHORT: tl.constexpr, COLUMNS: tl.constexpr,
    LONER: tl.constexpr,
):  # fmt: skip
    """Which of the prefixes of SHORT, twice, four times as many units spares each row most: its last block, LONER plus
    the row for none, and its units. Rows with one block in common are taken to share those before it.
    """
    row = tl.arange(0, lines.shape[0])
    chosen = LONER + row
    units = tl.zeros_like(row)
    best = tl.zeros([lines.shape[0]], tl.float32)
    level = SHORT
    twins = 2
    while twins > 1:
        deep = most >= level
        block = tl.load(lines + (level * UNIT // BLOCK_SIZE - 1), mask=deep, other=0)
        block = tl.where(deep, block, LONER + row)
        tl.debug_barrier()
        tl.store(scratch + row, block, mask=row < rows)
        tl.debug_barrier()
        alike = tl.maximum(count_equal(block, scratch, rows, COLUMNS), 1)
        spared = level * (1.0 - tl.cdiv(alike, TOGETHER).to(tl.float32) / alike.to(tl.float32))
        better = spared > best
        chosen = tl.where(better, block, chosen)
        units = tl.where(better, level, units)
        best = tl.where(better, spared, best)
        level *= 2
        twins = tl.max(alike, 0)
    return chosen, units


@triton.jit
def rank_rows(chosen, scratch, rows, COLUMNS: tl.constexpr):
    """Of each row: how many rows come before its equals, how many equals do before itself, and how many there are."""
    row = tl.arange(0, chosen.shape[0])
    less = tl.zeros([chosen.shape[0], COLUMNS], tl.int32)
    before, equal = less, less
    tl.debug_barrier()
    tl.store(scratch + row, chosen, mask=row < rows)
    tl.debug_barrier()
    for start in range(0, rows, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        value = tl.load(scratch + other, mask=other < rows, other=2147483647)
        same = chosen[:, None] == value[None, :]
        less += (value[None, :] < chosen[:, None]).to(tl.int32)
        before += (same & (other[None, :] < row[:, None])).to(tl.int32)
        equal += same.to(tl.int32)
    return tl.sum(less, 1), tl.sum(before, 1), tl.sum(equal, 1)


@triton.jit
def common_blocks(lines, models, limit, BLOCKS: tl.constexpr):
    """How many leading blocks, at most so many, each line has in common with its model."""
    lanes = tl.arange(0, BLOCKS)
    first = limit[:, None] + tl.zeros_like(lanes)[None, :]  # that differs
    for start in range(0, tl.max(limit, 0), BLOCKS):
        at = (start + lanes)[None, :]
        there = at < limit[:, None]
        held = tl.load(lines[:, None] + at, mask=there, other=0)
        wanted = tl.load(models[:, None] + at, mask=there, other=0)
        first = tl.where(held != wanted, tl.minimum(first, at), first)
    return tl.min(first, 1)


@triton.jit
def least_of_group(values, lead, members):
    """The least of the values that stand at the places lead .. lead + members - 1."""
    least = tl.load(values + lead, mask=members > 0, other=0)
    for at in range(1, tl.max(members, 0)):
        least = tl.minimum(least, tl.load(values + lead + at, mask=at < members, other=2147483647))
    return least


@triton.jit(
    do_not_specialize=("rows", "stride", "programs", "kv_heads", "least"),
    do_not_specialize_on_alignment=("query_start", "context", "slots", "tables"),
)
def schedule_kernel(
    query_start, context, slots, tables, found, rows, stride, programs, kv_heads, least,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOGETHER: tl.constexpr, SHORT: tl.constexpr,
    FEWEST: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, LONER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows of a step in one program; threads hand values to each other through the schedule's own memory."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    prefix = found + HEADER
    order, scratch = prefix + ORDER * rows, prefix + STARTS * rows
    row = tl.arange(0, TILE)
    real = row < rows
    count = tl.load(query_start + row + 1, mask=real, other=0) - tl.load(query_start + row, mask=real, other=0)
    length = tl.load(context + row, mask=real, other=0)
    slot = tl.load(slots + row, mask=real, other=0)
    most = tl.where(count == 1, (length - 1) // UNIT, 0)
    lines = tables + slot.to(tl.int64) * stride
    chosen, units = choose_prefixes(lines, most, scratch, rows, BLOCK_SIZE, TOGETHER, SHORT, COLUMNS, LONER)
    groups = 0
    splits = 0
    common = tl.zeros_like(row)
    if tl.max(units, 0) > 0:
        less, before, equal = rank_rows(chosen, scratch, rows, COLUMNS)
        equal = tl.maximum(equal, 1)
        size = tl.cdiv(equal, tl.cdiv(equal, TOGETHER))
        nth = before % size
        place = less + before
        lead = place - nth
        members = tl.minimum(size, less + equal - lead)
        tl.store(order + place, row, mask=real)
        tl.debug_barrier()
        model = tl.load(slots + tl.load(order + lead, mask=real, other=0)).to(tl.int64)
        limit = tl.where(members > 1, tl.minimum(2 * units, most), 0)  # twice as many were not worth more
        same = common_blocks(lines, tables + model * stride, limit * (UNIT // BLOCK_SIZE), BLOCKS)
        tl.store(prefix + place, same // (UNIT // BLOCK_SIZE), mask=real)
        tl.debug_barrier()
        common = least_of_group(prefix, lead, tl.where(real, members, 0))
        common = tl.where(common >= SHORT, common, 0)
        leads = (nth == 0) & (common > 0)
        if tl.sum(tl.where(leads, common * (members - 1), 0), 0) >= least:
            shared = tl.sum(tl.where(leads, common, 0), 0)
            span = tl.maximum(tl.cdiv(shared * kv_heads, programs), FEWEST)
            cut = tl.where(leads, tl.cdiv(common, span), 0)
            groups = tl.sum(leads.to(tl.int32), 0)
            splits = tl.sum(cut, 0)
            group = tl.cumsum(leads.to(tl.int32), 0) - 1
            tl.store(found + 2, span)
            tl.store(prefix + FIRST * rows + group, lead, mask=leads)
            tl.store(prefix + MEMBERS * rows + group, members, mask=leads)
            tl.store(scratch + group, tl.cumsum(cut, 0) - cut, mask=leads)
            results = cut * members
            tl.store(prefix + PLACE * rows + place, tl.cumsum(results, 0) - results, mask=leads)
            tl.debug_barrier()
            base = tl.load(prefix + PLACE * rows + lead, mask=common > 0, other=0)
            tl.debug_barrier()
            tl.store(prefix + PLACE * rows + row, base + nth, mask=real)
            tl.store(prefix + STEP * rows + row, members, mask=real)
        else:
            common = tl.zeros_like(row)
    tl.debug_barrier()  # what stood here for others has been read
    tl.store(prefix + row, common, mask=real)
    tl.store(found, groups)
    tl.store(found + 1, splits)
