"""Blocks of keys and values of the chunk kernel, see `kernels.attention_hopper`: their copies, and a warp group's
attention over them.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from penstock.kernels.gluon_names import async_load, barrier

RENAMED: tl.constexpr = tl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # in versions after 3.6


@gluon.jit
def chunks_of(tiles, COUNT: gl.constexpr, CHUNK_KEYS: gl.constexpr, COLUMNS: gl.constexpr = 64):
    """Tiles seen as chunks of at most 64 columns: a tile lies in memory as blocks of 64, one after another."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)
    if RENAMED:
        return tiles.reinterpret(tiles.dtype, [COUNT, CHUNK_KEYS, COLUMNS], LAYOUT)
    else:
        return tiles._reinterpret(tiles.dtype, [COUNT, CHUNK_KEYS, COLUMNS], LAYOUT)


@gluon.jit
def copy_block(
    descriptor, rest_descriptor, tiles, rest_tiles, full, free, table, iteration, first, end, column, outside,
    BLOCK_N: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, BLOCK_SIZE: gl.constexpr, CHUNK_KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copy of one block's keys, or values, into its pipeline stage as soon as that is free.

    Chunks that begin past `end` are read outside the pages, for which TMA returns zeros.
    """
    HALVES: gl.constexpr = MAIN // 64
    CHUNKS: gl.constexpr = BLOCK_N // CHUNK_KEYS
    chunks = chunks_of(tiles, STAGES * HALVES * CHUNKS, CHUNK_KEYS, 64)
    stage = iteration % STAGES
    mbarrier.wait(free.index(stage), (iteration // STAGES) & 1 ^ 1)
    mbarrier.expect(full.index(stage), BLOCK_N * (MAIN + REST) * 2)
    for chunk in gl.static_range(CHUNKS):
        key = first + chunk * CHUNK_KEYS
        block = gl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)
        place = gl.where(key < end, block * BLOCK_SIZE + key % BLOCK_SIZE, outside)
        for half in gl.static_range(HALVES):
            target = chunks.index((stage * HALVES + half) * CHUNKS + chunk)
            async_load(descriptor, [place, column + half * 64], full.index(stage), target)
        if REST > 0:
            target = chunks_of(rest_tiles, STAGES * CHUNKS, CHUNK_KEYS, REST).index(stage * CHUNKS + chunk)
            async_load(rest_descriptor, [place, column + MAIN], full.index(stage), target)


@gluon.jit
def clear_chunk(chunk, inside):
    """Zero the lines of a chunk that are not inside."""
    CHUNK: gl.constexpr = inside.type.layout.parent
    held = chunk.load(CHUNK)
    chunk.store(gl.where(inside[:, None], held, gl.zeros_like(held)))


@gluon.jit
def clear_rest(
    v_tiles, v_rest, v_full, begin, base, end, MAIN: gl.constexpr, REST: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNK_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Zero the values past the row's end in its last chunk: they may be NaN, which a weight of zero would keep. Both
    groups do this, so that neither waits for the other.
    """
    HALVES: gl.constexpr = MAIN // 64
    CHUNKS: gl.constexpr = BLOCK_N // CHUNK_KEYS
    CHUNK: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    chunks = chunks_of(v_tiles, STAGES * HALVES * CHUNKS, CHUNK_KEYS, 64)
    stage = begin % STAGES
    mbarrier.wait(v_full.index(stage), (begin // STAGES) & 1)
    inside = gl.arange(0, CHUNK_KEYS, gl.SliceLayout(1, CHUNK)) < end % CHUNK_KEYS
    last = (end - 1 - base) % BLOCK_N // CHUNK_KEYS
    for half in gl.static_range(HALVES):
        clear_chunk(chunks.index((stage * HALVES + half) * CHUNKS + last), inside)
    if REST > 0:
        clear_chunk(chunks_of(v_rest, STAGES * CHUNKS, CHUNK_KEYS, REST).index(stage * CHUNKS + last), inside)
    fence_async_shared()
    barrier()


@gluon.jit
def lines_of(start, count, first_query, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """The token of each line of a group's rows, its head within the group of heads, and whether it is real."""
    tile_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    query = first_query + tile_rows // GROUP
    real = (tile_rows < BLOCK_M // GROUP * GROUP) & (query < count)
    return (start + query).to(gl.int64), tile_rows % GROUP, real


@gluon.jit
def copy_queries(
    q, q_tile, start, count, first_query, first_head, q_stride, FIRST: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Copy columns FIRST .. FIRST + COLUMNS - 1 of a group's queries into shared memory."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    token, head, real = lines_of(start, count, first_query, GROUP, BLOCK_M, WIDE)
    dims = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))
    columns = (first_head + head)[:, None] * DIM + dims[None, :]
    q_tile.store(gl.load(q + token[:, None] * q_stride + columns, mask=real[:, None], other=0.0))


@gluon.jit
def store_sums(
    sums, inverse, out, tile, start, count, first_query, first_head, FIRST: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Write columns of a group's results by way of shared memory, so that whole lines are written."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    token, head, real = lines_of(start, count, first_query, GROUP, BLOCK_M, WIDE)
    dims = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))
    columns = (first_head + head)[:, None] * DIM + dims[None, :]
    sums = sums * gl.convert_layout(inverse, gl.SliceLayout(1, sums.type.layout))[:, None]
    tile.store(sums.to(tile.dtype))
    barrier()
    gl.store(out + token[:, None] * (HEADS * DIM) + columns, tile.load(WIDE), mask=real[:, None])


@gluon.jit
def store_result(
    sums, sums_rest, row_max, row_sum, sinks, out, q_tile, q_rest, start, count, first_query, first_head,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Divide a group's sums by those of the weights, sinks among them, and write them. Nobody reads q_tile any more."""
    if sinks is not None:
        tile_rows = gl.arange(0, BLOCK_M, row_sum.type.layout)
        sink = gl.load(sinks + first_head + tile_rows % GROUP).to(gl.float32)
        row_sum += gl.exp2(sink * 1.4426950408889634 - row_max)
    inverse = 1.0 / gl.where(row_sum > 0, row_sum, 1.0)
    store_sums(
        sums, inverse, out, q_tile, start, count, first_query, first_head, 0, HEADS, GROUP, BLOCK_M, MAIN + REST, MAIN
    )  # fmt: skip
    if REST > 0:
        store_sums(
            sums_rest, inverse, out, q_rest, start, count, first_query, first_head, MAIN,
            HEADS, GROUP, BLOCK_M, MAIN + REST, REST,
        )  # fmt: skip


@gluon.jit
def mask_scores(scores, places, position, window):
    """Scores, and -inf of the keys that a row does not see. In PTX: compares in Triton become bits that are packed."""
    if window is None:
        return gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.le.s32 seen, $2, $3; selp.f32 $0, $1, 0fFF800000, seen; }",
            "=f,f,r,r", [scores, places[None, :], position[:, None]], gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.le.s32 seen, $2, $3; setp.gt.and.s32 seen, $2, $4, seen;"
            " selp.f32 $0, $1, 0fFF800000, seen; }",
            "=f,f,r,r,r", [scores, places[None, :], position[:, None], position[:, None] - window],
            gl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@gluon.jit
def tanh_half(x):
    """tanh(x * ln(2) / 2), to 1e-6: 1 - 2 / (1 + 2 ** x) of the approximate reciprocal, which has no slow path."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 x; ex2.approx.ftz.f32 x, $1; add.f32 x, x, 0f3F800000; rcp.approx.ftz.f32 x, x;"
        " fma.rn.f32 $0, x, 0fC0000000, 0f3F800000; }",
        "=f,f", [x], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def rescale_softmax(
    scores, row_max, row_sum, position, first, window, scale, inner_scale,
    SCORES: gl.constexpr, BLOCK_N: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Weights of a block's keys, and the factor alpha by which earlier results are rescaled."""
    if inner_scale is not None:
        scores = tanh_half(scores * inner_scale)
    if MASKED:
        places = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        scores = mask_scores(scores, places, position, window)
    highest = gl.maximum(row_max, gl.max(scores, 1) * scale)
    level = highest
    if MASKED:  # a row that has seen nothing yet
        level = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(scores * scale - level[:, None])
    alpha = gl.exp2(row_max - level)
    return weights, alpha, highest, row_sum * alpha + gl.sum(weights, 1)


@gluon.jit
def start_scores(
    q_tile, q_rest, k_tile, k_rest, SCORES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """Start the product of a block's scores."""
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    scoring = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    if REST > 0:
        scoring = warpgroup_mma(q_rest, k_rest.permute((1, 0)), scoring, is_async=True)
    return scoring


@gluon.jit
def attend_blocks(
    q_tile, q_rest, k_tiles, v_tiles, k_rest, v_rest, k_full, k_free, v_full, v_free,
    sums, sums_rest, weights, row_max, row_sum, position, window, scale, inner_scale, begin, stop, base, after,
    SCORES: gl.constexpr, SUMS: gl.constexpr, SUMS_REST: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, REST: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Iterations begin .. stop - 1, each of which scores its own block and adds the values of the one before.

    after: the iteration after the tile's last, which is that of its first block.
    weights: fp32 [rows, keys] of the block before; as such they fit in the registers that held its scores.
    """
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    for iteration in range(begin, stop):
        stage = iteration % K_STAGES
        before = (iteration - 1) % V_STAGES
        given = gl.convert_layout(weights.to(q_tile.dtype), WEIGHTS)
        mbarrier.wait(k_full.index(stage), (iteration // K_STAGES) & 1)
        scoring = start_scores(
            q_tile, q_rest, k_tiles.index(stage), k_rest.index(stage), SCORES, BLOCK_M, BLOCK_N, REST
        )
        mbarrier.wait(v_full.index(before), ((iteration - 1) // V_STAGES) & 1)
        adding = warpgroup_mma(given, v_tiles.index(before), sums, is_async=True)
        if REST > 0:
            given_rest = gl.convert_layout(given, gl.DotOperandLayout(0, SUMS_REST, 2))
            adding_rest = warpgroup_mma(given_rest, v_rest.index(before), sums_rest, is_async=True)
            scores = warpgroup_mma_wait(2, deps=[scoring])
        else:
            scores = warpgroup_mma_wait(1, deps=[scoring])
        mbarrier.arrive(k_free.index(stage))
        first = base + (after - 1 - iteration) * BLOCK_N
        weights, alpha, row_max, row_sum = rescale_softmax(
            scores, row_max, row_sum, position, first, window, scale, inner_scale, SCORES, BLOCK_N, MASKED
        )
        # The products read their operand until now.
        if REST > 0:
            sums, sums_rest, given, given_rest = warpgroup_mma_wait(0, deps=[adding, adding_rest, given, given_rest])
            sums_rest = sums_rest * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS_REST))[:, None]
        else:
            sums, given = warpgroup_mma_wait(0, deps=[adding, given])
        mbarrier.arrive(v_free.index(before))
        sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
    return sums, sums_rest, weights, row_max, row_sum
