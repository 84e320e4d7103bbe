"""Attention over paged keys and values in Triton, for rows of any mixture of queries and lengths.

A program computes a tile: some queries of one sequence by the heads that share one key-value head, so that each key is
read once for the whole group. Tiles are sequences, or come from a list made on the device, and the grid is a bound that
follows from sizes alone: nothing waits for the device, and a CUDA graph may hold the launch. Where tiles are few and
contexts long, keys are split, and the last program of a tile to finish combines the splits (flash decoding: Dao et al.,
2023). Softmax runs over blocks of keys with a running maximum (FlashAttention-2: Dao, 2023), in fp32.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention_fp8 import dim_tile, head_pages, paired, paired_queries, unpack
from penstock.kernels.attention_schedule import HEADER, PLACE, PREFIX, STEP, UNIT, launched_tiles, partial_results
from penstock.kernels.attention_tiling import MAX_PROGRAMS, Tiling, power_of_2
from penstock.kernels.chip import chip_of
from penstock.kernels.records import AttentionBatch, AttentionOptions, SharedPrefixes

LOG2_E = math.log2(math.e)
MOST_SHARES: tl.constexpr = tl.constexpr(MAX_PROGRAMS)  # of a tile


def attend_tiles(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor, batch: AttentionBatch, options: AttentionOptions,
    tiling: Tiling, shortest: int = 1, prefixes: SharedPrefixes | None = None,
) -> None:  # fmt: skip
    """One launch, which writes `out  # [tokens, heads, dim]` for the rows that it serves.

    These are, with `tiling.by_row`, those whose queries fit one tile, else those of at least `shortest` queries. A row
    without keys gives zeros; tokens past the last row's end are left alone. Rows of one query begin behind
    the keys that others have attended to with them, and add the results of those.
    """
    tokens, heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    group = heads // kv_heads
    assert tiling.block_m >= group, f"{group} heads share keys, more than the {tiling.block_m} rows of a tile"
    assert q.stride(2) == 1 and q.stride(1) == dim  # noqa: PT018
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and out.is_contiguous()  # noqa: PT018
    listed, tiles = launched_tiles(batch, tokens, tiling, group, shortest)
    reach = batch.max_context
    if options.window:
        behind = tiling.block_m // group if batch.limits is None else batch.max_query  # a tile's first query
        reach = min(reach, options.window + behind + tiling.block_n)
    partials, lses, arrivals, places, lines = partial_results(batch, out, tiling, group, kv_heads, tiles, reach)
    scale, sinks, limits = options.scale * LOG2_E, options.sinks, batch.limits
    if options.softcap:
        scale = 2 * scale / options.softcap  # of the exponent in tanh
    chip = chip_of(q.device)
    attention_kernel[tiling.grid(kv_heads, tiles)](
        q, *paired(k_pages, v_pages), out, partials, lses, arrivals, *(prefixes or (batch.context, lses, lses)), listed,
        batch.query_start, batch.context, batch.slots, batch.block_tables,
        batch.block_tables.stride(0), q.stride(0), places, lines, scale, q if sinks is None else sinks,
        q if options.kv_scales is None else options.kv_scales, batch.query_start if limits is None else limits,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_TILE=dim_tile(dim, options),
        BLOCK_SIZE=k_pages.shape[1], WINDOW=options.window, BY_ROW=tiling.by_row, SPLIT_K=tiling.programs > 1,
        SPLIT_KEYS=tiling.split_keys, MIN_ITERATIONS=max(tiling.min_split_keys // tiling.block_n, 1),
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        COMBINE_M=power_of_2(group) if tiling.by_row and batch.max_query == 1 else tiling.block_m,
        SOFTCAP=options.softcap * LOG2_E, SINKS=sinks is not None, SHARED=prefixes is not None,
        LIMITED=limits is not None, ONE_LOOP=tiling.one_loop,
        ASM=chip.runs_triton, PDL=chip.pdl, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=chip.pdl,
    )  # fmt: skip


@triton.jit
def find_tile(tiles, query_start, places, QUERIES: tl.constexpr, BY_ROW: tl.constexpr, DEALT: tl.constexpr):
    """A program's key-value head, its tile and the row of that, the row's first token and its number of queries, the
    tile's first query within the row, and whether this launch serves it; which of the tile's programs it is, and how
    many those are. tiles: see `attention_schedule.list_tiles`. DEALT: the tiles of a key-value head have as many
    programs as its `places` hold.
    """
    own, shares = tl.program_id(2), tl.num_programs(2)
    if BY_ROW:
        kv_head, tile = tl.program_id(0), tl.program_id(1)
        row, first_query, served = tile, 0, True
    else:
        tile, kv_head = tl.program_id(0), tl.program_id(1)
        listed = tl.load(tiles)
        if DEALT:
            shares = tl.minimum(tl.maximum(places // tl.maximum(listed, 1), 1), MOST_SHARES)
            own, tile = tile % shares, tile // shares
        served = tile < listed
        row = tl.load(tiles + 1 + 2 * tile, mask=served, other=0)
        first_query = tl.load(tiles + 2 + 2 * tile, mask=served, other=0)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    if BY_ROW:
        served = (count > 0) & (count <= QUERIES)
    return kv_head, tile, row, start, count, first_query, served, own, shares


@triton.jit
def first_partial(tile, kv_head, shares, places, KV_HEADS: tl.constexpr, DEALT: tl.constexpr):
    """Which of all places has the first partial result of a tile, int64."""
    if DEALT:
        return kv_head.to(tl.int64) * places + tile * shares
    else:
        return (tile * KV_HEADS + kv_head).to(tl.int64) * places


@triton.jit
def lines_of(first_query, count, kv_head, GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of each line of a tile its query within the sequence, its head, and whether it is real."""
    line = tl.arange(0, BLOCK_M)
    query = first_query + line // GROUP
    return query, kv_head * GROUP + line % GROUP, (line < QUERIES * GROUP) & (query < count)


