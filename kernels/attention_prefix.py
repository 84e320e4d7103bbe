"""Attention of rows of one query over the keys that they have in common: read once for a group of rows.

A program computes a tile of a group's queries, by the heads that share a key-value head, over some units of the group's
keys, and stores the partial results. The general kernel begins behind the prefix and adds them (cascade inference: Ye
et al., 2024). `kernels.attention_schedule` finds on the device which rows share what; where none do, programs end at
once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention_fp8 import dim_tile, head_pages, paired, paired_queries
from penstock.kernels.attention_schedule import (
    FIRST,
    HEADER,
    MEMBERS,
    ORDER,
    PLACE,
    PREFIX,
    STARTS,
    UNIT,
    schedule_prefixes,
)
from penstock.kernels.attention_triton import attend_keys
from penstock.kernels.chip import chip_of
from penstock.kernels.records import AttentionBatch, AttentionOptions, SharedPrefixes

CROWD = 16  # rows, padded ones included, from which a launch that may have nothing to do is worth its microsecond
MOST_ROWS = 1024  # whose schedule one program makes in some microseconds
SAVED = 192 << 20  # bytes of keys and values that need not be read again, from a cache at best, for two launches more
BLOCK_M = 64  # of a tile: heads of several rows
CTAS_PER_SM = 2
WARPS = 4
STAGES = 3
TYPES = (torch.bfloat16, torch.float16)
LOG2_E = math.log2(math.e)


def serves(q: Tensor, k_pages: Tensor, batch: AttentionBatch, options: AttentionOptions) -> bool:
    """Whether rows of such a batch may share keys, and the kernel takes these types and sizes."""
    _, size, kv_heads, dim = k_pages.shape
    return (
        options.window == 0
        and batch.max_query == 1
        and batch.limits is None
        and not batch.invariant
        and CROWD <= len(batch.context) <= MOST_ROWS
        and q.dtype in TYPES
        and dim <= 128
        and 2 * q.shape[1] // kv_heads <= BLOCK_M
        and UNIT.value % size == 0
    )


class Grid(NamedTuple):
    """What a schedule depends on beside the batch: see `schedule_prefixes`."""

    block_size: int
    together: int
    kv_heads: int
    programs: int
    least: int


def grid_of(q: Tensor, k_pages: Tensor) -> Grid:
    _, size, kv_heads, dim = k_pages.shape
    unit = 2 * UNIT.value * kv_heads * dim * k_pages.element_size()
    programs = CTAS_PER_SM * chip_of(q.device).num_sms
    return Grid(size, BLOCK_M * kv_heads // q.shape[1], kv_heads, programs, -(-SAVED // unit))


def schedule_of(q: Tensor, k_pages: Tensor, batch: AttentionBatch) -> tuple[Tensor, bool]:
    """The schedule of a step for such a layer, and whether this launched it: layers of one kind have one schedule."""
    grid = grid_of(q, k_pages)
    found = batch.schedules.get(grid)
    if found is not None:
        return found, False
    batch.schedules[grid] = schedule_prefixes(batch, *grid)
    return batch.schedules[grid], True


def attend_prefixes(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, options: AttentionOptions
) -> SharedPrefixes:
    """One launch, for the general kernel that comes next. Nothing waits for the device.

    The schedule is launched on first use, in a model by `kernels.attention.prepare_attention`.
    """
    tokens, heads, dim = q.shape
    rows, kv_heads = len(batch.context), k_pages.shape[2]
    grid = grid_of(q, k_pages)
    schedule, launched = schedule_of(q, k_pages, batch)
    # A group has a result for each row and split: at most one split more than its share of the programs.
    results = rows + grid.together * -(-grid.programs // kv_heads)
    partials = torch.empty(results, heads, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(results, heads, dtype=torch.float32, device=q.device)
    scale = options.scale * LOG2_E
    if options.softcap:
        scale = 2 * scale / options.softcap  # of the exponent in tanh
    chip = chip_of(q.device)
    prefix_kernel[(grid.programs,)](
        q, *paired(k_pages, v_pages), partials, lses, schedule, batch.query_start, batch.slots, batch.block_tables,
        rows, tokens, batch.block_tables.stride(0), q.stride(0), scale,
        q if options.kv_scales is None else options.kv_scales,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_TILE=dim_tile(dim, options),
        BLOCK_SIZE=grid.block_size, BLOCK_M=BLOCK_M, SOFTCAP=options.softcap * LOG2_E,
        LAUNCHED=launched, ASM=chip.runs_triton, PDL=chip.pdl, num_warps=WARPS, num_stages=STAGES,
        launch_pdl=chip.pdl,
    )  # fmt: skip
    return SharedPrefixes(schedule, partials, lses)


@triton.jit
def find_group(starts, split, groups):
    """The last group whose first split is this one or before it."""
    low = 0
    high = groups
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= split
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit(
    do_not_specialize=("rows", "tokens", "table_stride"),
    do_not_specialize_on_alignment=("schedule", "query_start", "slots", "block_tables"),
)
def prefix_kernel(
    q, k_pages, v_pages, partials, lses, schedule, query_start, slots, block_tables,
    rows, tokens, table_stride, q_stride, scale, kv_scales,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, SOFTCAP: tl.constexpr, LAUNCHED: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Splits of groups, each for one key-value head. scale, SOFTCAP: see `attention_triton.attend_keys`.
    kv_scales: see `attention_triton.attention_kernel`.

    LAUNCHED: the schedule is the kernel's before this one. partials: fp32 [results, heads, dim]; lses: without dim.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PAIRS: tl.constexpr = k_pages.dtype.element_ty == tl.int16
    WIDE: tl.constexpr = DIM // 2 if PAIRS else DIM
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if LAUNCHED:
            tl.extra.cuda.gdc_wait()
    groups = tl.load(schedule)
    items = tl.load(schedule + 1) * KV_HEADS
    if PDL and not LAUNCHED:
        tl.extra.cuda.gdc_wait()
    prefix = schedule + HEADER
    order, starts = prefix + ORDER * rows, prefix + STARTS * rows
    tile_rows = tl.arange(0, BLOCK_M)
    member = tile_rows // GROUP
    dims = tl.arange(0, DIM_TILE)
    in_head = (dims < DIM)[None, :]
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        split = item // KV_HEADS
        kv_head = item % KV_HEADS
        group = find_group(starts, split, groups)
        span = tl.load(schedule + 2)
        split -= tl.load(starts + group)
        first = tl.load(prefix + FIRST * rows + group)
        members = tl.load(prefix + MEMBERS * rows + group)
        lead = tl.load(order + first)
        end = tl.minimum((split + 1) * span, tl.load(prefix + PREFIX * rows + lead))
        real = member < members
        row = tl.load(order + first + member, mask=real, other=0)
        token = tl.load(query_start + row, mask=real, other=0).to(tl.int64)
        head = kv_head * GROUP + tile_rows % GROUP
        q_places = token[:, None] * q_stride + head[:, None] * DIM + dims[None, :]
        q_tile = tl.load(q + q_places, mask=real[:, None] & in_head, other=0.0)
        q_second = q_tile
        own_k, own_v, own_scale, gain = head_pages(k_pages, v_pages, scale, kv_scales, kv_head, KV_HEADS, DIM)
        if PAIRS:
            q_tile, q_second, factor = paired_queries(q_tile)
            own_scale *= factor
        nothing = tl.zeros([BLOCK_M, q_tile.shape[1]], tl.float32)
        found, second, row_max, row_sum = attend_keys(
            q_tile, q_second, own_k, own_v,
            block_tables + tl.load(slots + lead).to(tl.int64) * table_stride, tile_rows, tile_rows, 0, own_scale,
            nothing, nothing, tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32), split * span * UNIT, end * UNIT,
            KV_HEADS * WIDE, WIDE, BLOCK_SIZE, 0, UNIT, SOFTCAP, False, ASM,
        )  # fmt: skip
        if PAIRS:
            found = tl.interleave(found, second) * gain
        place = tl.load(prefix + PLACE * rows + row, mask=real, other=0) + split * members
        place = place.to(tl.int64) * HEADS + head
        tl.store(
            partials + place[:, None] * DIM + dims[None, :], found / row_sum[:, None], mask=real[:, None] & in_head
        )
        tl.store(lses + place, row_max + tl.log2(row_sum), mask=real)
