"""Places of paged states in one launch: a token finds its row by binary search."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention import AttentionBatch
from penstock.kernels.states import StatePlaces

TILE = 128  # tokens of one program


def places_of(positions: Tensor, batch: AttentionBatch, known: Tensor, block_size: int, zeros: int) -> StatePlaces:
    """`kernels.states.state_places` by the kernel, without waiting for the device."""
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
    low = token * 0  # how many of query_start are known not to lie past the token
    high = low + count + 1
    for _ in range(steps):
        middle = (low + high) // 2
        reached = tl.load(query_start + middle, mask=low < high, other=0) <= token
        low, high = tl.where((low < high) & reached, middle + 1, low), tl.where((low < high) & ~reached, middle, high)
    row = low - 1
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
