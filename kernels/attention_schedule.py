"""The work of each attention program, found on the device once for all layers of a step.

Chunks are cut into tiles of queries, which are listed: most rows of a step in a CUDA graph have none, and a program
that searched all rows for its tile would take as long as many a tile does.

For streamed attention rows of one query are cut into units of keys. Leading blocks that all rows have in common, as
prefix reuse leaves them, are units of their own: those are attended by many rows at once, so that they are read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.records import AttentionBatch

ROWS = 256  # whose tiles are listed at once: one kernel serves steps of any number of rows
HEADER = 3  # units that rows share; groups of rows; the first row that is served
FEW_ROWS = 4  # rows from which a shared prefix is worth reading once
SHORT = 4  # units from which it is
BLOCKS = 32  # of the tables that are compared at once


def schedule_units(batch: AttentionBatch, block_size: int, keys: int, together: int) -> Tensor:
    """int32 [3 + rows + 1]: the header, then how many units the rows before each one have of their own.

    keys: of a unit. together: rows whose queries fit one tile. Served are the rows of one query that have keys.
    """
    rows = len(batch.context)
    found = torch.empty(HEADER + rows + 1, dtype=torch.int32, device=batch.context.device)
    pdl = chip_of(found.device).pdl
    schedule_kernel[(1,)](
        batch.query_start, batch.context, batch.slots, batch.block_tables, found, rows, batch.block_tables.stride(0),
        TILE=triton.next_power_of_2(rows), BLOCK_SIZE=block_size, KEYS=keys, TOGETHER=together, FEW_ROWS=FEW_ROWS,
        SHORT=SHORT, BLOCKS=BLOCKS, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return found


def tiles_of(batch: AttentionBatch, tokens: int, queries: int, shortest: int) -> Tensor:
    """The list of a step's tiles, launched when it is asked for first: see `list_tiles`."""
    found = batch.tiles.get((queries, shortest))
    if found is None:
        found = batch.tiles[queries, shortest] = list_tiles(batch, tokens, queries, shortest)
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
def shared_blocks(slot, served, first, most, tables, stride, TILE: tl.constexpr, BLOCKS: tl.constexpr):
    """How many leading blocks, at most so many, are the same in the tables of all rows that are served."""
    lanes = tl.arange(0, BLOCKS)
    lines = tables + slot.to(tl.int64) * stride
    row = tl.arange(0, TILE)
    model = tables + tl.sum(tl.where(row == first, slot, 0), 0).to(tl.int64) * stride
    common = most
    start = 0
    while start < common:
        there = start + lanes < most
        wanted = tl.load(model + start + lanes, mask=there, other=0)
        held = tl.load(lines[:, None] + start + lanes[None, :], mask=served[:, None] & there[None, :], other=0)
        differs = served[:, None] & there[None, :] & (held != wanted[None, :])
        common = tl.minimum(common, tl.min(tl.min(tl.where(differs, start + lanes[None, :], most), 1), 0))
        start += BLOCKS
    return common


@triton.jit(
    do_not_specialize=("rows", "stride"),
    do_not_specialize_on_alignment=("query_start", "context", "slots", "tables"),
)
def schedule_kernel(
    query_start, context, slots, tables, found, rows, stride,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, TOGETHER: tl.constexpr, FEW_ROWS: tl.constexpr,
    SHORT: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows of a step in one program. A row keeps a key of its own at least."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, TILE)
    real = row < rows
    count = tl.load(query_start + row + 1, mask=real, other=0) - tl.load(query_start + row, mask=real, other=0)
    length = tl.load(context + row, mask=real, other=0)
    slot = tl.load(slots + row, mask=real, other=0)
    served = (count == 1) & (length > 0)
    first = tl.min(tl.where(served, row, TILE), 0)
    last = tl.max(tl.where(served, row, -1), 0)
    most = tl.min(tl.where(served, (length - 1) // KEYS, 1 << 30), 0)
    if (tl.sum(served.to(tl.int32), 0) < FEW_ROWS) | (most < SHORT):
        most = 0
    shared = shared_blocks(slot, served, first, most * KEYS // BLOCK_SIZE, tables, stride, TILE, BLOCKS)
    units = shared * BLOCK_SIZE // KEYS
    if units < SHORT:
        units = 0
    own = tl.where(served, tl.cdiv(length - units * KEYS, KEYS), 0)
    tl.store(found, units)
    tl.store(found + 1, last // TOGETHER + 1)
    tl.store(found + 2, first)
    tl.store(found + 3, 0)
    tl.store(found + 4 + row, tl.cumsum(own, 0), mask=real)
