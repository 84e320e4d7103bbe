"""Attention over paged keys and values in Triton: one launch for rows of any mixture of queries and lengths.

A program computes a tile: some queries of one row by the heads that share one key-value head, so that each key is read
once for the whole group. Tiles are found on the device, by binary search over `query_start`, and the grid is a bound
that follows from sizes alone: nothing waits for the device, and a graph may hold the launch. Where tiles are few and
contexts long, keys are cut too and the parts joined afterwards (flash decoding: Dao et al., 2023). Softmax runs over
blocks of keys with a running maximum (FlashAttention-2: Dao, 2023), in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import AttentionBatch

LOW = 16  # lines of the lowest tile that the matrix units take
LONG_CHUNK = 4096  # queries of a row from which the tallest tiles measure best
DECODE_WAVES = 4  # low tiles per processor up to which their keys are cut
SPLIT_KEYS = 128  # fewest keys that are worth a program
MAX_SPLITS = 64
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tiling:
    """How a batch is cut."""

    lines: int  # of a tile: queries times the heads of a group, the rest idle; a power of 2, at least 16
    keys: int  # of one turn of its loop; a power of 2, at least 16
    splits: int  # programs that share the keys of a tile
    warps: int
    stages: int


def attend_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int = 0,
    tiling: Tiling | None = None,
) -> Tensor:
    """`kernels.attention.paged_attention` by the kernel, without waiting for the device.

    A row without keys gives zeros; tokens past the last row's end are left unwritten.
    """
    tokens, heads, dim = q.shape
    rows, kv_heads = len(batch.context), k_pages.shape[2]
    single = batch.max_query == 1 and tokens == rows
    group = heads // kv_heads
    if tiling is None:
        tiling = choose_tiling(batch, q.shape, kv_heads, q.dtype, processors(q.device), window)
    queries = tiling.lines // group  # of a tile
    assert queries > 0, f"{group} heads share keys, more than the {tiling.lines} lines of a tile"
    assert q.stride(2) == 1 and q.stride(1) == dim and k_pages.is_contiguous() and v_pages.is_contiguous()  # noqa: PT018
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    found, mass = out, out
    if tiling.splits > 1:
        found = torch.empty(tiling.splits, tokens, heads, dim, dtype=torch.float32, device=q.device)
        mass = torch.empty(tiling.splits, tokens, heads, dtype=torch.float32, device=q.device)
    tiles = tokens if single else tokens // queries + rows  # a bound: count // queries + 1 for each row
    grid = (kv_heads, tiles, tiling.splits) if single else (tiles, kv_heads, tiling.splits)
    attention_kernel[grid](
        q, k_pages, v_pages, found, mass, batch.query_start, batch.context, batch.slots, batch.block_tables,
        tokens, rows, batch.block_tables.stride(0), q.stride(0), scale * LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_TILE=max(16, triton.next_power_of_2(dim)),
        BLOCK_SIZE=k_pages.shape[1], WINDOW=window, SINGLE=single, SPLIT=tiling.splits > 1,
        LINES=tiling.lines, KEYS=tiling.keys, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if tiling.splits > 1:
        join_kernel[(tokens, heads)](
            found, mass, out, tokens, tiling.splits,
            HEADS=heads, DIM=dim, DIM_TILE=triton.next_power_of_2(dim),
            SPLIT_TILE=16 if tiling.splits <= 16 else MAX_SPLITS, num_warps=4,
        )  # fmt: skip
    return out


def choose_tiling(
    batch: AttentionBatch, q: tuple[int, ...], kv_heads: int, dtype: torch.dtype, processors: int, window: int = 0
) -> Tiling:
    """Low tiles for single queries, tall ones for long chunks; keys are cut where tiles are too few for the device.

    q: the shape of the queries. Sizes on the host decide alone, so that nothing waits and a captured graph keeps its
    form. The numbers are the best of `benchmarks.kernels --sweep` on an H200.
    """
    tokens, heads, dim = q
    group = heads // kv_heads
    need = triton.next_power_of_2(group)
    waves = 1
    if batch.max_query * group <= max(LOW, need):
        lines, keys, warps, stages, waves = max(LOW, need), 64, 2 if need <= LOW else 4, 4, DECODE_WAVES
    elif batch.max_query < LONG_CHUNK:
        lines, keys, warps, stages = max(64, need), 64, 4 if need <= 64 else 8, 3
    else:
        lines, keys, warps, stages = 128, 128, 8, 3
    if dtype == torch.float32 or dim > 128:  # keep within the shared memory
        warps = 4 if lines <= LOW else 8
        lines, keys, stages = min(lines, max(64, need)), (64 if dim > 128 else 128) // dtype.itemsize, 2
    tiles = min(tokens, tokens // (lines // group) + len(batch.context)) * kv_heads
    longest = min(batch.max_context, window + batch.max_query) if window else batch.max_context
    splits = min(waves * processors // tiles, -(-longest // SPLIT_KEYS), MAX_SPLITS)
    return Tiling(lines, keys, max(1, splits), warps, stages)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; where there is none (Triton's interpreter), one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def find_row(query_start, tile, rows, QUERIES: tl.constexpr):
    """The row that a tile belongs to: row r owns numbers from query_start[r] // QUERIES + r up to the next row's."""
    low = 0
    high = rows
    while low < high:
        middle = (low + high) // 2
        owns = tl.load(query_start + middle) // QUERIES + middle <= tile
        low = tl.where(owns, middle + 1, low)
        high = tl.where(owns, high, middle)
    return low - 1


