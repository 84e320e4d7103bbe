"""Attention of long chunks over paged keys and values with Hopper's own instructions, in Gluon.

A program computes a tile of 128 lines: queries of one row by the heads that share a key-value head. One warp copies
keys and values from the pages into a ring in shared memory with the bulk copy engine, a box for each page; two groups
of four warps take 64 lines each. A group starts the product of the next block's scores before it weighs the values of
the last one, so that the softmax runs beside the matrix units (FlashAttention-3: Shah et al., 2024). Blocks are taken
from the last to the first: only the first few of them need the mask.
"""

from __future__ import annotations

import math

import torch
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

from penstock.kernels.attention_schedule import most_tiles, tiles_of
from penstock.kernels.launch import overlaps
from penstock.kernels.records import AttentionBatch

try:
    from triton.experimental.gluon.language import barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_load
except ImportError:  # their names in Triton 3.6
    from triton.experimental.gluon.language import thread_barrier as barrier
    from triton.experimental.gluon.language.nvidia.hopper.tma import async_copy_global_to_shared as async_load

GROUP_LINES = 64  # of the warps that work together on matrix products
GROUPS = 2
KEYS = 128  # of one turn
STAGES = 2  # turns whose keys and values are held
HALF = 64  # elements that make a line of the swizzled shared memory, 128 bytes
REGISTERS = 168  # of a thread before the warps part; then the copying warp keeps 24, and the others have 240
LOG2_E = math.log2(math.e)
RENAMED: tl.constexpr = tl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # in versions after 3.6


def serves(q: Tensor, k_pages: Tensor, window: int) -> bool:
    """Whether the kernel takes these types and sizes; any device of compute capability 9."""
    _, size, kv_heads, dim = k_pages.shape
    return (
        window == 0
        and q.dtype in (torch.bfloat16, torch.float16)
        and dim in (64, 128)
        and q.shape[1] // kv_heads <= GROUP_LINES
        and size >= 8
        and size & (size - 1) == 0
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )


