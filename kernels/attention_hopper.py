"""Attention of long chunks over paged keys and values with Hopper's own instructions, in Gluon.

A program computes a tile of 128 rows: queries of one row by the heads that inverse a key-value head. One warp copies
keys and values from the pages into a pipeline in shared memory by TMA, one chunk per page; two groups of four warps
take 64 rows each. A group starts the product of the next block's scores before it multiplies the values of the last
one, so that the softmax overlaps with the matrix units (FlashAttention-3: Shah et al., 2024). Blocks are taken from the
last to the first: only the first few of them need the mask.
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
from penstock.kernels.chip import chip_of
from penstock.kernels.gluon_names import async_load, barrier
from penstock.kernels.records import AttentionBatch, AttentionOptions

BLOCK_M = 64  # rows of one warp group
GROUPS = 2
BLOCK_N = 128  # keys of one iteration
STAGES = 2  # of the pipeline
HALF = 64  # elements of a row of swizzled shared memory, 128 bytes
REGISTERS = 168  # of a thread before warp specialization; then the copying warp keeps 24, and the others have 240
LOG2_E = math.log2(math.e)
RENAMED: tl.constexpr = tl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # in versions after 3.6


def serves(q: Tensor, k_pages: Tensor, options: AttentionOptions) -> bool:
    """Whether the kernel takes these types and sizes; any device of compute capability 9."""
    _, size, kv_heads, dim = k_pages.shape
    return (
        options.window == 0
        and options.plain
        and q.dtype in (torch.bfloat16, torch.float16)
        and dim in (64, 128)
        and q.shape[1] // kv_heads <= BLOCK_M
        and size >= 8
        and size & (size - 1) == 0
        and chip_of(q.device).wgmma
    )


def attend_chunks(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, batch: AttentionBatch, options: AttentionOptions,
    shortest: int = 1,
) -> None:  # fmt: skip
    """One launch, which writes `out  # [tokens, heads, dim]` for the rows of at least `shortest` queries.

    Rows have keys, those of their queries at least. Nothing waits for the device.
    """
    tokens, heads, dim = q.shape
    blocks, size, kv_heads, _ = k_pages.shape
    rows = len(batch.context)
    assert q.stride(2) == 1 and q.stride(1) == dim  # noqa: PT018
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and out.is_contiguous()  # noqa: PT018
    chunk_keys = min(size, BLOCK_N)
    layout = gl.NVMMASharedLayout(2 * HALF, 16, 2)
    shape, strides = [blocks * size, kv_heads * dim], [kv_heads * dim, 1]
    chunk = [chunk_keys, HALF]
    k_desc, v_desc = (TensorDescriptor(pages, shape, strides, chunk, layout) for pages in (k_pages, v_pages))
    queries = GROUPS * (BLOCK_M // (heads // kv_heads))  # of a tile
    tiles = tiles_of(batch, tokens, queries, shortest)
    pdl = chip_of(q.device).pdl
    chunk_kernel[(kv_heads, most_tiles(rows, tokens, queries, shortest))](
        q, k_desc, v_desc, out, tiles, batch.query_start, batch.context, batch.slots, batch.block_tables,
        batch.block_tables.stride(0), q.stride(0), blocks * size, options.scale * LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_SIZE=size, CHUNK_KEYS=chunk_keys, BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N, STAGES=STAGES, PDL=pdl, num_warps=4, maxnreg=REGISTERS, launch_pdl=pdl,
    )  # fmt: skip


@gluon.jit
def chunks_of(tiles, COUNT: gl.constexpr, CHUNK_KEYS: gl.constexpr):
    """Tiles seen as chunks of 64 columns: a tile lies in memory as blocks of 64 columns, one after another."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if RENAMED:
        return tiles.reinterpret(tiles.dtype, [COUNT, CHUNK_KEYS, 64], LAYOUT)
    else:
        return tiles._reinterpret(tiles.dtype, [COUNT, CHUNK_KEYS, 64], LAYOUT)


