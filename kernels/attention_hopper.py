"""Attention of long chunks over paged keys and values with Hopper's own instructions, in Gluon.

A program computes tiles of rows: queries of one row by the heads that share a key-value head. One warp copies keys and
values from the pages into a pipeline in shared memory by TMA, one chunk per page; one or two groups of four warps take
64 rows each. A group starts the product of the next block's scores before it multiplies the values of the last one, so
that the softmax overlaps with the matrix units (FlashAttention-3: Shah et al., 2024). Blocks are taken from the last to
the first, within the window if there is one: only those at its two ends need the mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

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

from penstock.kernels.attention_blocks import (
    attend_blocks,
    clear_rest,
    copy_block,
    copy_queries,
    rescale_softmax,
    start_scores,
    store_result,
)
from penstock.kernels.attention_schedule import most_tiles, tiles_of
from penstock.kernels.chip import Chip, chip_of
from penstock.kernels.gluon_names import barrier
from penstock.kernels.records import AttentionBatch, AttentionOptions

BLOCK_M = 64  # rows of one warp group
HALF = 64  # elements of a row of swizzled shared memory, 128 bytes
LOG2_E = math.log2(math.e)


class Form(NamedTuple):
    """How a program is laid out, and how many there are."""

    block_n: int  # keys of one iteration
    k_stages: int  # blocks of keys in the pipeline
    v_stages: int
    groups: int = 2  # of four warps, each of which has BLOCK_M rows
    programs: int = 0  # to a processor, each of which takes tiles in turn; 0: one for each tile
    registers: int = 168  # of a thread before warp specialization; then the copying warp keeps 24


# The fastest that were measured on an H200, up to a head's size: one for what sees many keys, and one for tiles of few
# keys, or that are few themselves, of which several on a processor hide one another's beginning and end.
FORMS = (
    (64, Form(128, 2, 2), Form(64, 3, 2, groups=1, programs=3, registers=80)),
    (80, Form(128, 3, 3), Form(64, 3, 2, groups=1, programs=2, registers=128)),
    (96, Form(128, 3, 2), Form(64, 3, 2, groups=1, programs=2, registers=128)),
    (128, Form(128, 2, 2), Form(64, 2, 2, groups=1, programs=2, registers=128)),
    (160, Form(64, 3, 3), Form(64, 3, 3)),
    (192, Form(64, 4, 3), Form(64, 4, 3)),
    (256, Form(64, 2, 2), Form(64, 2, 2)),
)
SHORT_WINDOW = 512  # up to which a tile has few keys


def forms_of(dim: int) -> tuple[Form, Form]:
    return next((long, short) for most, long, short in FORMS if dim <= most)


def form_of(dim: int, window: int, tiles: int, num_sms: int) -> Form:
    """The form for so many tiles of two groups. It follows no length of a row: a server compiles at its start."""
    long, short = forms_of(dim)
    return short if 0 < window <= SHORT_WINDOW or 2 * tiles <= num_sms else long


def split_dim(dim: int) -> tuple[int, int]:
    """A head's columns as a power of two and what is left: tensors have powers of two as their sizes."""
    main = 1 << (dim.bit_length() - 1)
    return main, dim - main


def shared_bytes(dim: int, form: Form) -> int:
    """Shared memory of a program: queries, keys and values, and 1 KB for barriers and alignment."""
    return 2 * dim * (form.groups * BLOCK_M + form.block_n * (form.k_stages + form.v_stages)) + 1024


def serves(q: Tensor, k_pages: Tensor, options: AttentionOptions, chip: Chip) -> bool:
    """Whether the kernel takes these types and sizes on such a chip."""
    _, size, kv_heads, dim = k_pages.shape
    return (
        chip.wgmma
        and chip.tma
        and k_pages.dtype == q.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and 64 <= dim <= 256
        and split_dim(dim)[1] in (0, 16, 32, 64)
        and q.shape[1] // kv_heads <= BLOCK_M
        and size >= 8
        and size & (size - 1) == 0
        and all(shared_bytes(dim, form) <= chip.shared_memory for form in forms_of(dim))
    )