def attend_chunks(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    scale: float,
    shortest: int = 1,
) -> None:
    """One launch, which writes `out  # [tokens, heads, dim]` for the rows of at least `shortest` queries.

    Rows have keys, those of their queries at least. Nothing waits for the device.
    """
    tokens, heads, dim = q.shape
    blocks, size, kv_heads, _ = k_pages.shape
    rows = len(batch.context)
    assert q.stride(2) == 1 and q.stride(1) == dim  # noqa: PT018
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and out.is_contiguous()  # noqa: PT018
    box = min(size, KEYS)
    layout = gl.NVMMASharedLayout(2 * HALF, 16, 2)
    shape, strides = [blocks * size, kv_heads * dim], [kv_heads * dim, 1]
    k_boxes, v_boxes = (TensorDescriptor(pages, shape, strides, [box, HALF], layout) for pages in (k_pages, v_pages))
    queries = GROUPS * (GROUP_LINES // (heads // kv_heads))  # of a tile
    tiles = tiles_of(batch, tokens, queries, shortest)
    ahead = overlaps(q.device)
    chunk_kernel[(kv_heads, most_tiles(rows, tokens, queries, shortest))](
        q, k_boxes, v_boxes, out, tiles, batch.query_start, batch.context, batch.slots, batch.block_tables,
        batch.block_tables.stride(0), q.stride(0), blocks * size, scale * LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=size, BOX=box, LINES=GROUP_LINES,
        KEYS=KEYS, STAGES=STAGES, AHEAD=ahead, num_warps=4, maxnreg=REGISTERS, launch_pdl=ahead,
    )  # fmt: skip


@gluon.jit
def pieces_of(tiles, COUNT: gl.constexpr, BOX: gl.constexpr):
    """Tiles seen as boxes of 64 columns: a tile lies in memory as columns of 64 elements, one after another."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if RENAMED:
        return tiles.reinterpret(tiles.dtype, [COUNT, BOX, 64], LAYOUT)
    else:
        return tiles._reinterpret(tiles.dtype, [COUNT, BOX, 64], LAYOUT)


@gluon.jit
def copy_block(
    boxes, tiles, full, free, table, turn, first, end, column, outside,
    KEYS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copy of one block's keys, or values, into its place of the ring as soon as that is free.

    Boxes that begin behind `end` are taken from outside the pages, which the copy engine fills with zeros.
    """
    HALVES: gl.constexpr = DIM // 64
    PIECES: gl.constexpr = KEYS // BOX
    pieces = pieces_of(tiles, STAGES * HALVES * PIECES, BOX)
    stage = turn % STAGES
    mbarrier.wait(free.index(stage), (turn // STAGES) & 1 ^ 1)
    mbarrier.expect(full.index(stage), KEYS * DIM * 2)
    for piece in gl.static_range(PIECES):
        key = first + piece * BOX
        block = gl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)
        place = gl.where(key < end, block * BLOCK_SIZE + key % BLOCK_SIZE, outside)
        for half in gl.static_range(HALVES):
            target = pieces.index((stage * HALVES + half) * PIECES + piece)
            async_load(boxes, [place, column + half * 64], full.index(stage), target)


@gluon.jit
def copy_blocks(
    k_boxes, v_boxes, k_tiles, v_tiles, k_full, k_free, v_full, v_free, table, end, column, outside,
    KEYS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the copying warp does: every block of keys and values, the last first."""
    turns = gl.cdiv(end, KEYS)
    for turn in range(turns):
        first = (turns - 1 - turn) * KEYS
        copy_block(
            k_boxes, k_tiles, k_full, k_free, table, turn, first, end, column, outside,
            KEYS, DIM, BLOCK_SIZE, BOX, STAGES,
        )  # fmt: skip
        copy_block(
            v_boxes, v_tiles, v_full, v_free, table, turn, first, end, column, outside,
            KEYS, DIM, BLOCK_SIZE, BOX, STAGES,
        )  # fmt: skip


@gluon.jit
def weigh(
    scores, peak, total, position, first, scale, SCORES: gl.constexpr, KEYS: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Weights of a block's keys, and the factor by which what was found before them fades."""
    if MASKED:
        places = first + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        scores = gl.where(places[None, :] <= position[:, None], scores, float("-inf"))
    highest = gl.maximum(peak, gl.max(scores, 1) * scale)
    level = highest
    if MASKED:  # a line that has seen nothing yet
        level = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(scores * scale - level[:, None])
    fade = gl.exp2(peak - level)
    return weights, fade, highest, total * fade + gl.sum(weights, 1)


@gluon.jit
def attend_blocks(
    q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free, sums, weights, peak, total, position, scale,
    begin, stop, turns,
    SCORES: gl.constexpr, SUMS: gl.constexpr,
    LINES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Turns begin .. stop - 1, each of which scores its own block and adds the values of the one before.

    weights: fp32 [lines, keys] of the block before; as such they fit in the registers that held its scores.
    """
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    for turn in range(begin, stop):
        stage = turn % STAGES
        before = (turn - 1) % STAGES
        given = gl.convert_layout(weights.to(q_tile.dtype), WEIGHTS)
        nothing = gl.zeros([LINES, KEYS], gl.float32, SCORES)
        mbarrier.wait(k_full.index(stage), (turn // STAGES) & 1)
        scoring = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((turn - 1) // STAGES) & 1)
        adding = warpgroup_mma(given, v_tiles.index(before), sums, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scoring])
        mbarrier.arrive(k_free.index(stage))
        weights, fade, peak, total = weigh(
            scores, peak, total, position, (turns - 1 - turn) * KEYS, scale, SCORES, KEYS, MASKED
        )
        sums, given = warpgroup_mma_wait(0, deps=[adding, given])  # the product reads its operand until now
        mbarrier.arrive(v_free.index(before))
        sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
    return sums, weights, peak, total


@gluon.jit
def clear_rest(
    v_tiles, v_full, end, DIM: gl.constexpr, KEYS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Zeros for the values behind the row's end in its last box: what stands there may be no number, and a weight of
    zero would keep it. Both groups do this, so that neither waits for the other.
    """
    HALVES: gl.constexpr = DIM // 64
    PIECES: gl.constexpr = KEYS // BOX
    PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pieces = pieces_of(v_tiles, STAGES * HALVES * PIECES, BOX)
    mbarrier.wait(v_full.index(0), 0)
    inside = gl.arange(0, BOX, gl.SliceLayout(1, PIECE)) < end % BOX
    for half in gl.static_range(HALVES):
        piece = pieces.index(half * PIECES + (end - 1) % KEYS // BOX)
        held = piece.load(PIECE)
        piece.store(gl.where(inside[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    barrier()


@gluon.jit
def attend_lines(
    q, out, q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free,
    start, count, ahead, before, end, first_head, q_stride, scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LINES: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What a group of warps does: its lines of the tile over every block, the last first.

    start: the row's first token; count: its queries; ahead: the group's first of them; before: keys that stand before
    the row's first query; end: keys that the tile's queries see between them.
    """
    QUERIES: gl.constexpr = LINES // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dims = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    lines = gl.arange(0, LINES, gl.SliceLayout(1, WIDE))
    query = ahead + lines // GROUP
    real = (lines < QUERIES * GROUP) & (query < count)
    token = (start + query).to(gl.int64)
    columns = (first_head + lines % GROUP)[:, None] * DIM + dims[None, :]
    q_tile.store(gl.load(q + token[:, None] * q_stride + columns, mask=real[:, None], other=0.0))
    fence_async_shared()
    barrier()

    position = before + ahead + gl.arange(0, LINES, gl.SliceLayout(1, SCORES)) // GROUP
    position = gl.minimum(position, end - 1)
    turns = gl.cdiv(end, KEYS)
    clear = gl.minimum((before + ahead + 1) // KEYS, turns)  # blocks of which every line sees every key
    sums = gl.zeros([LINES, DIM], gl.float32, SUMS)
    peak = gl.full([LINES], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([LINES], gl.float32, gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([LINES, KEYS], gl.float32, SCORES)
    mbarrier.wait(k_full.index(0), 0)
    scoring = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scoring])
    mbarrier.arrive(k_free.index(0))
    weights, _fade, peak, total = weigh(
        scores, peak, total, position, (turns - 1) * KEYS, scale, SCORES, KEYS, True
    )  # fmt: skip
    if end % BOX > 0:
        clear_rest(v_tiles, v_full, end, DIM, KEYS, BOX, STAGES)
    masked = gl.maximum(turns - clear, 1)
    sums, weights, peak, total = attend_blocks(
        q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free, sums, weights, peak, total, position, scale,
        1, masked, turns, SCORES, SUMS, LINES, KEYS, STAGES, True,
    )  # fmt: skip
    sums, weights, peak, total = attend_blocks(
        q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free, sums, weights, peak, total, position, scale,
        masked, turns, turns, SCORES, SUMS, LINES, KEYS, STAGES, False,
    )  # fmt: skip
    last = (turns - 1) % STAGES
    given = gl.convert_layout(weights.to(q_tile.dtype), gl.DotOperandLayout(0, SUMS, 2))
    mbarrier.wait(v_full.index(last), ((turns - 1) // STAGES) & 1)
    adding = warpgroup_mma(given, v_tiles.index(last), sums, is_async=True)
    sums, given = warpgroup_mma_wait(0, deps=[adding, given])
    share = 1.0 / gl.where(total > 0, total, 1.0)
    sums = sums * gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None]
    q_tile.store(sums.to(q_tile.dtype))  # nobody reads the queries any more
    barrier()
    gl.store(out + token[:, None] * (HEADS * DIM) + columns, q_tile.load(WIDE), mask=real[:, None])


@gluon.jit(
    do_not_specialize=("table_stride", "outside"),
    do_not_specialize_on_alignment=("tiles", "query_start", "context", "slots", "block_tables"),
)
def chunk_kernel(
    q, k_boxes, v_boxes, out, tiles, query_start, context, slots, block_tables,
    table_stride, q_stride, outside, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
    LINES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One tile of a row over all keys that it sees.

    tiles: see `kernels.attention_schedule.list_tiles`. scale: of the scores, in base 2. outside: a slot past the pages.
    """
    GROUP: gl.constexpr = HEADS // KV_HEADS
    QUERIES: gl.constexpr = LINES // GROUP  # of each of the two groups of warps
    if AHEAD:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = gl.program_id(0)
    tile = gl.program_id(1)
    if tile >= gl.load(tiles):
        return
    row = gl.load(tiles + 1 + 2 * tile)
    ahead = gl.load(tiles + 2 + 2 * tile)
    start = gl.load(query_start + row)
    count = gl.load(query_start + row + 1) - start
    before = gl.load(context + row) - count
    slot = gl.load(slots + row)
    end = before + gl.minimum(ahead + 2 * QUERIES, count)
    table = block_tables + slot.to(gl.int64) * table_stride
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_tiles = gl.allocate_shared_memory(k_boxes.dtype, [STAGES, KEYS, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(k_boxes.dtype, [STAGES, KEYS, DIM], TILE)
    q_tiles = gl.allocate_shared_memory(k_boxes.dtype, [2, LINES, DIM], TILE)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend_lines, (
                q, out, q_tiles.index(0), k_tiles, v_tiles, k_full, k_free, v_full, v_free,
                start, count, ahead, before, end, kv_head * GROUP, q_stride, scale,
                HEADS, GROUP, LINES, DIM, KEYS, BOX, STAGES,
            )),
            (attend_lines, (
                q, out, q_tiles.index(1), k_tiles, v_tiles, k_full, k_free, v_full, v_free,
                start, count, ahead + QUERIES, before, end, kv_head * GROUP, q_stride, scale,
                HEADS, GROUP, LINES, DIM, KEYS, BOX, STAGES,
            )),
            (copy_blocks, (
                k_boxes, v_boxes, k_tiles, v_tiles, k_full, k_free, v_full, v_free, table, end, kv_head * DIM, outside,
                KEYS, DIM, BLOCK_SIZE, BOX, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],  # with the default's, as many registers as all 12 warps had
    )  # fmt: skip
