"""Attention over paged keys and values in Triton, for rows of any mixture of queries and lengths.

A program computes a tile: some queries of one row by the heads that share one key-value head, so that each key is read
once for the whole group. Tiles are rows, or stand in a list that the device has made, and the grid is a bound that
follows from sizes alone: nothing waits for the device, and a graph may hold the launch. Where tiles are few and
contexts long, keys are cut into shares, and the last program of a tile to finish joins them (flash decoding: Dao et
al., 2023). Softmax runs over blocks of keys with a running maximum (FlashAttention-2: Dao, 2023), in fp32.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention_schedule import most_tiles, tiles_of
from penstock.kernels.attention_tiling import Tiling
from penstock.kernels.launch import overlaps
from penstock.kernels.records import AttentionBatch

LOG2_E = math.log2(math.e)


def attend_tiles(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int,
    tiling: Tiling,
    shortest: int = 1,
    schedule: Tensor | None = None,
) -> None:
    """One launch, which writes `out  # [tokens, heads, dim]` for the rows that it serves.

    These are, with `tiling.by_row`, those whose queries fit one tile, else those of at least `shortest` queries. A row
    without keys gives zeros; tokens past the last row's end are left alone. With a schedule (`attention_schedule`) it
    does nothing if that says that rows share a prefix.
    """
    tokens, heads, dim = q.shape
    rows, kv_heads = len(batch.context), k_pages.shape[2]
    group = heads // kv_heads
    queries = tiling.lines // group  # of a tile
    assert queries > 0, f"{group} heads share keys, more than the {tiling.lines} lines of a tile"
    assert q.stride(2) == 1 and q.stride(1) == dim  # noqa: PT018
    assert k_pages.is_contiguous() and v_pages.is_contiguous() and out.is_contiguous()  # noqa: PT018
    listed, tiles = batch.query_start, rows
    if not tiling.by_row:
        listed, tiles = tiles_of(batch, tokens, queries, shortest), most_tiles(rows, tokens, queries, shortest)
    parts, masses, arrivals, places = out, out, batch.query_start, 1
    if tiling.splits > 1:
        reach = min(batch.max_context, window + queries + tiling.keys) if window else batch.max_context
        places = -(-reach // tiling.share) + 1 if tiling.share else tiling.splits
        shape = tiles * kv_heads, places, tiling.lines
        parts = torch.empty(*shape, dim, dtype=torch.float32, device=q.device)
        masses = torch.empty(*shape, dtype=torch.float32, device=q.device)
        arrivals = arrivals.new_zeros(tiles * kv_heads) if batch.arrivals is None else batch.arrivals
        assert len(arrivals) >= tiles * kv_heads
    ahead = overlaps(q.device)
    attention_kernel[(kv_heads, tiles, tiling.splits) if tiling.by_row else (tiles, kv_heads, tiling.splits)](
        q, k_pages, v_pages, out, parts, masses, arrivals, batch.context if schedule is None else schedule,
        listed, batch.query_start, batch.context, batch.slots, batch.block_tables,
        batch.block_tables.stride(0), q.stride(0), places, scale * LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_TILE=max(16, triton.next_power_of_2(dim)),
        BLOCK_SIZE=k_pages.shape[1], WINDOW=window, BY_ROW=tiling.by_row, SPLIT=tiling.splits > 1, SHARE=tiling.share,
        LEAST=max(tiling.least // tiling.keys, 1), LINES=tiling.lines, KEYS=tiling.keys,
        JOIN_LINES=triton.next_power_of_2(group) if tiling.by_row and batch.max_query == 1 else tiling.lines,
        YIELDS=schedule is not None, AHEAD=ahead,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=ahead,
    )  # fmt: skip


@triton.jit
def find_tile(tiles, query_start, QUERIES: tl.constexpr, BY_ROW: tl.constexpr):
    """A program's key-value head, its tile and the row of that, the row's first token and its number of queries, the
    tile's first query within the row, and whether this launch serves it. tiles: see `attention_schedule.list_tiles`.
    """
    if BY_ROW:
        kv_head, tile = tl.program_id(0), tl.program_id(1)
        row, ahead, served = tile, 0, True
    else:
        tile, kv_head = tl.program_id(0), tl.program_id(1)
        served = tile < tl.load(tiles)
        row = tl.load(tiles + 1 + 2 * tile, mask=served, other=0)
        ahead = tl.load(tiles + 2 + 2 * tile, mask=served, other=0)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    if BY_ROW:
        served = (count > 0) & (count <= QUERIES)
    return kv_head, tile, row, start, count, ahead, served


@triton.jit
def attend_keys(
    q, k_pages, v_pages, table, position, scale, found, peak, total, first, end,
    STRIDE: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Carry the softmax of a tile on over keys first .. end - 1. Unless MASKED every line sees all of them.

    found: fp32 [lines, dim], unnormalised. peak, total: fp32 [lines], the largest score so far and the sum of weights.
    scale: positive, of the scores, in base 2. What is fused is written out, so that MASKED rounds no differently.
    """
    dims = tl.arange(0, DIM_TILE)
    in_head = dims < DIM
    for start in range(first, end, KEYS):
        places = start + tl.arange(0, KEYS)  # [keys]
        if MASKED:
            there = places < end
            blocks = tl.load(table + places // BLOCK_SIZE, mask=there, other=0)
        else:
            there = places >= 0
            blocks = tl.load(table + places // BLOCK_SIZE)
        slots = (blocks.to(tl.int64) * BLOCK_SIZE + places % BLOCK_SIZE) * STRIDE
        k_places = k_pages + slots[None, :] + dims[:, None]  # [dim, keys]
        v_places = v_pages + slots[:, None] + dims[None, :]  # [keys, dim]
        if MASKED or DIM < DIM_TILE:
            k = tl.load(k_places, mask=there[None, :] & in_head[:, None], other=0.0)
            v = tl.load(v_places, mask=there[:, None] & in_head[None, :], other=0.0)
        else:
            k = tl.load(k_places)
            v = tl.load(v_places)
        scores = tl.dot(q, k, input_precision="ieee")  # [lines, keys]
        if MASKED:
            seen = there[None, :] & (places[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (places[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1) * scale)
        level = highest
        if MASKED:  # a line that has seen nothing yet
            level = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), -level[:, None]))
        fade = tl.exp2(peak - level)
        total = tl.fma(total, fade, tl.sum(weights, 1))
        found = tl.dot(weights.to(v.dtype), v, found * fade[:, None], input_precision="ieee")
        peak = highest
    return found, peak, total


@triton.jit
def attend_share(
    q, k_pages, v_pages, table, position, scale, lowest, highest, first, end,
    LINES: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attention of a tile over keys first .. end - 1 alone: fp32 [lines, dim], and [lines] the base-2 logarithm of its
    weight, -inf for a line that sees none. lowest, highest: positions of the tile's first and last query.
    """
    sums = tl.zeros([LINES, DIM_TILE], tl.float32)
    peak = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    # Between `clear` and `masked` every query of the tile sees every key.
    clear = first
    if WINDOW > 0:
        after = highest + 1 - WINDOW  # first key that the last query sees
        clear = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(after, 0), KEYS) * KEYS, first), end)
        sums, peak, total = attend_keys(
            q, k_pages, v_pages, table, position, scale, sums, peak, total, first, clear,
            STRIDE, DIM, DIM_TILE, BLOCK_SIZE, WINDOW, KEYS, True,
        )  # fmt: skip
    masked = tl.maximum(clear, tl.minimum((lowest + 1) // KEYS * KEYS, end))
    sums, peak, total = attend_keys(
        q, k_pages, v_pages, table, position, scale, sums, peak, total, clear, masked,
        STRIDE, DIM, DIM_TILE, BLOCK_SIZE, WINDOW, KEYS, False,
    )  # fmt: skip
    sums, peak, total = attend_keys(
        q, k_pages, v_pages, table, position, scale, sums, peak, total, masked, end,
        STRIDE, DIM, DIM_TILE, BLOCK_SIZE, WINDOW, KEYS, True,
    )  # fmt: skip
    whole = tl.where(total > 0, total, 1.0)
    return sums / whole[:, None], peak + tl.log2(whole)


@triton.jit
def put_part(parts, masses, first_line, part, mass, real, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Keep what a share gave for the lines that are real."""
    dims = tl.arange(0, DIM_TILE)
    line = first_line + tl.arange(0, part.shape[0])
    tl.store(parts + line[:, None] * DIM + dims[None, :], part, mask=real[:, None] & (dims < DIM)[None, :])
    tl.store(masses + line, mass, mask=real)


@triton.jit
def arrives_last(counter, programs):
    """Count a program as done; whether it is the last of its tile, which then finds all parts and a counter of zero."""
    tl.debug_barrier()  # every thread's part is written
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    tl.store(counter, 0, mask=last)
    return last


@triton.jit
def join(found, peak, total, part, mass):
    """Add one share to the weighted mean of those before it; shares are always joined in their order.

    found, part: fp32 [lines, dim]. peak, total, mass: fp32 [lines]. A mean of nothing, or a share without weight,
    leaves the other as it is, to the bit.
    """
    highest = tl.maximum(peak, mass)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    fade = tl.exp2(peak - level)
    weight = tl.exp2(mass - level)
    found = tl.fma(part, weight[:, None], found * fade[:, None])
    return found, highest, tl.fma(total, fade, weight)


@triton.jit
def join_shares(
    parts, masses, shares, LINES: tl.constexpr, JOIN_LINES: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The weighted mean of a tile's shares for its first lines: fp32 [lines, dim], and [lines] its sum of weights."""
    lines = tl.arange(0, JOIN_LINES)
    dims = tl.arange(0, DIM_TILE)
    found = tl.zeros([JOIN_LINES, DIM_TILE], tl.float32)
    peak = tl.full([JOIN_LINES], float("-inf"), tl.float32)
    total = tl.zeros([JOIN_LINES], tl.float32)
    for first in range(0, shares, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):  # independent loads
            share = tl.full([JOIN_LINES], first + ahead, tl.int32)
            line = share * LINES + lines
            mass = tl.load(masses + line, mask=share < shares, other=float("-inf"))
            held = (share < shares)[:, None] & (dims < DIM)[None, :]
            part = tl.load(parts + line[:, None] * DIM + dims[None, :], mask=held, other=0.0)
            found, peak, total = join(found, peak, total, part, mass)
    return found, total


@triton.jit
def write_joined(
    out, parts, masses, shares, start, count, ahead, kv_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, LINES: tl.constexpr, JOIN_LINES: tl.constexpr,
    DIM: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Put what a tile's shares give together to its place in the output."""
    found, total = join_shares(
        parts, masses, shares, LINES, JOIN_LINES, DIM, DIM_TILE, 8 if JOIN_LINES <= 8 else 2
    )  # fmt: skip
    found = found / tl.where(total > 0, total, 1.0)[:, None]
    lines = tl.arange(0, JOIN_LINES)
    dims = tl.arange(0, DIM_TILE)
    query = ahead + lines // GROUP
    real = (lines < QUERIES * GROUP) & (query < count)
    places = ((start + query).to(tl.int64) * HEADS + kv_head * GROUP + lines % GROUP)[:, None] * DIM + dims[None, :]
    tl.store(out + places, found.to(out.dtype.element_ty), mask=real[:, None] & (dims < DIM)[None, :])


@triton.jit
def cut_keys(
    lowest, end, WINDOW: tl.constexpr, SHARE: tl.constexpr, LEAST: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """The first key that a tile sees, where its first share begins, the keys of a share, and how many shares there are.

    lowest: position of the tile's first query; end: one past that of its last.
    """
    first = 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS
    if SHARE > 0:
        size = SHARE
        base = first // SHARE * SHARE
    else:
        size = tl.maximum(tl.cdiv(tl.cdiv(end - first, KEYS), tl.num_programs(2)), LEAST) * KEYS
        base = first
    return first, base, size, tl.maximum(tl.cdiv(end - base, size), 1)


@triton.jit(
    do_not_specialize=("table_stride", "places"),
    do_not_specialize_on_alignment=("arrivals", "schedule", "tiles", "query_start", "context", "slots", "block_tables"),
)
def attention_kernel(
    q, k_pages, v_pages, out, parts, masses, arrivals, schedule, tiles, query_start, context, slots,
    block_tables, table_stride, q_stride, places, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, BY_ROW: tl.constexpr, SPLIT: tl.constexpr, SHARE: tl.constexpr, LEAST: tl.constexpr,
    LINES: tl.constexpr, KEYS: tl.constexpr, JOIN_LINES: tl.constexpr, YIELDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile over its share of the keys, or all of its shares. scale: of the scores, in base 2.

    BY_ROW: tiles are rows, and key-value heads are neighbours in the grid; else tiles are. SHARE: keys of a share, or 0
    where the programs of a tile divide its keys evenly, into shares of at least LEAST turns. SPLIT: several programs
    take the shares by turns, `parts` is fp32 [tiles, kv_heads, places, lines, dim] and `masses` the same without dim;
    `arrivals` int32 [tiles, kv_heads] counts the programs that are done, and is left zero.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = LINES // GROUP
    if AHEAD:
        if SPLIT:  # few programs, which leave processors to the kernel behind
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if YIELDS:  # noqa: SIM102 - `and` of the language evaluates both sides
        if tl.load(schedule) > 0:
            return
    kv_head, tile, row, start, count, ahead, served = find_tile(tiles, query_start, QUERIES, BY_ROW)
    length = tl.load(context + row)
    slot = tl.load(slots + row)
    if not served:
        return
    lowest = length - count + ahead  # position of the tile's first query
    end = lowest + tl.minimum(QUERIES, count - ahead)
    first, base, size, shares = cut_keys(lowest, end, WINDOW, SHARE, LEAST, KEYS)
    own = tl.program_id(2)
    if own >= shares:
        return
    lines = tl.arange(0, LINES)
    query = ahead + lines // GROUP  # [lines], within the row
    head = kv_head * GROUP + lines % GROUP
    real = (lines < QUERIES * GROUP) & (query < count)
    position = length - count + query
    token = (start + query).to(tl.int64)
    dims = tl.arange(0, DIM_TILE)
    in_head = (dims < DIM)[None, :]
    q_places = token[:, None] * q_stride + head[:, None] * DIM + dims[None, :]
    q_tile = tl.load(q + q_places, mask=real[:, None] & in_head, other=0.0)
    out_places = (token * HEADS + head)[:, None] * DIM + dims[None, :]
    k_pages += kv_head * DIM
    v_pages += kv_head * DIM
    table = block_tables + slot.to(tl.int64) * table_stride
    held = (tile * KV_HEADS + kv_head).to(tl.int64) * places * LINES  # line of the tile's first part
    if SHARE > 0:
        found = tl.zeros([LINES, DIM_TILE], tl.float32)
        peak = tl.full([LINES], float("-inf"), tl.float32)
        total = tl.zeros([LINES], tl.float32)
        for share in range(own, shares, tl.num_programs(2)):
            low = base + share * SHARE
            part, mass = attend_share(
                q_tile, k_pages, v_pages, table, position, scale, lowest, end - 1,
                tl.maximum(low, first), tl.minimum(low + SHARE, end),
                LINES, KV_HEADS * DIM, DIM, DIM_TILE, BLOCK_SIZE, WINDOW, KEYS,
            )  # fmt: skip
            if SPLIT:
                put_part(parts, masses, held + share * LINES, part, mass, real, DIM, DIM_TILE)
            else:
                found, peak, total = join(found, peak, total, part, mass)
        if not SPLIT:
            found = found / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + out_places, found.to(out.dtype.element_ty), mask=real[:, None] & in_head)
    else:
        low = base + own * size
        part, mass = attend_share(
            q_tile, k_pages, v_pages, table, position, scale, lowest, end - 1, low, tl.minimum(low + size, end),
            LINES, KV_HEADS * DIM, DIM, DIM_TILE, BLOCK_SIZE, WINDOW, KEYS,
        )  # fmt: skip
        if SPLIT and shares > 1:
            put_part(parts, masses, held + own * LINES, part, mass, real, DIM, DIM_TILE)
        else:
            tl.store(out + out_places, part.to(out.dtype.element_ty), mask=real[:, None] & in_head)
    if SPLIT and (SHARE > 0 or shares > 1):  # noqa: SIM102 - `and` of the language evaluates both sides
        if arrives_last(arrivals + tile * KV_HEADS + kv_head, tl.minimum(shares, tl.num_programs(2))):
            write_joined(
                out, parts + held * DIM, masses + held, shares, start, count, ahead, kv_head,
                HEADS, GROUP, QUERIES, LINES, JOIN_LINES, DIM, DIM_TILE,
            )  # fmt: skip
