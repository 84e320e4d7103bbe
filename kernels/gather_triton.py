"""The inputs of a step in one launch; each token finds its row by binary search."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.records import OWN_DRAFT, AttentionBatch, Entries, InputRows, Inputs, SlotHistory, StatePlaces

TILE = 128  # tokens or rows of one program
OWN = tl.constexpr(OWN_DRAFT)


def gather_tokens(
    rows: InputRows, tokens: Tensor, known: Tensor, block_tables: Tensor, block_size: int, offsets: Tensor | None = None
) -> Inputs:
    """`kernels.gather.gather_inputs` by the kernel, without waiting for the device."""
    total, count = len(rows.draft_ids), len(rows.slots)
    device = tokens.device
    assert tokens.is_contiguous()
    found = Inputs(
        input_ids=torch.empty(total, dtype=torch.int32, device=device),
        positions=torch.empty(total, dtype=torch.int64, device=device),
        slot_mapping=torch.empty(total, dtype=torch.int64, device=device),
        context=torch.empty(count, dtype=torch.int32, device=device),
        rope_positions=None if offsets is None else torch.empty(total, dtype=torch.int64, device=device),
    )
    token_tiles = triton.cdiv(total, TILE)
    gather_kernel[(token_tiles + triton.cdiv(count, TILE),)](
        rows.query_start, rows.slots, rows.starts, rows.draft_ids, tokens, known, block_tables,
        found.input_ids, found.positions, found.slot_mapping, found.context,
        known if offsets is None else offsets,
        found.positions if found.rope_positions is None else found.rope_positions,
        total, count, token_tiles, count.bit_length() + 1, tokens.shape[1], block_tables.stride(0),
        block_tables.shape[1], BLOCK_SIZE=block_size, TILE=TILE, OFFSETS=offsets is not None, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit
def find_rows(query_start, token, count, steps):
    """The row of each token by binary search; `count` for tokens past the last row's end."""
    low = token * 0  # entries of query_start that are known not to exceed the token
    high = low + count + 1
    for _ in range(steps):
        middle = (low + high) // 2
        reached = tl.load(query_start + middle, mask=low < high, other=0) <= token
        low, high = tl.where((low < high) & reached, middle + 1, low), tl.where((low < high) & ~reached, middle, high)
    return low - 1


@triton.jit
def first_position(slots, starts, known, row, there):
    """Of rows: where a chunk starts, or so many positions before the end of the slot's known tokens."""
    start = tl.load(starts + row, mask=there, other=0)
    slot = tl.load(slots + row, mask=there, other=0)
    end = tl.load(known + slot, mask=there & (start < 0), other=0)
    return tl.where(start < 0, tl.maximum(end + start, 0), start), slot.to(tl.int64)


@triton.jit(do_not_specialize=("total", "count", "token_tiles", "steps"))
def gather_kernel(
    query_start, slots, starts, draft_ids, tokens, known, block_tables, input_ids, positions, slot_mapping, context,
    offsets, rope_positions, total, count, token_tiles, steps, row_length, table_stride, table_blocks,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """The first programs take tokens, the others rows. steps: enough to search the rows by halves."""
    tile = tl.program_id(0)
    lanes = tl.arange(0, TILE)
    if tile >= token_tiles:
        row = (tile - token_tiles) * TILE + lanes
        there = row < count
        first, _ = first_position(slots, starts, known, row, there)
        low = tl.load(query_start + row, mask=there, other=0)
        high = tl.load(query_start + row + 1, mask=there, other=0)
        keys = tl.minimum(first + high - low, table_blocks * BLOCK_SIZE)
        tl.store(context + row, tl.where(high > low, keys, 0), mask=there)
        return
    token = tile * TILE + lanes
    there = token < total
    row = find_rows(query_start, token, count, steps)
    used = there & (row < count)
    first, slot = first_position(slots, starts, known, row, used)
    position = tl.where(used, first + token - tl.load(query_start + row, mask=used, other=0), 0)
    draft = tl.load(draft_ids + token, mask=used, other=-1)
    own = tl.load(tokens + slot * row_length + position, mask=used & (position < row_length), other=0)
    block = position // BLOCK_SIZE
    held = used & (block < table_blocks)
    page = tl.load(block_tables + slot * table_stride + block, mask=held, other=0).to(tl.int64)
    tl.store(input_ids + token, tl.where(draft >= 0, draft, own), mask=there)
    tl.store(positions + token, position.to(tl.int64), mask=there)
    tl.store(slot_mapping + token, tl.where(held, page * BLOCK_SIZE + position % BLOCK_SIZE, 0), mask=there)
    if OFFSETS:
        turned = tl.maximum(position + tl.load(offsets + slot, mask=used, other=0), 0)
        tl.store(rope_positions + token, turned.to(tl.int64), mask=there)


def drafts_of(entries: Entries, history: SlotHistory) -> Tensor:
    """`kernels.gather.own_drafts` by the kernel, without waiting for the device: int32 [entries]."""
    assert history.tokens.is_contiguous()
    count = len(entries.drafts)
    found = torch.empty_like(entries.drafts)
    drafts_kernel[(triton.cdiv(count, TILE),)](
        entries.drafts, entries.slots, entries.depth, history.known, history.tokens, found,
        count, history.tokens.shape[1], TILE=TILE, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=("count",))
def drafts_kernel(drafts, slots, depths, known, tokens, found, count, row_length, TILE: tl.constexpr):
    """Drafts that the host named stay; the others are read behind the known tokens."""
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = entry < count
    draft = tl.load(drafts + entry, mask=there, other=0)
    own = there & (draft == OWN)
    slot = tl.load(slots + entry, mask=own, other=0).to(tl.int64)
    place = tl.load(known + slot, mask=own, other=0) + tl.load(depths + entry, mask=own, other=0)
    token = tl.load(tokens + slot * row_length + tl.minimum(place, row_length - 1), mask=own, other=0)
    tl.store(found + entry, tl.where(own, token, draft), mask=there)


def places_of(positions: Tensor, batch: AttentionBatch, known: Tensor, block_size: int, zeros: int) -> StatePlaces:
    """`kernels.gather.state_places` by the kernel, without waiting for the device."""
    total, count = len(positions), len(batch.slots)
    found = StatePlaces(torch.empty_like(positions), torch.empty_like(positions))
    places_kernel[(triton.cdiv(total, TILE),)](
        positions, batch.query_start, batch.slots, batch.block_tables, batch.slot_mapping, known,
        found.before, found.own, total, count, count.bit_length() + 1, batch.block_tables.stride(0),
        batch.block_tables.shape[1], zeros, BLOCK_SIZE=block_size, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=("total", "count", "steps", "zeros"))
def places_kernel(
    positions, query_start, slots, block_tables, slot_mapping, known, before, own,
    total, count, steps, table_stride, table_blocks, zeros, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """steps: enough to search the rows by halves."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = token < total
    row = find_rows(query_start, token, count, steps)
    used = there & (row < count)
    slot = tl.load(slots + row, mask=used, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=there, other=0)
    earlier = tl.maximum(position - 1, 0)
    block = tl.minimum(earlier // BLOCK_SIZE, table_blocks - 1)
    held = used & (position > 0)
    page = tl.load(block_tables + slot * table_stride + block, mask=held, other=0).to(tl.int64)
    tl.store(before + token, tl.where(held, page * BLOCK_SIZE + earlier % BLOCK_SIZE, zeros), mask=there)
    ahead = used & (position >= tl.load(known + slot, mask=used, other=0) - 1)
    place = tl.load(slot_mapping + token, mask=ahead, other=0)
    tl.store(own + token, place, mask=there)
