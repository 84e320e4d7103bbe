"""Attention of rows of one query that begin with the same pages, by Hopper's own instructions, in Gluon.

Keys are cut into units: those of the prefix, which as many rows attend to at once as fit a tile of the matrix units,
so that it is read once for them, and each row's own. Every program takes as many units as the others, one after
another, in whichever tiles they lie. One warp copies them from the pages into a ring in shared memory, a box for each
page, and never waits for the end of a tile; four warps attend. `kernels.attention_schedule` finds out on the device
what rows share, `kernels.attention_parts` joins what units gave.
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

from penstock.kernels.attention_hopper import pieces_of
from penstock.kernels.attention_parts import count_part, join_row, part_line, put_part
from penstock.kernels.attention_schedule import HEADER, schedule_units
from penstock.kernels.launch import overlaps, processors
from penstock.kernels.records import AttentionBatch

try:
    from triton.experimental.gluon.language import barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load
except ImportError:  # their names in Triton 3.6
    from triton.experimental.gluon.language import thread_barrier as barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared as async_load

CROWD = 16  # rows, padded ones included, from which a launch that may have nothing to do is worth its microsecond
LINES = 64  # of a tile: heads of one row, or of several that share keys
KEYS = 64  # of a unit
STAGES = 3  # units that are held
RESIDENT = 2  # programs of a processor
REGISTERS = 96  # of a thread before the warps part
LOG2_E = math.log2(math.e)


def serves(q: Tensor, k_pages: Tensor, batch: AttentionBatch, window: int) -> bool:
    """Whether the kernel takes these types and sizes; any device of compute capability 9."""
    _, size, kv_heads, dim = k_pages.shape
    return (
        window == 0
        and batch.max_query == 1
        and not batch.invariant
        and len(batch.context) >= CROWD
        and (batch.arrivals is None or len(batch.context) * kv_heads <= len(batch.arrivals))
        and q.dtype in (torch.bfloat16, torch.float16)
        and dim in (64, 128)
        and q.shape[1] // kv_heads <= LINES
        and 8 <= size <= KEYS
        and size & (size - 1) == 0
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )


def schedule_of(batch: AttentionBatch, size: int, group: int) -> Tensor:
    """The schedule of a step over blocks of `size` tokens for groups of `group` heads, launched when it is asked for
    first. A model whose layers differ in either has a schedule of each kind."""
    key = size, LINES // group
    found = batch.schedules.get(key)
    if found is None:
        found = batch.schedules[key] = schedule_units(batch, size, KEYS, LINES // group)
    return found


def attend_stream(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    """One launch, which writes `out  # [tokens, heads, dim]` for the rows of one query, if they share any keys.

    Gives the schedule, which is launched by whoever asks for it first, `kernels.attention.prepare_attention` in a
    model. Other batches are left to the kernel behind this one. Nothing waits for the device.
    """
    tokens, heads, dim = q.shape
    blocks, size, kv_heads, _ = k_pages.shape
    rows, group = len(batch.context), heads // kv_heads
    assert q.stride(2) == 1 and q.stride(1) == dim  # noqa: PT018
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and out.is_contiguous()  # noqa: PT018
    together = LINES // group
    early = (size, together) in batch.schedules
    schedule = schedule_of(batch, size, group)
    programs = RESIDENT * processors(q.device)
    groups = -(-rows // together)
    lines = (2 * programs + groups * kv_heads) * LINES + rows * heads
    parts = torch.empty(lines, dim, dtype=torch.float32, device=q.device)
    masses = torch.empty(lines, dtype=torch.float32, device=q.device)
    arrivals = batch.arrivals
    if arrivals is None:
        arrivals = batch.context.new_zeros(rows * kv_heads)
    assert len(arrivals) >= rows * kv_heads
    layout = gl.NVMMASharedLayout(128, 16, 2)
    shape, strides = [blocks * size, kv_heads * dim], [kv_heads * dim, 1]
    k_boxes, v_boxes = (TensorDescriptor(pages, shape, strides, [size, 64], layout) for pages in (k_pages, v_pages))
    ahead = overlaps(q.device)
    stream_kernel[(programs,)](
        q, k_boxes, v_boxes, out, parts, masses, arrivals, schedule, batch.query_start, batch.context, batch.slots,
        batch.block_tables, rows, tokens, batch.block_tables.stride(0), q.stride(0), blocks * size, scale * LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=size, LINES=LINES, KEYS=KEYS, STAGES=STAGES,
        HEADER=HEADER, GROUP_TILE=triton.next_power_of_2(group), AHEAD=ahead, EARLY=early,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=ahead,
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
    k_boxes, v_boxes, k_tiles, v_tiles, full, free, schedule, context, slots, block_tables,
    rows, table_stride, shared, groups, own, first, end, outside,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, HEADER: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """What the copying warp does: every unit of the program's share, in order, as soon as there is a free place.

    Boxes that begin behind a row's end are taken from outside the pages, which the copy engine fills with zeros.
    """
    HALVES: gl.constexpr = DIM // 64
    PIECES: gl.constexpr = KEYS // BLOCK_SIZE
    k_pieces = pieces_of(k_tiles, STAGES * HALVES * PIECES, BLOCK_SIZE)
    v_pieces = pieces_of(v_tiles, STAGES * HALVES * PIECES, BLOCK_SIZE)
    begin = first
    while begin < end:
        head, common, member, tile_begin, size = find_tile(schedule, begin, rows, shared, groups, own, HEADER)
        row = gl.where(common, gl.load(schedule + 2), member)
        limit = gl.where(common, shared * KEYS, gl.load(context + row))
        origin = gl.where(common, 0, shared * KEYS)
        table = block_tables + gl.load(slots + row).to(gl.int64) * table_stride
        stop = gl.minimum(tile_begin + size, end)
        for unit in range(begin, stop):
            turn = unit - first
            stage = turn % STAGES
            mbarrier.wait(free.index(stage), (turn // STAGES) & 1 ^ 1)
            if AHEAD:  # noqa: SIM102 - `and` of the language evaluates both sides
                if (unit - tile_begin == size - 1) & (not common):  # the row's new key is here
                    tl.extra.cuda.gdc_wait()
            mbarrier.expect(full.index(stage), 2 * KEYS * DIM * 2)
            for piece in gl.static_range(PIECES):
                key = origin + (unit - tile_begin) * KEYS + piece * BLOCK_SIZE
                block = gl.load(table + key // BLOCK_SIZE, mask=key < limit, other=0)
                place = gl.where(key < limit, block * BLOCK_SIZE, outside)
                for half in gl.static_range(HALVES):
                    target = (stage * HALVES + half) * PIECES + piece
                    column = head * DIM + half * 64
                    async_load(k_boxes, [place, column], full.index(stage), k_pieces.index(target))
                    async_load(v_boxes, [place, column], full.index(stage), v_pieces.index(target))
        begin = stop


@gluon.jit
def clear_rest(
    v_tiles, stage, left, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Zeros for the values behind the first `left` keys of a unit in their last box: what stands there may be no
    number, and a weight of zero would keep it.
    """
    HALVES: gl.constexpr = DIM // 64
    PIECES: gl.constexpr = KEYS // BLOCK_SIZE
    PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pieces = pieces_of(v_tiles, STAGES * HALVES * PIECES, BLOCK_SIZE)
    inside = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, PIECE)) < left % BLOCK_SIZE
    for half in gl.static_range(HALVES):
        piece = pieces.index((stage * HALVES + half) * PIECES + left // BLOCK_SIZE)
        held = piece.load(PIECE)
        piece.store(gl.where(inside[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    barrier()


@gluon.jit
def attend_units(
    q_tile, k_tiles, v_tiles, full, free, begin, stop, tile_begin, first, keys, scale,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, LINES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Softmax of a tile over its units begin .. stop - 1 alone, of which only the tile's first `keys` are real.

    Gives fp32 [lines, dim], the mean, and [lines] the base-2 logarithm of its weight.
    """
    sums = gl.zeros([LINES, DIM], gl.float32, SUMS)
    peak = gl.full([LINES], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([LINES], gl.float32, gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([LINES, KEYS], gl.float32, SCORES)
    places = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    for unit in range(begin, stop):
        turn = unit - first
        stage = turn % STAGES
        left = keys - (unit - tile_begin) * KEYS  # at least one
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        scoring = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if (left < KEYS) & (left % BLOCK_SIZE > 0):
            clear_rest(v_tiles, stage, left, DIM, BLOCK_SIZE, KEYS, STAGES)
        scores = warpgroup_mma_wait(0, deps=[scoring])
        scores = gl.where((places < left)[None, :], scores, float("-inf"))
        highest = gl.maximum(peak, gl.max(scores, 1) * scale)
        weights = gl.exp2(scores * scale - highest[:, None])
        fade = gl.exp2(peak - highest)
        total = total * fade + gl.sum(weights, 1)
        peak = highest
        given = gl.convert_layout(weights.to(q_tile.dtype), gl.DotOperandLayout(0, SUMS, 2))
        sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
        adding = warpgroup_mma(given, v_tiles.index(stage), sums, is_async=True)
        sums, given = warpgroup_mma_wait(0, deps=[adding, given])
        barrier()  # every warp has read the unit
        mbarrier.arrive(free.index(stage))
    share = 1.0 / total
    return sums * gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None], peak + gl.log2(total)


@gluon.jit
def load_queries(
    q, q_tile, query_start, base, only, rows, head, tokens, q_stride,
    GROUP: gl.constexpr, DIM: gl.constexpr, LINES: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Fill the tile with the queries of the rows base .. base + only - 1, zeros behind them."""
    lines = gl.arange(0, LINES, gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    row = base + lines // GROUP
    real = (lines // GROUP < only) & (row < rows)
    token = gl.minimum(gl.load(query_start + row, mask=real, other=0), tokens - 1).to(gl.int64)  # rows may be padded
    columns = (head * GROUP + lines % GROUP)[:, None] * DIM + dims[None, :]
    q_tile.store(gl.load(q + token[:, None] * q_stride + columns, mask=real[:, None], other=0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def attend_tiles(
    q, out, parts, masses, arrivals, schedule, query_start, context, q_tile, k_tiles, v_tiles, full, free,
    rows, tokens, q_stride, shared, groups, own, program, programs, units, first, end, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, LINES: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, HEADER: gl.constexpr, GROUP_TILE: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """What the four warps do: every tile, or part of one, of the program's share, in order."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TOGETHER: gl.constexpr = LINES // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    if AHEAD:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin = first
    while begin < end:
        head, common, member, tile_begin, size = find_tile(schedule, begin, rows, shared, groups, own, HEADER)
        stop = gl.minimum(tile_begin + size, end)
        only = gl.where(common, TOGETHER, 1)  # rows of the tile
        base = gl.where(common, member * TOGETHER, member)

        load_queries(q, q_tile, query_start, base, only, rows, head, tokens, q_stride, GROUP, DIM, LINES, WIDE)
        keys = shared * KEYS
        if not common:
            keys = gl.load(context + base) - keys
        found, mass = attend_units(
            q_tile, k_tiles, v_tiles, full, free, begin, stop, tile_begin, first, keys, scale,
            DIM, BLOCK_SIZE, LINES, KEYS, STAGES, SCORES, SUMS,
        )  # fmt: skip

        whole = 2 * programs * LINES
        if common:
            whole += rows * HEADS + (member * KV_HEADS + head) * LINES
        else:
            whole += (member * KV_HEADS + head) * GROUP
        line = part_line(program, programs, units, tile_begin, size, whole, LINES)
        put_part(parts, masses, found, mass, line, base, only, rows, GROUP, DIM, LINES, SCORES, SUMS)
        bits = count_part(
            arrivals, schedule, base, only, head, rows, shared, groups, own, units, programs,
            KV_HEADS, TOGETHER, LINES, HEADER,
        )  # fmt: skip
        barrier()  # every thread may see the parts of others now
        for at in range(only):
            if (bits >> at) & 1 > 0:
                join_row(
                    out, parts, masses, schedule, query_start, base + at, head, rows, shared, groups, own, units,
                    programs, HEADS, KV_HEADS, DIM, LINES, HEADER, GROUP_TILE,
                )  # fmt: skip
        begin = stop


@gluon.jit(
    do_not_specialize=("rows", "tokens", "table_stride", "outside"),
    do_not_specialize_on_alignment=("arrivals", "schedule", "query_start", "context", "slots", "block_tables"),
)
def stream_kernel(
    q, k_boxes, v_boxes, out, parts, masses, arrivals, schedule, query_start, context, slots, block_tables,
    rows, tokens, table_stride, q_stride, outside, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, LINES: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, HEADER: gl.constexpr, GROUP_TILE: gl.constexpr, AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """An even share of all units. scale: of the scores, in base 2. outside: a slot past the pages.

    parts, masses: fp32 [lines, dim] and [lines]: two tiles of each program, the heads of each row, and the tiles of
    rows that share keys. arrivals: int32 [rows, kv_heads], parts of a row that are there; it is left zero.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_tiles = gl.allocate_shared_memory(k_boxes.dtype, [STAGES, KEYS, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(k_boxes.dtype, [STAGES, KEYS, DIM], TILE)
    q_tile = gl.allocate_shared_memory(k_boxes.dtype, [LINES, DIM], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    if AHEAD and not EARLY:
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
        if AHEAD:
            tl.extra.cuda.gdc_wait()
        return
    gl.warp_specialize(
        [
            (attend_tiles, (
                q, out, parts, masses, arrivals, schedule, query_start, context, q_tile, k_tiles, v_tiles, full, free,
                rows, tokens, q_stride, shared, groups, own, program, programs, units, first, end, scale,
                HEADS, KV_HEADS, DIM, BLOCK_SIZE, LINES, KEYS, STAGES, HEADER, GROUP_TILE, AHEAD,
            )),
            (copy_units, (
                k_boxes, v_boxes, k_tiles, v_tiles, full, free, schedule, context, slots, block_tables,
                rows, table_stride, shared, groups, own, first, end, outside,
                DIM, BLOCK_SIZE, KEYS, STAGES, HEADER, AHEAD,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