@gluon.jit
def copy_block(
    descriptor, tiles, full, free, table, iteration, first, end, column, outside,
    BLOCK_N: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, CHUNK_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copy of one block's keys, or values, into its pipeline stage as soon as that is free.

    Chunks that begin past `end` are read outside the pages, for which TMA returns zeros.
    """
    HALVES: gl.constexpr = DIM // 64
    CHUNKS: gl.constexpr = BLOCK_N // CHUNK_KEYS
    chunks = chunks_of(tiles, STAGES * HALVES * CHUNKS, CHUNK_KEYS)
    stage = iteration % STAGES
    mbarrier.wait(free.index(stage), (iteration // STAGES) & 1 ^ 1)
    mbarrier.expect(full.index(stage), BLOCK_N * DIM * 2)
    for chunk in gl.static_range(CHUNKS):
        key = first + chunk * CHUNK_KEYS
        block = gl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)
        place = gl.where(key < end, block * BLOCK_SIZE + key % BLOCK_SIZE, outside)
        for half in gl.static_range(HALVES):
            target = chunks.index((stage * HALVES + half) * CHUNKS + chunk)
            async_load(descriptor, [place, column + half * 64], full.index(stage), target)


@gluon.jit
def copy_blocks(
    k_desc, v_desc, k_tiles, v_tiles, k_full, k_free, v_full, v_free, table, end, column, outside,
    BLOCK_N: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, CHUNK_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: every block of keys and values, the last first."""
    iterations = gl.cdiv(end, BLOCK_N)
    for iteration in range(iterations):
        first = (iterations - 1 - iteration) * BLOCK_N
        copy_block(
            k_desc, k_tiles, k_full, k_free, table, iteration, first, end, column, outside,
            BLOCK_N, DIM, BLOCK_SIZE, CHUNK_KEYS, STAGES,
        )  # fmt: skip
        copy_block(
            v_desc, v_tiles, v_full, v_free, table, iteration, first, end, column, outside,
            BLOCK_N, DIM, BLOCK_SIZE, CHUNK_KEYS, STAGES,
        )  # fmt: skip


@gluon.jit
def rescale_softmax(
    scores, row_max, row_sum, position, first, scale, SCORES: gl.constexpr, BLOCK_N: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Weights of a block's keys, and the factor alpha by which earlier results are rescaled."""
    if MASKED:
        places = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        scores = gl.where(places[None, :] <= position[:, None], scores, float("-inf"))
    highest = gl.maximum(row_max, gl.max(scores, 1) * scale)
    level = highest
    if MASKED:  # a row that has seen nothing yet
        level = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(scores * scale - level[:, None])
    alpha = gl.exp2(row_max - level)
    return weights, alpha, highest, row_sum * alpha + gl.sum(weights, 1)


@gluon.jit
def attend_blocks(
    q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free, sums, weights, row_max, row_sum, position, scale,
    begin, stop, iterations,
    SCORES: gl.constexpr, SUMS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Iterations begin .. stop - 1, each of which scores its own block and adds the values of the one before.

    weights: fp32 [rows, keys] of the block before; as such they fit in the registers that held its scores.
    """
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    for iteration in range(begin, stop):
        stage = iteration % STAGES
        before = (iteration - 1) % STAGES
        given = gl.convert_layout(weights.to(q_tile.dtype), WEIGHTS)
        nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
        mbarrier.wait(k_full.index(stage), (iteration // STAGES) & 1)
        scoring = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((iteration - 1) // STAGES) & 1)
        adding = warpgroup_mma(given, v_tiles.index(before), sums, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scoring])
        mbarrier.arrive(k_free.index(stage))
        weights, alpha, row_max, row_sum = rescale_softmax(
            scores, row_max, row_sum, position, (iterations - 1 - iteration) * BLOCK_N, scale, SCORES, BLOCK_N, MASKED
        )
        sums, given = warpgroup_mma_wait(0, deps=[adding, given])  # the product reads its operand until now
        mbarrier.arrive(v_free.index(before))
        sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
    return sums, weights, row_max, row_sum


@gluon.jit
def clear_rest(
    v_tiles, v_full, end, DIM: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK_KEYS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Zero the values past the row's end in its last chunk: they may be NaN, which a weight of zero would keep. Both
    groups do this, so that neither waits for the other.
    """
    HALVES: gl.constexpr = DIM // 64
    CHUNKS: gl.constexpr = BLOCK_N // CHUNK_KEYS
    CHUNK: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    chunks = chunks_of(v_tiles, STAGES * HALVES * CHUNKS, CHUNK_KEYS)
    mbarrier.wait(v_full.index(0), 0)
    inside = gl.arange(0, CHUNK_KEYS, gl.SliceLayout(1, CHUNK)) < end % CHUNK_KEYS
    for half in gl.static_range(HALVES):
        chunk = chunks.index(half * CHUNKS + (end - 1) % BLOCK_N // CHUNK_KEYS)
        held = chunk.load(CHUNK)
        chunk.store(gl.where(inside[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    barrier()


@gluon.jit
def attend_rows(
    q, out, q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free,
    start, count, first_query, before, end, first_head, q_stride, scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNK_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: its rows of the tile over every block, the last first.

    start: the sequence's first token; count: its queries; first_query: the group's first of them; before: keys before
    the sequence's first query; end: keys that the tile's queries see between them.
    """
    QUERIES: gl.constexpr = BLOCK_M // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dims = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    tile_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, WIDE))
    query = first_query + tile_rows // GROUP
    real = (tile_rows < QUERIES * GROUP) & (query < count)
    token = (start + query).to(gl.int64)
    columns = (first_head + tile_rows % GROUP)[:, None] * DIM + dims[None, :]
    q_tile.store(gl.load(q + token[:, None] * q_stride + columns, mask=real[:, None], other=0.0))
    fence_async_shared()
    barrier()

    position = before + first_query + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SCORES)) // GROUP
    position = gl.minimum(position, end - 1)
    iterations = gl.cdiv(end, BLOCK_N)
    clear = gl.minimum((before + first_query + 1) // BLOCK_N, iterations)  # blocks of which every row sees every key
    sums = gl.zeros([BLOCK_M, DIM], gl.float32, SUMS)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, SCORES))
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    mbarrier.wait(k_full.index(0), 0)
    scoring = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scoring])
    mbarrier.arrive(k_free.index(0))
    weights, _fade, row_max, row_sum = rescale_softmax(
        scores, row_max, row_sum, position, (iterations - 1) * BLOCK_N, scale, SCORES, BLOCK_N, True
    )  # fmt: skip
    if end % CHUNK_KEYS > 0:
        clear_rest(v_tiles, v_full, end, DIM, BLOCK_N, CHUNK_KEYS, STAGES)
    masked = gl.maximum(iterations - clear, 1)
    sums, weights, row_max, row_sum = attend_blocks(
        q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free, sums, weights, row_max, row_sum, position, scale,
        1, masked, iterations, SCORES, SUMS, BLOCK_M, BLOCK_N, STAGES, True,
    )  # fmt: skip
    sums, weights, row_max, row_sum = attend_blocks(
        q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free, sums, weights, row_max, row_sum, position, scale,
        masked, iterations, iterations, SCORES, SUMS, BLOCK_M, BLOCK_N, STAGES, False,
    )  # fmt: skip
    last = (iterations - 1) % STAGES
    given = gl.convert_layout(weights.to(q_tile.dtype), gl.DotOperandLayout(0, SUMS, 2))
    mbarrier.wait(v_full.index(last), ((iterations - 1) // STAGES) & 1)
    adding = warpgroup_mma(given, v_tiles.index(last), sums, is_async=True)
    sums, given = warpgroup_mma_wait(0, deps=[adding, given])
    inverse = 1.0 / gl.where(row_sum > 0, row_sum, 1.0)
    sums = sums * gl.convert_layout(inverse, gl.SliceLayout(1, SUMS))[:, None]
    q_tile.store(sums.to(q_tile.dtype))  # nobody reads the queries any more
    barrier()
    gl.store(out + token[:, None] * (HEADS * DIM) + columns, q_tile.load(WIDE), mask=real[:, None])


@gluon.jit(
    do_not_specialize=("table_stride", "outside"),
    do_not_specialize_on_alignment=("tiles", "query_start", "context", "slots", "block_tables"),
)
def chunk_kernel(
    q, k_desc, v_desc, out, tiles, query_start, context, slots, block_tables,
    table_stride, q_stride, outside, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, CHUNK_KEYS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One tile of a row over all keys that it sees.

    tiles: see `kernels.attention_schedule.list_tiles`. scale: of the scores, in base 2. outside: a slot past the pages.
    """
    GROUP: gl.constexpr = HEADS // KV_HEADS
    QUERIES: gl.constexpr = BLOCK_M // GROUP  # of each of the two groups of warps
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = gl.program_id(0)
    tile = gl.program_id(1)
    if tile >= gl.load(tiles):
        return
    row = gl.load(tiles + 1 + 2 * tile)
    first_query = gl.load(tiles + 2 + 2 * tile)
    start = gl.load(query_start + row)
    count = gl.load(query_start + row + 1) - start
    before = gl.load(context + row) - count
    slot = gl.load(slots + row)
    end = before + gl.minimum(first_query + 2 * QUERIES, count)
    table = block_tables + slot.to(gl.int64) * table_stride
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, DIM], TILE)
    q_tiles = gl.allocate_shared_memory(k_desc.dtype, [2, BLOCK_M, DIM], TILE)
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
            (attend_rows, (
                q, out, q_tiles.index(0), k_tiles, v_tiles, k_full, k_free, v_full, v_free,
                start, count, first_query, before, end, kv_head * GROUP, q_stride, scale,
                HEADS, GROUP, BLOCK_M, DIM, BLOCK_N, CHUNK_KEYS, STAGES,
            )),
            (attend_rows, (
                q, out, q_tiles.index(1), k_tiles, v_tiles, k_full, k_free, v_full, v_free,
                start, count, first_query + QUERIES, before, end, kv_head * GROUP, q_stride, scale,
                HEADS, GROUP, BLOCK_M, DIM, BLOCK_N, CHUNK_KEYS, STAGES,
            )),
            (copy_blocks, (
                k_desc, v_desc, k_tiles, v_tiles, k_full, k_free, v_full, v_free, table, end, kv_head * DIM, outside,
                BLOCK_N, DIM, BLOCK_SIZE, CHUNK_KEYS, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],  # with the default's, as many registers as all 12 warps had
    )  # fmt: skip