@triton.jit
def last_keys(
    limits, start, count, first_query, length, highest,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """The position of the last key that each line of a tile sees, int32 [lines], and one past that of the tile's last.

    length: keys of the row; highest: position of the tile's last query.
    """
    query, _, real = lines_of(first_query, count, 0, GROUP, QUERIES, BLOCK_M)
    last = length - count + query
    end = highest + 1
    if LIMITED:
        last = tl.maximum(last, tl.load(limits + start + query, mask=real, other=0).to(tl.int32))
        end = tl.minimum(tl.max(tl.where(real, last, 0), 0) + 1, length)
    return last, end


@triton.jit
def attend_keys(
    q, q_second, k_pages, v_pages, table, position, limit, lowest, scale, found, second, row_max, row_sum, first, end,
    STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
    ONE_LAYOUT: tl.constexpr = False,
):  # fmt: skip
    """Carry the softmax of a tile on over keys first .. end - 1. Unless MASKED every row sees all of them.

    position, limit: [rows], of a row's query and of the last key that it sees. lowest: the least of these positions.
    found: fp32 [rows, dim], unnormalised. row_max, row_sum: fp32 [rows], the largest score so far and the sum of
    weights. scale: positive, of the scores, in base 2; with SOFTCAP, which is in base 2 too, of the exponent in tanh.
    Where pages hold pairs (see `paired`), q and found have their first numbers, q_second and `second` the others; a
    head has DIM pairs, and STRIDE counts pairs. Fused operations are written out, so that MASKED rounds no differently.
    ONE_LAYOUT: keys are loaded like values, which takes fewer registers; the keys must be MASKED.
    """
    PAIRS: tl.constexpr = k_pages.dtype.element_ty == tl.int16
    DIM_TILE: tl.constexpr = q.shape[1]
    dims = tl.arange(0, DIM_TILE)
    in_head = dims < DIM
    for start in range(first, end, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)  # [keys]
        if MASKED:
            there = places < end
            if WINDOW > 0:
                there = there & (places > lowest - WINDOW)
            blocks = tl.load(table + places // BLOCK_SIZE, mask=there, other=0)
        else:
            there = places >= 0
            blocks = tl.load(table + places // BLOCK_SIZE)
        slots = (blocks.to(tl.int64) * BLOCK_SIZE + places % BLOCK_SIZE) * STRIDE
        k_places = k_pages + slots[None, :] + dims[:, None]  # [dim, keys]
        v_places = v_pages + slots[:, None] + dims[None, :]  # [keys, dim]
        if ONE_LAYOUT:
            held = there[:, None] & in_head[None, :]
            k = tl.trans(tl.load(k_pages + slots[:, None] + dims[None, :], mask=held, other=0.0))
            v = tl.load(v_places, mask=held, other=0.0)
        elif MASKED or DIM < DIM_TILE:
            k = tl.load(k_places, mask=there[None, :] & in_head[:, None], other=0.0)
            v = tl.load(v_places, mask=there[:, None] & in_head[None, :], other=0.0)
        else:
            k = tl.load(k_places)
            v = tl.load(v_places)
        if PAIRS:
            scores = tl.dot(q, unpack(k, 0, q.dtype, ASM), input_precision="ieee")
            scores = tl.dot(q_second, unpack(k, 1, q.dtype, ASM), scores, input_precision="ieee")
        else:
            scores = tl.dot(q, k, input_precision="ieee")  # [rows, keys]
        level_scale = scale
        if SOFTCAP > 0:
            scores = 1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0)  # tanh
            level_scale = SOFTCAP
        if MASKED:
            seen = there[None, :] & (places[None, :] <= limit[:, None])
            if WINDOW > 0:
                seen = seen & (places[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(row_max, tl.max(scores, 1) * level_scale)
        level = highest
        if MASKED:  # a row that has seen nothing yet
            level = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, level_scale, tl.float32), -level[:, None]))
        alpha = tl.exp2(row_max - level)
        row_sum = tl.fma(row_sum, alpha, tl.sum(weights, 1))
        weights = weights.to(q.dtype)
        if PAIRS:
            found = tl.dot(weights, unpack(v, 0, q.dtype, ASM), found * alpha[:, None], input_precision="ieee")
            second = tl.dot(weights, unpack(v, 1, q.dtype, ASM), second * alpha[:, None], input_precision="ieee")
        else:
            found = tl.dot(weights, v, found * alpha[:, None], input_precision="ieee")
        row_max = highest
    return found, second, row_max, row_sum


@triton.jit
def attend_split(
    q, k_pages, v_pages, table, position, limit, scale, gain, lowest, highest, first, end,
    BLOCK_M: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, ONE_LOOP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attention of a tile over keys first .. end - 1 alone: fp32 [rows, dim], and [rows] the base-2 logarithm of
    its weight, -inf for a row that sees none. position, limit: see `attend_keys`. lowest, highest: positions of the
    tile's first and last query. gain: of values that are pairs. ONE_LOOP: see `attention_kernel`.
    """
    PAIRS: tl.constexpr = k_pages.dtype.element_ty == tl.int16
    WIDE: tl.constexpr = DIM // 2 if PAIRS else DIM
    q_second = q
    if PAIRS:
        q, q_second, factor = paired_queries(q)
        scale *= factor
    sums = tl.zeros([BLOCK_M, q.shape[1]], tl.float32)
    second = sums
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # Between `clear` and `masked` every query of the tile sees every key.
    clear, masked = first, first
    if not ONE_LOOP:
        if WINDOW > 0:
            after = highest + 1 - WINDOW  # first key that the last query sees
            clear = tl.minimum(first + tl.cdiv(tl.maximum(after - first, 0), BLOCK_N) * BLOCK_N, end)
            sums, second, row_max, row_sum = attend_keys(
                q, q_second, k_pages, v_pages, table, position, limit, lowest, scale, sums, second, row_max, row_sum,
                first, clear, KV_HEADS * WIDE, WIDE, BLOCK_SIZE, WINDOW, BLOCK_N, SOFTCAP, True, ASM,
            )  # fmt: skip
        masked = clear + tl.maximum(tl.minimum(lowest + 1, end) - clear, 0) // BLOCK_N * BLOCK_N
        sums, second, row_max, row_sum = attend_keys(
            q, q_second, k_pages, v_pages, table, position, limit, lowest, scale, sums, second, row_max, row_sum,
            clear, masked, KV_HEADS * WIDE, WIDE, BLOCK_SIZE, WINDOW, BLOCK_N, SOFTCAP, False, ASM,
        )  # fmt: skip
    sums, second, row_max, row_sum = attend_keys(
        q, q_second, k_pages, v_pages, table, position, limit, lowest, scale, sums, second, row_max, row_sum,
        masked, end, KV_HEADS * WIDE, WIDE, BLOCK_SIZE, WINDOW, BLOCK_N, SOFTCAP, True, ASM, ONE_LOOP,
    )  # fmt: skip
    whole = tl.where(row_sum > 0, row_sum, 1.0)
    if PAIRS:
        sums = tl.interleave(sums, second) * gain
    return sums / whole[:, None], row_max + tl.log2(whole)


@triton.jit
def store_partial(partials, lses, first_row, partial, lse, real, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Store a split's partial result for the real rows of a tile."""
    dims = tl.arange(0, DIM_TILE)
    at = first_row + tl.arange(0, partial.shape[0])
    tl.store(partials + at[:, None] * DIM + dims[None, :], partial, mask=real[:, None] & (dims < DIM)[None, :])
    tl.store(lses + at, lse, mask=real)


@triton.jit
def arrives_last(counter, programs):
    """Count a program as done. Whether it is the tile's last, which sees all partials and resets the counter."""
    tl.debug_barrier()  # every thread's partial is written
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    tl.store(counter, 0, mask=last)
    return last


@triton.jit
def combine(found, row_max, row_sum, partial, lse):
    """Add one split to the weighted mean of those before it; splits are always combined in their order.

    found, partial: fp32 [rows, dim]. row_max, row_sum, lse: fp32 [rows]. A mean of nothing, or a split without
    weight, leaves the other as it is, to the bit.
    """
    highest = tl.maximum(row_max, lse)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    alpha = tl.exp2(row_max - level)
    weight = tl.exp2(lse - level)
    found = tl.fma(partial, weight[:, None], found * alpha[:, None])
    return found, highest, tl.fma(row_sum, alpha, weight)


@triton.jit
def first_weight(sinks, head, real, SINKS: tl.constexpr):
    """The running maximum and sum, fp32 [rows], of a softmax that has seen no key: each head's sink, if there are."""
    row_max = tl.full(head.shape, float("-inf"), tl.float32)
    row_sum = tl.zeros(head.shape, tl.float32)
    if SINKS:
        row_max = tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634  # in base 2
        row_sum += 1.0
    return row_max, row_sum


@triton.jit
def combine_splits(
    partials, lses, row_max, row_sum, splits, place, step, real,
    DIM: tl.constexpr, DIM_TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The weighted sum of splits for some rows: fp32 [rows, dim], and [rows] their running maximum and sum of weights.

    row_max, row_sum: fp32 [rows], see `first_weight`. place: int32 [rows], where the rows' first splits stand, of those
    that are real; step: from one split to the next.
    """
    dims = tl.arange(0, DIM_TILE)
    found = tl.zeros([place.shape[0], DIM_TILE], tl.float32)
    for first in range(0, splits, AT_ONCE):
        for nth in tl.static_range(AT_ONCE):  # independent loads
            split = tl.full(place.shape, first + nth, tl.int32)
            at = place + split * step
            there = real & (split < splits)
            lse = tl.load(lses + at, mask=there, other=float("-inf"))
            held = there[:, None] & (dims < DIM)[None, :]
            partial = tl.load(partials + at[:, None] * DIM + dims[None, :], mask=held, other=0.0)
            found, row_max, row_sum = combine(found, row_max, row_sum, partial, lse)
    return found, row_max, row_sum


@triton.jit
def write_combined(
    out, partials, lses, sinks, splits, lines, start, count, first_query, kv_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, COMBINE_M: tl.constexpr,
    DIM: tl.constexpr, DIM_TILE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Combine all splits of a tile and write the result."""
    tile_rows = tl.arange(0, COMBINE_M)
    dims = tl.arange(0, DIM_TILE)
    query, head, real = lines_of(first_query, count, kv_head, GROUP, QUERIES, COMBINE_M)
    row_max, row_sum = first_weight(sinks, head, real, SINKS)
    found, row_max, row_sum = combine_splits(
        partials, lses, row_max, row_sum, splits, tile_rows, lines, real, DIM, DIM_TILE, 8 if COMBINE_M <= 8 else 2
    )
    found = found / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    places = ((start + query).to(tl.int64) * HEADS + head)[:, None] * DIM + dims[None, :]
    tl.store(out + places, found.to(out.dtype.element_ty), mask=real[:, None] & (dims < DIM)[None, :])


@triton.jit
def add_sinks(found, lse, sinks, head, real):
    """A row's mean with its head's sink in the softmax."""
    row_max, row_sum = first_weight(sinks, head, real, True)
    found, row_max, row_sum = combine(tl.zeros_like(found), row_max, row_sum, found, lse)
    return found / row_sum[:, None]


@triton.jit
def shared_units(schedule, row):
    """How many units a row shares: see `attention_schedule.schedule_prefixes`. Tiles of the grid are rows."""
    return tl.load(schedule + HEADER + PREFIX * tl.num_programs(1) + row)


@triton.jit
def add_prefix(
    found, lse, schedule, partials, lses, row, head, real, HEADS: tl.constexpr, DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Add to a row's result, the mean and its weight's logarithm, what was found about the keys that it shares."""
    units = shared_units(schedule, row)
    if units > 0:
        rows = tl.num_programs(1)
        splits = tl.cdiv(units, tl.load(schedule + 2))
        lists = schedule + HEADER + row
        place, step = tl.load(lists + PLACE * rows) * HEADS + head, tl.load(lists + STEP * rows) * HEADS
        row_max, row_sum = tl.full(lse.shape, float("-inf"), tl.float32), tl.zeros(lse.shape, tl.float32)
        shared, row_max, row_sum = combine_splits(
            partials, lses, row_max, row_sum, splits, place, step, real, DIM, DIM_TILE, 4 if lse.shape[0] <= 16 else 1
        )
        found, row_max, row_sum = combine(shared, row_max, row_sum, found, lse)
        found = found / row_sum[:, None]
        lse = row_max + tl.log2(row_sum)
    return found, lse


@triton.jit
def split_keys(
    first, lowest, end, shares,
    WINDOW: tl.constexpr, SPLIT_KEYS: tl.constexpr, MIN_ITERATIONS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first key that a tile sees, where its first split begins, the keys of a split, and how many splits there are.

    first: key that it would begin with; lowest: position of the tile's first query; end: one past its last key; shares:
    programs of the tile.
    """
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0)
    if SPLIT_KEYS > 0:  # iterations begin at multiples of BLOCK_N, whichever queries a tile has
        first = first // BLOCK_N * BLOCK_N
        size = SPLIT_KEYS
        base = first // SPLIT_KEYS * SPLIT_KEYS
    else:
        size = tl.maximum(tl.cdiv(tl.cdiv(end - first, BLOCK_N), shares), MIN_ITERATIONS) * BLOCK_N
        base = first
    return first, base, size, tl.maximum(tl.cdiv(end - base, size), 1)


@triton.jit(
    do_not_specialize=("table_stride", "places", "lines"),
    do_not_specialize_on_alignment=(
        "arrivals", "schedule", "tiles", "query_start", "context", "slots", "block_tables", "limits",
    ),
)  # fmt: skip
def attention_kernel(
    q, k_pages, v_pages, out, partials, lses, arrivals, schedule, shared, shared_lses, tiles, query_start, context,
    slots, block_tables, table_stride, q_stride, places, lines, scale, sinks, kv_scales, limits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, BY_ROW: tl.constexpr, SPLIT_K: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    MIN_ITERATIONS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMBINE_M: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, LIMITED: tl.constexpr,
    ONE_LOOP: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile over some splits of its keys. scale, SOFTCAP: see `attend_keys`. sinks: fp32 [heads], read if SINKS.
    kv_scales: of pages that hold pairs.

    BY_ROW: tiles are sequences, and key-value heads are neighbours in the grid; else tiles are. SPLIT_KEYS: keys of a
    split, or 0 where the programs of a tile divide its keys evenly, with at least MIN_ITERATIONS iterations each.
    SPLIT_K: several programs take the splits in turn. partials: fp32 [tiles, kv_heads, places, lines, dim], or
    [kv_heads, places, lines, dim] of tiles from a list, see `find_tile`; lses: the same without dim. arrivals: int32
    [tiles, kv_heads] counts the programs that are done, and is left zero.
    SHARED: rows of one query add what `shared` holds by the schedule, see `kernels.attention_prefix`. LIMITED: limits
    are read, see `AttentionBatch`. ONE_LOOP: one loop masks all keys, where three of few iterations would take most of
    their time to begin and end.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    DEALT: tl.constexpr = SPLIT_K and not BY_ROW and SPLIT_KEYS == 0
    if PDL:
        if SPLIT_K:  # few programs, which leave SMs to the next kernel
            tl.extra.cuda.gdc_launch_dependents()
        if SHARED or LIMITED or not BY_ROW:  # earlier kernels may have made the schedule, the limits or the tiles
            tl.extra.cuda.gdc_wait()
    kv_head, tile, row, start, count, first_query, served, own, shares = find_tile(
        tiles, query_start, places, QUERIES, BY_ROW, DEALT)  # fmt: skip
    length = tl.load(context + row)
    slot = tl.load(slots + row)
    lowest = length - count + first_query  # position of the tile's first query
    highest = lowest + tl.minimum(QUERIES, count - first_query) - 1
    limit, end = last_keys(limits, start, count, first_query, length, highest, GROUP, QUERIES, BLOCK_M, LIMITED)
    first = shared_units(schedule, row) * UNIT if SHARED else 0
    first, base, size, splits = split_keys(first, lowest, end, shares, WINDOW, SPLIT_KEYS, MIN_ITERATIONS, BLOCK_N)
    if PDL and BY_ROW and not (SHARED or LIMITED):  # the rows were there before the previous kernel, the rotation
        tl.extra.cuda.gdc_wait()
    if (not served) | (own >= splits):
        return
    query, head, real = lines_of(first_query, count, kv_head, GROUP, QUERIES, BLOCK_M)
    position = length - count + query
    token = (start + query).to(tl.int64)
    dims = tl.arange(0, DIM_TILE)
    in_head = (dims < DIM)[None, :]
    q_places = token[:, None] * q_stride + head[:, None] * DIM + dims[None, :]
    q_tile = tl.load(q + q_places, mask=real[:, None] & in_head, other=0.0)
    out_places = (token * HEADS + head)[:, None] * DIM + dims[None, :]
    k_pages, v_pages, scale, gain = head_pages(k_pages, v_pages, scale, kv_scales, kv_head, KV_HEADS, DIM)
    table = block_tables + slot.to(tl.int64) * table_stride
    held = first_partial(tile, kv_head, shares, places, KV_HEADS, DEALT) * lines
    if SPLIT_KEYS > 0:
        found = tl.zeros([BLOCK_M, DIM_TILE], tl.float32)
        row_max, row_sum = first_weight(sinks, head, real, SINKS)
        for split in range(own, splits, shares):
            low = base + split * SPLIT_KEYS
            partial, lse = attend_split(
                q_tile, k_pages, v_pages, table, position, limit, scale, gain, lowest, highest,
                tl.maximum(low, first), tl.minimum(low + SPLIT_KEYS, end),
                BLOCK_M, KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, WINDOW, BLOCK_N, SOFTCAP, ONE_LOOP, ASM,
            )  # fmt: skip
            if SPLIT_K:
                store_partial(partials, lses, held + split * lines, partial, lse, real, DIM, DIM_TILE)
            else:
                found, row_max, row_sum = combine(found, row_max, row_sum, partial, lse)
        if not SPLIT_K:
            found = found / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
            tl.store(out + out_places, found.to(out.dtype.element_ty), mask=real[:, None] & in_head)
    else:
        low = base + own * size
        partial, lse = attend_split(
            q_tile, k_pages, v_pages, table, position, limit, scale, gain, lowest, highest,
            low, tl.minimum(low + size, end),
            BLOCK_M, KV_HEADS, DIM, DIM_TILE, BLOCK_SIZE, WINDOW, BLOCK_N, SOFTCAP, ONE_LOOP, ASM,
        )  # fmt: skip
        if SHARED and own == 0:
            partial, lse = add_prefix(
                partial, lse, schedule, shared, shared_lses, row, head, real, HEADS, DIM, DIM_TILE)  # fmt: skip
        if SPLIT_K and splits > 1:
            store_partial(partials, lses, held + own * lines, partial, lse, real, DIM, DIM_TILE)
        else:
            if SINKS:
                partial = add_sinks(partial, lse, sinks, head, real)
            tl.store(out + out_places, partial.to(out.dtype.element_ty), mask=real[:, None] & in_head)
    if SPLIT_K and (SPLIT_KEYS > 0 or splits > 1):  # noqa: SIM102 - `and` of the language evaluates both sides
        if arrives_last(arrivals + tile * KV_HEADS + kv_head, tl.minimum(splits, shares)):
            write_combined(
                out, partials + held * DIM, lses + held, sinks, splits, lines, start, count, first_query, kv_head,
                HEADS, GROUP, QUERIES, COMBINE_M, DIM, DIM_TILE, SINKS,
            )  # fmt: skip
