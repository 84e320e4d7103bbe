"""Attention of rows of one query that begin with the same pages, by Hopper's own instructions, in Gluon.

Keys are cut into units: those of the prefix, which as many rows attend to at once as fit a tile of the matrix units,
so that it is read once for them, and each row's own. Every program takes as many units as the others, one after
another, in whichever tiles they lie. One warp copies them from the pages into a pipeline in shared memory by TMA, one
chunk per page, and never waits for the end of a tile; four warps attend. `kernels.attention_schedule` finds on the
device what rows share, `kernels.attention_parts` combines the partial results.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.attention_hopper import chunks_of
from penstock.kernels.attention_parts import combine_row, count_partial, partial_row, store_partial
from penstock.kernels.attention_schedule import HEADER, schedule_units
from penstock.kernels.chip import chip_of
from penstock.kernels.gluon_names import async_load, barrier
from penstock.kernels.records import AttentionBatch, AttentionOptions

CROWD = 16  # rows, padded ones included, from which a launch that may have nothing to do is worth its microsecond
BLOCK_M = 64  # of a tile: heads of one row, or of several that share keys
BLOCK_N = 64  # keys of a unit
STAGES = 3  # of the pipeline
CTAS_PER_SM = 2
REGISTERS = 96  # of a thread before warp specialization
LOG2_E = math.log2(math.e)


def serves(q: Tensor, k_pages: Tensor, batch: AttentionBatch, options: AttentionOptions) -> bool:
    """Whether the kernel takes these types and sizes; any device of compute capability 9."""
    _, size, kv_heads, dim = k_pages.shape
    return (
        options.window == 0
        and options.plain
        and batch.max_query == 1
        and not batch.invariant
        and len(batch.context) >= CROWD
        and (batch.arrivals is None or len(batch.context) * kv_heads <= len(batch.arrivals))
        and q.dtype in (torch.bfloat16, torch.float16)
        and dim in (64, 128)
        and q.shape[1] // kv_heads <= BLOCK_M
        and 8 <= size <= BLOCK_N
        and size & (size - 1) == 0
        and chip_of(q.device).wgmma
    )


def schedule_of(batch: AttentionBatch, size: int, group: int) -> Tensor:
    """The schedule of a step over blocks of `size` tokens for groups of `group` heads, launched when it is asked for
    first. A model whose layers differ in either has a schedule of each kind."""
    key = size, BLOCK_M // group
    found = batch.schedules.get(key)
    if found is None:
        found = batch.schedules[key] = schedule_units(batch, size, BLOCK_N, BLOCK_M // group)
    return found


def attend_stream(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, batch: AttentionBatch, options: AttentionOptions
) -> Tensor:
    """One launch, which writes `out  # [tokens, heads, dim]` for the rows of one query, if they share any keys.

    Returns the schedule, which is launched on first use, in a model by `kernels.attention.prepare_attention`. Other
    batches are left to the next kernel. Nothing waits for the device.
    """
    tokens, heads, dim = q.shape
    blocks, size, kv_heads, _ = k_pages.shape
    rows, group = len(batch.context), heads // kv_heads
    assert q.stride(2) == 1 and q.stride(1) == dim  # noqa: PT018
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and out.is_contiguous()  # noqa: PT018
    together = BLOCK_M // group
    prefetch = (size, together) in batch.schedules
    schedule = schedule_of(batch, size, group)
    programs = CTAS_PER_SM * chip_of(q.device).num_sms
    groups = -(-rows // together)
    tile_rows = (2 * programs + groups * kv_heads) * BLOCK_M + rows * heads
    partials = torch.empty(tile_rows, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(tile_rows, dtype=torch.float32, device=q.device)
    arrivals = batch.arrivals
    if arrivals is None:
        arrivals = batch.context.new_zeros(rows * kv_heads)
    assert len(arrivals) >= rows * kv_heads
    layout = gl.NVMMASharedLayout(128, 16, 2)
    shape, strides = [blocks * size, kv_heads * dim], [kv_heads * dim, 1]
    k_desc, v_desc = (TensorDescriptor(pages, shape, strides, [size, 64], layout) for pages in (k_pages, v_pages))
    pdl = chip_of(q.device).pdl
    stream_kernel[(programs,)](
        q, k_desc, v_desc, out, partials, lses, arrivals, schedule, batch.query_start, batch.context, batch.slots,
        batch.block_tables, rows, tokens, batch.block_tables.stride(0), q.stride(0), blocks * size,
        options.scale * LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=size, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=STAGES,
        HEADER=HEADER, GROUP_TILE=triton.next_power_of_2(group), PDL=pdl, PREFETCH=prefetch,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=pdl,
    )  # fmt: skip
    return schedule


@gluon.jit
def find_tile(schedule, unit, rows, shared, groups, own, HEADER: gl.constexpr):
    """The tile of a unit: its head, whether it is of keys that rows share, its group or row, and its own units' number
    within all: begin .. begin + size - 1.

    own: units of all rows that they do not share. Units go by heads, then groups of rows, then rows.
    """
    each = groups * shared + own  # units of a head
    head = unit // each
    left = unit - head * each
    common = left < groups * shared
    low = 0
    size = shared
    if common:
        low = left // shared
        begin = head * each + low * shared
    else:
        left -= groups * shared
        high = rows
        while high - low > 1:  # the last row that begins at the unit or before, which is one that has some
            middle = (low + high) // 2
            before = gl.load(schedule + HEADER + middle) <= left
            low = gl.where(before, middle, low)
            high = gl.where(before, high, middle)
        start = gl.load(schedule + HEADER + low)
        size = gl.load(schedule + HEADER + low + 1) - start
        begin = head * each + groups * shared + start
    return head, common, low, begin, size


@gluon.jit
def copy_units(
    k_desc, v_desc, k_tiles, v_tiles, full, free, schedule, context, slots, block_tables,
    rows, table_stride, shared, groups, own, first, end, outside,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEADER: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The copying warp: every unit of the program, in order, as soon as a pipeline stage is free.

    Chunks that begin past a row's end are read outside the pages, for which TMA returns zeros.
    """
    HALVES: gl.constexpr = DIM // 64
    CHUNKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    k_pieces = chunks_of(k_tiles, STAGES * HALVES * CHUNKS, BLOCK_SIZE)
    v_pieces = chunks_of(v_tiles, STAGES * HALVES * CHUNKS, BLOCK_SIZE)
    begin = first
    while begin < end:
        head, common, member, tile_begin, size = find_tile(schedule, begin, rows, shared, groups, own, HEADER)
        row = gl.where(common, gl.load(schedule + 2), member)
        limit = gl.where(common, shared * BLOCK_N, gl.load(context + row))
        origin = gl.where(common, 0, shared * BLOCK_N)
        table = block_tables + gl.load(slots + row).to(gl.int64) * table_stride
        stop = gl.minimum(tile_begin + size, end)
        for unit in range(begin, stop):
            iteration = unit - first
            stage = iteration % STAGES
            mbarrier.wait(free.index(stage), (iteration // STAGES) & 1 ^ 1)
            if PDL:  # noqa: SIM102 - `and` of the language evaluates both sides
                if (unit - tile_begin == size - 1) & (not common):  # the row's new key is here
                    tl.extra.cuda.gdc_wait()
            mbarrier.expect(full.index(stage), 2 * BLOCK_N * DIM * 2)
            for chunk in gl.static_range(CHUNKS):
                key = origin + (unit - tile_begin) * BLOCK_N + chunk * BLOCK_SIZE
                block = gl.load(table + key // BLOCK_SIZE, mask=key < limit, other=0)
                place = gl.where(key < limit, block * BLOCK_SIZE, outside)
                for half in gl.static_range(HALVES):
                    target = (stage * HALVES + half) * CHUNKS + chunk
                    column = head * DIM + half * 64
                    async_load(k_desc, [place, column], full.index(stage), k_pieces.index(target))
                    async_load(v_desc, [place, column], full.index(stage), v_pieces.index(target))
        begin = stop


@gluon.jit
def clear_rest(
    v_tiles, stage, left, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Zero the values past the first `left` keys of a unit in their last chunk: they may be NaN, which a weight of zero
    would keep.
    """
    HALVES: gl.constexpr = DIM // 64
    CHUNKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    CHUNK: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    chunks = chunks_of(v_tiles, STAGES * HALVES * CHUNKS, BLOCK_SIZE)
    inside = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, CHUNK)) < left % BLOCK_SIZE
    for half in gl.static_range(HALVES):
        chunk = chunks.index((stage * HALVES + half) * CHUNKS + left // BLOCK_SIZE)
        held = chunk.load(CHUNK)
        chunk.store(gl.where(inside[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    barrier()


@gluon.jit
def attend_units(
    q_tile, k_tiles, v_tiles, full, free, begin, stop, tile_begin, first, keys, scale,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Softmax of a tile over its units begin .. stop - 1 alone, of which only the tile's first `keys` are real.

    Gives fp32 [rows, dim], the mean, and [rows] the base-2 logarithm of its weight.
    """
    sums = gl.zeros([BLOCK_M, DIM], gl.float32, SUMS)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    places = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    for unit in range(begin, stop):
        iteration = unit - first
        stage = iteration % STAGES
        left = keys - (unit - tile_begin) * BLOCK_N  # at least one
        mbarrier.wait(full.index(stage), (iteration // STAGES) & 1)
        scoring = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if (left < BLOCK_N) & (left % BLOCK_SIZE > 0):
            clear_rest(v_tiles, stage, left, DIM, BLOCK_SIZE, BLOCK_N, STAGES)
        scores = warpgroup_mma_wait(0, deps=[scoring])
        scores = gl.where((places < left)[None, :], scores, float("-inf"))
        highest = gl.maximum(row_max, gl.max(scores, 1) * scale)
        weights = gl.exp2(scores * scale - highest[:, None])
        alpha = gl.exp2(row_max - highest)
        row_sum = row_sum * alpha + gl.sum(weights, 1)
        row_max = highest
        given = gl.convert_layout(weights.to(q_tile.dtype), gl.DotOperandLayout(0, SUMS, 2))
        sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
        adding = warpgroup_mma(given, v_tiles.index(stage), sums, is_async=True)
        sums, given = warpgroup_mma_wait(0, deps=[adding, given])
        barrier()  # every warp has read the unit
        mbarrier.arrive(free.index(stage))
    inverse = 1.0 / row_sum
    return sums * gl.convert_layout(inverse, gl.SliceLayout(1, SUMS))[:, None], row_max + gl.log2(row_sum)


@gluon.jit
def load_queries(
    q, q_tile, query_start, base, only, rows, head, tokens, q_stride,
    GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_M: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Fill the tile with the queries of the rows base .. base + only - 1, zeros behind them."""
    tile_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    row = base + tile_rows // GROUP
    real = (tile_rows // GROUP < only) & (row < rows)
    token = gl.minimum(gl.load(query_start + row, mask=real, other=0), tokens - 1).to(gl.int64)  # rows may be padded
    columns = (head * GROUP + tile_rows % GROUP)[:, None] * DIM + dims[None, :]
    q_tile.store(gl.load(q + token[:, None] * q_stride + columns, mask=real[:, None], other=0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def attend_tiles(
    q, out, partials, lses, arrivals, schedule, query_start, context, q_tile, k_tiles, v_tiles, full, free,
    rows, tokens, q_stride, shared, groups, own, program, programs, units, first, end, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEADER: gl.constexpr, GROUP_TILE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The four attending warps: every tile of the program, or part of one, in order."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TOGETHER: gl.constexpr = BLOCK_M // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin = first
    while begin < end:
        head, common, member, tile_begin, size = find_tile(schedule, begin, rows, shared, groups, own, HEADER)
        stop = gl.minimum(tile_begin + size, end)
        only = gl.where(common, TOGETHER, 1)  # rows of the tile
        base = gl.where(common, member * TOGETHER, member)

        load_queries(q, q_tile, query_start, base, only, rows, head, tokens, q_stride, GROUP, DIM, BLOCK_M, WIDE)
        keys = shared * BLOCK_N
        if not common:
            keys = gl.load(context + base) - keys
        found, lse = attend_units(
            q_tile, k_tiles, v_tiles, full, free, begin, stop, tile_begin, first, keys, scale,
            DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, STAGES, SCORES, SUMS,
        )  # fmt: skip

        whole = 2 * programs * BLOCK_M
        if common:
            whole += rows * HEADS + (member * KV_HEADS + head) * BLOCK_M
        else:
            whole += (member * KV_HEADS + head) * GROUP
        first_row = partial_row(program, programs, units, tile_begin, size, whole, BLOCK_M)
        store_partial(partials, lses, found, lse, first_row, base, only, rows, GROUP, DIM, BLOCK_M, SCORES, SUMS)
        bits = count_partial(
            arrivals, schedule, base, only, head, rows, shared, groups, own, units, programs,
            KV_HEADS, TOGETHER, BLOCK_M, HEADER,
        )  # fmt: skip
        barrier()  # from here on every thread sees the partials of others
        for at in range(only):
            if (bits >> at) & 1 > 0:
                combine_row(
                    out, partials, lses, schedule, query_start, base + at, head, rows, shared, groups, own, units,
                    programs, HEADS, KV_HEADS, DIM, BLOCK_M, HEADER, GROUP_TILE,
                )  # fmt: skip
        begin = stop


@gluon.jit(
    do_not_specialize=("rows", "tokens", "table_stride", "outside"),
    do_not_specialize_on_alignment=("arrivals", "schedule", "query_start", "context", "slots", "block_tables"),
)
def stream_kernel(
    q, k_desc, v_desc, out, partials, lses, arrivals, schedule, query_start, context, slots, block_tables,
    rows, tokens, table_stride, q_stride, outside, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEADER: gl.constexpr, GROUP_TILE: gl.constexpr, PDL: gl.constexpr,
    PREFETCH: gl.constexpr,
):  # fmt: skip
    """An even share of all units. scale: of the scores, in base 2. outside: a slot past the pages.

    partials, lses: fp32 [rows, dim] and [rows]: two tiles of each program, the heads of each row, and the tiles
    of rows that share keys. arrivals: int32 [rows, kv_heads] counts a row's partials, and is left zero.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, DIM], TILE)
    q_tile = gl.allocate_shared_memory(k_desc.dtype, [BLOCK_M, DIM], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    if PDL and not PREFETCH:
        tl.extra.cuda.gdc_wait()
    shared = gl.load(schedule)
    groups = gl.where(shared > 0, gl.load(schedule + 1), 0)
    own = gl.load(schedule + HEADER + rows)
    program = gl.program_id(0)
    units = KV_HEADS * (groups * shared + own)
    programs = gl.minimum(gl.num_programs(0), units)  # each of which has a unit
    first = program * units // gl.maximum(programs, 1)
    end = (program + 1) * units // gl.maximum(programs, 1)
    if (shared == 0) | (program >= programs):
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    gl.warp_specialize(
        [
            (attend_tiles, (
                q, out, partials, lses, arrivals, schedule, query_start, context, q_tile, k_tiles, v_tiles, full, free,
                rows, tokens, q_stride, shared, groups, own, program, programs, units, first, end, scale,
                HEADS, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, STAGES, HEADER, GROUP_TILE, PDL,
            )),
            (copy_units, (
                k_desc, v_desc, k_tiles, v_tiles, full, free, schedule, context, slots, block_tables,
                rows, table_stride, shared, groups, own, first, end, outside,
                DIM, BLOCK_SIZE, BLOCK_N, STAGES, HEADER, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