def attend_chunks(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, batch: AttentionBatch, options: AttentionOptions,
    shortest: int = 1, form: Form | None = None,
) -> None:  # fmt: skip
    """One launch, which writes `out  # [tokens, heads, dim]` for the rows of at least `shortest` queries.

    Rows have keys, those of their queries at least. Nothing waits for the device.
    """
    tokens, heads, dim = q.shape
    blocks, size, kv_heads, _ = k_pages.shape
    rows = len(batch.context)
    assert q.stride(2) == 1 and q.stride(1) == dim  # noqa: PT018
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and out.is_contiguous()  # noqa: PT018
    group, chip = heads // kv_heads, chip_of(q.device)
    if form is None:
        form = form_of(dim, options.window, kv_heads * -(-tokens * group // (2 * BLOCK_M)), chip.num_sms)
    main, rest = split_dim(dim)
    chunk_keys = min(size, form.block_n)
    shape, strides = [blocks * size, kv_heads * dim], [kv_heads * dim, 1]

    def descriptor(pages: Tensor, columns: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(2 * columns, 16, 2)
        return TensorDescriptor(pages, shape, strides, [chunk_keys, columns], layout)

    k_desc, v_desc = descriptor(k_pages, HALF), descriptor(v_pages, HALF)
    k_rest_desc = v_rest_desc = None
    if rest:
        k_rest_desc, v_rest_desc = descriptor(k_pages, rest), descriptor(v_pages, rest)
    queries = form.groups * (BLOCK_M // group)  # of a tile
    scale = options.scale * LOG2_E
    inner_scale = None
    if options.softcap:
        scale, inner_scale = options.softcap * LOG2_E, 2 * scale / options.softcap
    tiles = tiles_of(batch, tokens, queries, shortest)
    work = kv_heads * most_tiles(rows, tokens, queries, shortest)
    programs = min(work, form.programs * chip.num_sms) if form.programs else work
    chunk_kernel[(programs,)](
        q, k_desc, v_desc, k_rest_desc, v_rest_desc, out, tiles, batch.query_start, batch.context, batch.slots,
        batch.block_tables, batch.block_tables.stride(0), q.stride(0), blocks * size,
        scale, inner_scale, options.window or None, options.sinks,
        HEADS=heads, KV_HEADS=kv_heads, MAIN=main, REST=rest, BLOCK_SIZE=size, CHUNK_KEYS=chunk_keys, BLOCK_M=BLOCK_M,
        BLOCK_N=form.block_n, K_STAGES=form.k_stages, V_STAGES=form.v_stages, GROUPS=form.groups,
        IN_TURN=form.programs > 0, PDL=chip.pdl, num_warps=4,
        maxnreg=form.registers, launch_pdl=chip.pdl,
    )  # fmt: skip


@gluon.jit
def turns_of(work, IN_TURN: gl.constexpr):
    """How many tiles a program has at most."""
    return gl.cdiv(work, gl.num_programs(0)) if IN_TURN else 1


@gluon.jit
def find_place(turn, IN_TURN: gl.constexpr):
    """Where in the work a program's tile stands. Every other turn they take theirs in reverse: whoever had the longest
    tile then has the shortest.
    """
    place = gl.program_id(0)
    if IN_TURN:
        programs = gl.num_programs(0)
        place = turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)
    return place


@gluon.jit
def find_chunk(
    place, tiles, query_start, context, window,
    KV_HEADS: gl.constexpr, TILE_QUERIES: gl.constexpr, CHUNK_KEYS: gl.constexpr,
):  # fmt: skip
    """A tile's key-value head and row, the row's first token and its queries, the tile's first of them, the keys before
    the row's first query, and where the tile's blocks of keys begin and its keys end.
    """
    kv_head = place % KV_HEADS
    tile = place // KV_HEADS
    row = gl.load(tiles + 1 + 2 * tile)
    first_query = gl.load(tiles + 2 + 2 * tile)
    start = gl.load(query_start + row)
    count = gl.load(query_start + row + 1) - start
    before = gl.load(context + row) - count
    end = before + gl.minimum(first_query + TILE_QUERIES, count)
    base = 0
    if window is not None:  # blocks are cut from the chunk on that has the first key of the first query's window
        base = gl.maximum(before + first_query + 1 - window, 0) // CHUNK_KEYS * CHUNK_KEYS
    return kv_head, row, start, count, first_query, before, base, end


@gluon.jit
def copy_tiles(
    k_desc, v_desc, k_rest_desc, v_rest_desc, k_tiles, v_tiles, k_rest, v_rest, k_full, k_free, v_full, v_free,
    tiles, query_start, context, slots, block_tables, table_stride, window, outside, work,
    IN_TURN: gl.constexpr, KV_HEADS: gl.constexpr, TILE_QUERIES: gl.constexpr,
    BLOCK_N: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, BLOCK_SIZE: gl.constexpr, CHUNK_KEYS: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: of each tile every block of keys and values, the last first."""
    begin = 0  # iterations of the tiles before
    for turn in range(turns_of(work, IN_TURN)):
        place = find_place(turn, IN_TURN)
        if place < work:
            kv_head, row, _start, _count, _first, _before, base, end = find_chunk(
                place, tiles, query_start, context, window, KV_HEADS, TILE_QUERIES, CHUNK_KEYS
            )
            table = block_tables + gl.load(slots + row).to(gl.int64) * table_stride
            column = kv_head * (MAIN + REST)
            stop = begin + gl.cdiv(end - base, BLOCK_N)
            for iteration in range(begin, stop):
                first = base + (stop - 1 - iteration) * BLOCK_N
                copy_block(
                    k_desc, k_rest_desc, k_tiles, k_rest, k_full, k_free, table, iteration, first, end, column, outside,
                    BLOCK_N, MAIN, REST, BLOCK_SIZE, CHUNK_KEYS, K_STAGES,
                )  # fmt: skip
                copy_block(
                    v_desc, v_rest_desc, v_tiles, v_rest, v_full, v_free, table, iteration, first, end, column, outside,
                    BLOCK_N, MAIN, REST, BLOCK_SIZE, CHUNK_KEYS, V_STAGES,
                )  # fmt: skip
            begin = stop


@gluon.jit
def attend_tile(
    q, sinks, out, q_tile, q_rest, k_tiles, v_tiles, k_rest, v_rest, k_full, k_free, v_full, v_free,
    begin, start, count, first_query, before, base, end, first_head, q_stride, window, scale, inner_scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr,
    BLOCK_N: gl.constexpr, CHUNK_KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: its rows of a tile over every block, the last first; the iteration after the last.

    begin: the first iteration; start: the sequence's first token; count: its queries; first_query: the group's first of
    them; before: keys before the sequence's first query; base, end: where blocks of keys begin, and where the keys end.
    """
    QUERIES: gl.constexpr = BLOCK_M // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    SUMS_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST if REST > 0 else MAIN, 16])
    DIM: gl.constexpr = MAIN + REST
    copy_queries(q, q_tile, start, count, first_query, first_head, q_stride, 0, GROUP, BLOCK_M, DIM, MAIN)
    if REST > 0:
        copy_queries(q, q_rest, start, count, first_query, first_head, q_stride, MAIN, GROUP, BLOCK_M, DIM, REST)
    fence_async_shared()
    barrier()

    tile_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, SCORES))
    position = before + first_query + tile_rows // GROUP
    position = gl.minimum(position, end - 1)
    blocks = gl.cdiv(end - base, BLOCK_N)
    after = begin + blocks
    clear = gl.minimum((before + first_query + 1 - base) // BLOCK_N, blocks)  # blocks without a key in any row's future
    sums = gl.zeros([BLOCK_M, MAIN], gl.float32, SUMS)
    if REST > 0:
        sums_rest = gl.zeros([BLOCK_M, REST], gl.float32, SUMS_REST)
    else:
        sums_rest = sums
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, SCORES))
    stage = begin % K_STAGES
    mbarrier.wait(k_full.index(stage), (begin // K_STAGES) & 1)
    scoring = start_scores(q_tile, q_rest, k_tiles.index(stage), k_rest.index(stage), SCORES, BLOCK_M, BLOCK_N, REST)
    scores = warpgroup_mma_wait(0, deps=[scoring])
    mbarrier.arrive(k_free.index(stage))
    weights, _fade, row_max, row_sum = rescale_softmax(
        scores, row_max, row_sum, position, base + (blocks - 1) * BLOCK_N, window, scale, inner_scale,
        SCORES, BLOCK_N, True,
    )  # fmt: skip
    if end % CHUNK_KEYS > 0:
        clear_rest(v_tiles, v_rest, v_full, begin, base, end, MAIN, REST, BLOCK_N, CHUNK_KEYS, V_STAGES)
    masked = begin + gl.maximum(blocks - clear, 1)
    whole = after
    if window is not None:  # from here on some row's window begins within or after the block
        first_whole = gl.cdiv(gl.maximum(before + first_query + QUERIES - window - base, 0), BLOCK_N)
        whole = gl.maximum(after - first_whole, masked)
    sums, sums_rest, weights, row_max, row_sum = attend_blocks(
        q_tile, q_rest, k_tiles, v_tiles, k_rest, v_rest, k_full, k_free, v_full, v_free,
        sums, sums_rest, weights, row_max, row_sum, position, window, scale, inner_scale, begin + 1, masked, base,
        after, SCORES, SUMS, SUMS_REST, BLOCK_M, BLOCK_N, REST, K_STAGES, V_STAGES, True,
    )  # fmt: skip
    sums, sums_rest, weights, row_max, row_sum = attend_blocks(
        q_tile, q_rest, k_tiles, v_tiles, k_rest, v_rest, k_full, k_free, v_full, v_free,
        sums, sums_rest, weights, row_max, row_sum, position, window, scale, inner_scale, masked, whole, base, after,
        SCORES, SUMS, SUMS_REST, BLOCK_M, BLOCK_N, REST, K_STAGES, V_STAGES, False,
    )  # fmt: skip
    if window is not None:
        sums, sums_rest, weights, row_max, row_sum = attend_blocks(
            q_tile, q_rest, k_tiles, v_tiles, k_rest, v_rest, k_full, k_free, v_full, v_free,
            sums, sums_rest, weights, row_max, row_sum, position, window, scale, inner_scale, whole, after, base,
            after, SCORES, SUMS, SUMS_REST, BLOCK_M, BLOCK_N, REST, K_STAGES, V_STAGES, True,
        )  # fmt: skip
    last = (after - 1) % V_STAGES
    given = gl.convert_layout(weights.to(q_tile.dtype), gl.DotOperandLayout(0, SUMS, 2))
    mbarrier.wait(v_full.index(last), ((after - 1) // V_STAGES) & 1)
    adding = warpgroup_mma(given, v_tiles.index(last), sums, is_async=True)
    if REST > 0:
        given_rest = gl.convert_layout(given, gl.DotOperandLayout(0, SUMS_REST, 2))
        adding_rest = warpgroup_mma(given_rest, v_rest.index(last), sums_rest, is_async=True)
        sums_rest, given_rest = warpgroup_mma_wait(0, deps=[adding_rest, given_rest])
    sums, given = warpgroup_mma_wait(0, deps=[adding, given])
    mbarrier.arrive(v_free.index(last))
    store_result(
        sums, sums_rest, row_max, row_sum, sinks, out, q_tile, q_rest, start, count, first_query, first_head,
        HEADS, GROUP, BLOCK_M, MAIN, REST,
    )  # fmt: skip
    return after


@gluon.jit
def attend_tiles(
    q, sinks, out, q_tile, q_rest, k_tiles, v_tiles, k_rest, v_rest, k_full, k_free, v_full, v_free,
    tiles, query_start, context, q_stride, window, scale, inner_scale, work,
    OWN: gl.constexpr, IN_TURN: gl.constexpr, TILE_QUERIES: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK_KEYS: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: its rows of the program's tiles. OWN: which group it is."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    begin = 0
    for turn in range(turns_of(work, IN_TURN)):
        place = find_place(turn, IN_TURN)
        if place < work:
            kv_head, _row, start, count, first_query, before, base, end = find_chunk(
                place, tiles, query_start, context, window, KV_HEADS, TILE_QUERIES, CHUNK_KEYS
            )
            begin = attend_tile(
                q, sinks, out, q_tile, q_rest, k_tiles, v_tiles, k_rest, v_rest, k_full, k_free, v_full, v_free,
                begin, start, count, first_query + OWN * (BLOCK_M // GROUP), before, base, end, kv_head * GROUP,
                q_stride, window, scale, inner_scale,
                HEADS, GROUP, BLOCK_M, MAIN, REST, BLOCK_N, CHUNK_KEYS, K_STAGES, V_STAGES,
            )  # fmt: skip


@gluon.jit(
    do_not_specialize=("table_stride", "outside", "window"),
    do_not_specialize_on_alignment=("tiles", "query_start", "context", "slots", "block_tables", "sinks"),
)
def chunk_kernel(
    q, k_desc, v_desc, k_rest_desc, v_rest_desc, out, tiles, query_start, context, slots, block_tables,
    table_stride, q_stride, outside, scale, inner_scale, window, sinks,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    CHUNK_KEYS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, GROUPS: gl.constexpr, IN_TURN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Tiles of rows over all keys that they see, by programs that take them in turn.

    tiles: see `kernels.attention_schedule.list_tiles`. scale: of the scores, or of the capped ones, in base 2.
    inner_scale: of the scores before they are capped, in base 2 and twice; None: they are not. window: None: every key.
    sinks: [heads] or None. outside: a slot past the pages.
    """
    TILE_QUERIES: gl.constexpr = GROUPS * (BLOCK_M // (HEADS // KV_HEADS))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    work = gl.load(tiles) * KV_HEADS
    if gl.program_id(0) >= work:
        return
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, BLOCK_N, MAIN], TILE)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [V_STAGES, BLOCK_N, MAIN], TILE)
    q_tiles = gl.allocate_shared_memory(k_desc.dtype, [GROUPS, BLOCK_M, MAIN], TILE)
    k_rest, v_rest, q_rest = k_tiles, v_tiles, q_tiles
    if REST > 0:
        NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * REST, 16, 2)
        k_rest = gl.allocate_shared_memory(k_desc.dtype, [K_STAGES, BLOCK_N, REST], NARROW)
        v_rest = gl.allocate_shared_memory(k_desc.dtype, [V_STAGES, BLOCK_N, REST], NARROW)
        q_rest = gl.allocate_shared_memory(k_desc.dtype, [GROUPS, BLOCK_M, REST], NARROW)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=GROUPS)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=GROUPS)
    fence_async_shared()
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (attend_tiles, (
                    q, sinks, out, q_tiles.index(0), q_rest.index(0), k_tiles, v_tiles, k_rest, v_rest,
                    k_full, k_free, v_full, v_free, tiles, query_start, context, q_stride, window, scale, inner_scale,
                    work, 0, IN_TURN, TILE_QUERIES, HEADS, KV_HEADS, BLOCK_M, MAIN, REST, BLOCK_N, CHUNK_KEYS,
                    K_STAGES, V_STAGES,
                )),
                (copy_tiles, (
                    k_desc, v_desc, k_rest_desc, v_rest_desc, k_tiles, v_tiles, k_rest, v_rest,
                    k_full, k_free, v_full, v_free, tiles, query_start, context, slots, block_tables, table_stride,
                    window, outside, work,
                    IN_TURN, KV_HEADS, TILE_QUERIES, BLOCK_N, MAIN, REST, BLOCK_SIZE, CHUNK_KEYS, K_STAGES, V_STAGES,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_tiles, (
                    q, sinks, out, q_tiles.index(0), q_rest.index(0), k_tiles, v_tiles, k_rest, v_rest,
                    k_full, k_free, v_full, v_free, tiles, query_start, context, q_stride, window, scale, inner_scale,
                    work, 0, IN_TURN, TILE_QUERIES, HEADS, KV_HEADS, BLOCK_M, MAIN, REST, BLOCK_N, CHUNK_KEYS,
                    K_STAGES, V_STAGES,
                )),
                (attend_tiles, (
                    q, sinks, out, q_tiles.index(1), q_rest.index(1), k_tiles, v_tiles, k_rest, v_rest,
                    k_full, k_free, v_full, v_free, tiles, query_start, context, q_stride, window, scale, inner_scale,
                    work, 1, IN_TURN, TILE_QUERIES, HEADS, KV_HEADS, BLOCK_M, MAIN, REST, BLOCK_N, CHUNK_KEYS,
                    K_STAGES, V_STAGES,
                )),
                (copy_tiles, (
                    k_desc, v_desc, k_rest_desc, v_rest_desc, k_tiles, v_tiles, k_rest, v_rest,
                    k_full, k_free, v_full, v_free, tiles, query_start, context, slots, block_tables, table_stride,
                    window, outside, work,
                    IN_TURN, KV_HEADS, TILE_QUERIES, BLOCK_N, MAIN, REST, BLOCK_SIZE, CHUNK_KEYS, K_STAGES, V_STAGES,
                )),
            ],
            [4, 1],
            [240, 24],  # with the default's, as many registers as all 12 warps had
        )  # fmt: skip