@triton.jit
def attend_keys(
    q, k_pages, v_pages, table, position, scale, found, peak, total, first, end,
    STRIDE: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Carry the softmax of a tile on over keys first .. end - 1. Unless MASKED every line sees all of them.

    found: fp32 [lines, dim], unnormalised. peak, total: fp32 [lines], the largest score so far and the sum of weights.
    scale: positive, of the scores, in base 2.
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
        weights = tl.exp2(scores * scale - level[:, None])
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(weights, 1)
        found = tl.dot(weights.to(v.dtype), v, found * fade[:, None], input_precision="ieee")
        peak = highest
    return found, peak, total


@triton.jit(
    do_not_specialize=("tokens", "rows", "table_stride"),
    do_not_specialize_on_alignment=("query_start", "context", "slots", "block_tables"),
)
def attention_kernel(
    q, k_pages, v_pages, found, mass, query_start, context, slots, block_tables,
    tokens, rows, table_stride, q_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SINGLE: tl.constexpr, SPLIT: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One tile over its share of the keys. scale: of the scores, in base 2.

    SINGLE: every row has one query, and key-value heads are neighbours in the grid; else tiles are. SPLIT: `found` is
    fp32 [splits, tokens, heads, dim] and `mass` [splits, tokens, heads] the base-2 logarithm of its weight, -inf where
    the program's share held no key; else `found` is the output.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = LINES // GROUP
    if SINGLE:
        kv_head, tile = tl.program_id(0), tl.program_id(1)
        row, ahead = tile, 0
    else:
        tile, kv_head = tl.program_id(0), tl.program_id(1)
        row = find_row(query_start, tile, rows, QUERIES)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    length = tl.load(context + row)
    if not SINGLE:
        left = tl.cdiv(count, QUERIES) - 1 - (tile - start // QUERIES - row)
        if left < 0:
            return
        ahead = left * QUERIES  # the tile of the last queries, which see most keys, comes first
    lines = tl.arange(0, LINES)
    query = ahead + lines // GROUP  # [lines], within the row
    head = kv_head * GROUP + lines % GROUP
    real = (lines < QUERIES * GROUP) & (query < count)
    position = length - count + query
    places = (start + query).to(tl.int64)
    dims = tl.arange(0, DIM_TILE)
    written = real[:, None] & (dims < DIM)[None, :]
    lowest = length - count + ahead  # position of the tile's first query
    end = lowest + tl.minimum(QUERIES, count - ahead)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - first, KEYS), tl.num_programs(2)) * KEYS
        first += tl.program_id(2) * share
        end = tl.minimum(end, first + share)
        places += tl.program_id(2).to(tl.int64) * tokens
        if first >= end:
            tl.store(mass + places * HEADS + head, tl.full([LINES], float("-inf"), tl.float32), mask=real)
            return
    q_places = q + (start + query).to(tl.int64)[:, None] * q_stride + head[:, None] * DIM + dims[None, :]
    q_tile = tl.load(q_places, mask=written, other=0.0)
    sums = tl.zeros([LINES, DIM_TILE], tl.float32)
    peak = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    k_pages += kv_head * DIM
    v_pages += kv_head * DIM
    table = block_tables + tl.load(slots + row).to(tl.int64) * table_stride
    # Between `clear` and `masked` every query of the tile sees every key.
    clear = first
    if WINDOW > 0:
        after = lowest + tl.minimum(QUERIES, count - ahead) - WINDOW  # first key that the last query sees
        clear = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(after, 0), KEYS) * KEYS, first), end)
        sums, peak, total = attend_keys(
            q_tile, k_pages, v_pages, table, position, scale, sums, peak, total, first, clear,
            KV_HEADS * DIM, DIM, DIM_TILE, BLOCK_SIZE, WINDOW, KEYS, True,
        )  # fmt: skip
    masked = tl.maximum(clear, tl.minimum((lowest + 1) // KEYS * KEYS, end))
    sums, peak, total = attend_keys(
        q_tile, k_pages, v_pages, table, position, scale, sums, peak, total, clear, masked,
        KV_HEADS * DIM, DIM, DIM_TILE, BLOCK_SIZE, WINDOW, KEYS, False,
    )  # fmt: skip
    sums, peak, total = attend_keys(
        q_tile, k_pages, v_pages, table, position, scale, sums, peak, total, masked, end,
        KV_HEADS * DIM, DIM, DIM_TILE, BLOCK_SIZE, WINDOW, KEYS, True,
    )  # fmt: skip
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    places = places * HEADS + head
    tl.store(found + places[:, None] * DIM + dims[None, :], sums.to(found.dtype.element_ty), mask=written)
    if SPLIT:
        tl.store(mass + places, peak + tl.log2(tl.where(total > 0, total, 1.0)), mask=real)


@triton.jit(do_not_specialize=("tokens", "splits"))
def join_kernel(
    found, mass, out, tokens, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, SPLIT_TILE: tl.constexpr,
):  # fmt: skip
    """The weighted mean of what the splits found for one head of one token."""
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split = tl.arange(0, SPLIT_TILE).to(tl.int64)
    dims = tl.arange(0, DIM_TILE)
    places = split * tokens * HEADS + place
    masses = tl.load(mass + places, mask=split < splits, other=float("-inf"))  # [splits]
    peak = tl.max(masses, 0)
    weights = tl.exp2(masses - tl.where(peak == float("-inf"), 0.0, peak))
    there = (masses > float("-inf"))[:, None] & (dims < DIM)[None, :]
    parts = tl.load(found + places[:, None] * DIM + dims[None, :], mask=there, other=0.0)  # [splits, dim]
    total = tl.sum(weights, 0)
    joined = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + place * DIM + dims, joined.to(out.dtype.element_ty), mask=dims < DIM)
