"""Attention over paged latents in Triton: `kernels.latent_attention` for rows of any mixture of queries and lengths.

A program computes a tile, some queries of one sequence by a group of heads, so that a latent is read once for the whole
group: as keys, and again as values while it is there. Tiles and splits of keys are as in `kernels.attention_triton`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention_schedule import launched_tiles, partial_results
from penstock.kernels.attention_tiling import (
    WAVES,
    Shape,
    Tiling,
    power_of_2,
    split_programs,
    tall_programs,
    with_invariant_splits,
)
from penstock.kernels.attention_triton import (
    LOG2_E,
    arrives_last,
    combine,
    combine_splits,
    find_tile,
    first_partial,
    split_keys,
    store_partial,
)
from penstock.kernels.chip import Chip, chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.records import AttentionBatch, Rotation
from penstock.protocol.errors import ConfigError

# Rows and keys of a tile, warps, stages. Products of 64 rows and more would be Hopper's own instructions, which
# Triton 3.6 got wrong in such loops.
TILES = ((32, 32, 8, 5), (32, 32, 8, 3), (16, 32, 4, 5), (16, 32, 4, 3), (16, 16, 4, 3))
LOWEST = 16  # rows or columns of a product
HEADS_TILE = 8  # heads of one program that turns queries
COMBINED = 16  # rows whose splits are combined at once


def attend_latents(q: Tensor, pages: Tensor, batch: AttentionBatch, rank: int, scale: float) -> Tensor:
    """`kernels.latent_attention.latent_attention` by the kernel."""
    heads, chip, rows = q.shape[1], chip_of(q.device), len(batch.context)
    out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    if batch.invariant:
        tiling, shape = cut(q, pages, batch, rank, TILES[0][0], chip, tall=True)
        attend_tiles(q, pages, out, batch, scale, with_invariant_splits(tiling, shape, chip), shape)
        return out
    lines = heads * batch.max_query
    low, shape = cut(q, pages, batch, rank, lines if lines <= TILES[0][0] else heads, chip, tall=False)
    queries = low.block_m // shape.group
    if batch.max_query <= queries or rows > 1:
        low = replace(low, programs=split_programs(shape, rows, WAVES, chip), by_row=True)
        attend_tiles(q, pages, out, batch, scale, low, shape)
    if batch.max_query > queries:
        tall, shape = cut(q, pages, batch, rank, lines, chip, tall=True)
        tall = replace(tall, programs=tall_programs(shape, tall, chip))
        attend_tiles(q, pages, out, batch, scale, tall, shape, queries + 1 if rows > 1 else 1)
    return out


def cut(
    q: Tensor, pages: Tensor, batch: AttentionBatch, rank: int, lines: int, chip: Chip, *, tall: bool
) -> tuple[Tiling, Shape]:
    """A tile for so many queries of heads, and how groups of heads share it: as many heads as can be, or if it is tall
    so that the fewest of its rows idle. Raises ConfigError if the chip has no room for one."""
    tokens, heads, width = q.shape
    item = pages.element_size()
    fit = [tile for tile in TILES if shared_bytes(tile, width, item) <= (chip.shared_memory or 1 << 30)]
    if not fit:
        memory = f"{chip.shared_memory} bytes of shared memory of {chip.name}"
        raise ConfigError("kv_lora_rank", rank, f"with {item} bytes a number it needs more than the {memory}")
    block_m, block_n, warps, stages = next((tile for tile in fit if tile[0] < 2 * lines), fit[-1])
    divisors = [group for group in range(1, min(heads, block_m) + 1) if heads % group == 0]
    group = max(divisors, key=lambda group: (block_m // group * group if tall else 0, group))
    longest = batch.block_tables.shape[1] * pages.shape[1]
    shape = Shape(len(batch.context), tokens, batch.max_query, batch.max_context, heads, heads // group, rank, q.dtype,
                  longest=longest)  # fmt: skip
    return Tiling(block_m, block_n, 1, warps, stages), shape


def shared_bytes(tile: tuple[int, int, int, int], width: int, item: int) -> int:
    """Of shared memory that a program takes: queries, keys of the iterations in flight, weights. An iteration's blocks
    are looked up one iteration before its keys."""
    block_m, block_n, _, stages = tile
    return item * (block_m * (width + block_n) + (stages - 1) // 2 * block_n * width) + 1024


def attend_tiles(
    q: Tensor, pages: Tensor, out: Tensor, batch: AttentionBatch, scale: float, tiling: Tiling, shape: Shape,
    shortest: int = 1,
) -> None:  # fmt: skip
    """One launch, which writes `out  # [tokens, heads, rank]` for rows that it serves: as of
    `attention_triton.attend_tiles`."""
    tokens, heads, width = q.shape
    groups, rank = shape.kv_heads, out.shape[2]
    assert q.is_contiguous() and pages.is_contiguous()  # noqa: PT018
    listed, tiles = launched_tiles(batch, tokens, tiling, shape.group, shortest)
    partials, lses, arrivals, places, lines = partial_results(
        batch, out, tiling, shape.group, groups, tiles, batch.max_context
    )  # fmt: skip
    pdl = chip_of(q.device).pdl
    latent_kernel[tiling.grid(groups, tiles)](
        q, pages, out, partials, lses, arrivals, listed, batch.query_start, batch.context, batch.slots,
        batch.block_tables, batch.block_tables.stride(0), places, lines, scale * LOG2_E,
        HEADS=heads, GROUP=shape.group, RANK=rank, DIM=width - rank, RANK_TILE=max(LOWEST, power_of_2(rank)),
        DIM_TILE=max(LOWEST, power_of_2(width - rank)), BLOCK_SIZE=pages.shape[1], BY_ROW=tiling.by_row,
        SPLIT_K=tiling.programs > 1, SPLIT_KEYS=tiling.split_keys,
        MIN_ITERATIONS=max(tiling.min_split_keys // tiling.block_n, 1), BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        COMBINE_M=COMBINED, PDL=pdl, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def attend_split(
    q_latent, q_turned, pages, table, position, scale, first, end,
    RANK: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of a tile over keys first .. end - 1 alone: fp32 [rows, rank], and [rows] the base-2 logarithm of its
    weight, -inf for a row that sees none. scale: of the scores, in base 2."""
    RANK_TILE: tl.constexpr = q_latent.shape[1]
    ranks = tl.arange(0, RANK_TILE)
    dims = tl.arange(0, q_turned.shape[1])
    found = tl.zeros([q_latent.shape[0], RANK_TILE], tl.float32)
    row_max = tl.full([q_latent.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([q_latent.shape[0]], tl.float32)
    for start in range(first, end, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)  # [keys]
        there = places < end
        blocks = tl.load(table + places // BLOCK_SIZE, mask=there, other=0)
        # Multiplied before they are added: Triton 3.6 took a sum's product with an odd width for aligned.
        slots = blocks.to(tl.int64) * (BLOCK_SIZE * (RANK + DIM)) + places % BLOCK_SIZE * (RANK + DIM)
        held = there[:, None] & (ranks < RANK)[None, :]
        latents = tl.load(pages + slots[:, None] + ranks[None, :], mask=held, other=0.0)
        held = there[None, :] & (dims < DIM)[:, None]
        turned = tl.load(pages + slots[None, :] + RANK + dims[:, None], mask=held, other=0.0)
        scores = tl.dot(q_latent, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_turned, turned, scores, input_precision="ieee")  # [rows, keys]
        scores = tl.where(there[None, :] & (places[None, :] <= position[:, None]), scores, float("-inf"))
        highest = tl.maximum(row_max, tl.max(scores, 1) * scale)
        level = tl.where(highest == float("-inf"), 0.0, highest)  # of a row that has seen nothing yet
        weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * scale, -level[:, None]))
        alpha = tl.exp2(row_max - level)
        row_sum = tl.fma(row_sum, alpha, tl.sum(weights, 1))
        found = tl.dot(weights.to(q_latent.dtype), latents, found * alpha[:, None], input_precision="ieee")
        row_max = highest
    whole = tl.where(row_sum > 0, row_sum, 1.0)
    return found / whole[:, None], row_max + tl.log2(whole)


@triton.jit
def write_combined(
    out, partials, lses, splits, lines, start, count, first_query, group,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, COMBINE_M: tl.constexpr,
):  # fmt: skip
    """Combine all splits of a tile and write the result, some rows at once."""
    ranks = tl.arange(0, RANK_TILE)
    for first in tl.static_range(0, BLOCK_M, COMBINE_M):
        tile_rows = first + tl.arange(0, COMBINE_M)
        query = first_query + tile_rows // GROUP
        real = (tile_rows < BLOCK_M // GROUP * GROUP) & (query < count)
        found, _, row_sum = combine_splits(
            partials, lses, tl.full([COMBINE_M], float("-inf"), tl.float32), tl.zeros([COMBINE_M], tl.float32),
            splits, tile_rows, lines, real, RANK, RANK_TILE, 2,
        )  # fmt: skip
        found = found / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        places = ((start + query).to(tl.int64) * HEADS + group * GROUP + tile_rows % GROUP) * RANK
        held = real[:, None] & (ranks < RANK)[None, :]
        tl.store(out + places[:, None] + ranks[None, :], found.to(out.dtype.element_ty), mask=held)


@triton.jit(
    do_not_specialize=("table_stride", "places", "lines"),
    do_not_specialize_on_alignment=("arrivals", "tiles", "query_start", "context", "slots", "block_tables"),
)
def latent_kernel(
    q, pages, out, partials, lses, arrivals, tiles, query_start, context, slots, block_tables, table_stride, places,
    lines, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, RANK_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BY_ROW: tl.constexpr, SPLIT_K: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, MIN_ITERATIONS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COMBINE_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile over some splits of its keys, by some heads; the rest as of `attention_triton.attention_kernel`, in
    which these are the heads of a key-value head."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    DEALT: tl.constexpr = SPLIT_K and not BY_ROW and SPLIT_KEYS == 0
    begin_pdl(PDL)
    group, tile, row, start, count, first_query, served, own, shares = find_tile(
        tiles, query_start, places, QUERIES, BY_ROW, DEALT)  # fmt: skip
    length = tl.load(context + row)
    lowest = length - count + first_query  # position of the tile's first query
    end = lowest + tl.minimum(QUERIES, count - first_query)
    _, base, size, splits = split_keys(0, lowest, end, shares, 0, SPLIT_KEYS, MIN_ITERATIONS, BLOCK_N)
    if (not served) | (own >= splits):
        return
    tile_rows = tl.arange(0, BLOCK_M)
    query = first_query + tile_rows // GROUP  # [tile rows], within the sequence
    head = group * GROUP + tile_rows % GROUP
    real = (tile_rows < QUERIES * GROUP) & (query < count)
    position = length - count + query
    line = (start + query).to(tl.int64) * HEADS + head
    ranks, dims = tl.arange(0, RANK_TILE), tl.arange(0, DIM_TILE)
    q_places = q + line[:, None] * (RANK + DIM)
    q_latent = tl.load(q_places + ranks[None, :], mask=real[:, None] & (ranks < RANK)[None, :], other=0.0)
    q_turned = tl.load(q_places + RANK + dims[None, :], mask=real[:, None] & (dims < DIM)[None, :], other=0.0)
    table = block_tables + tl.load(slots + row).to(tl.int64) * table_stride
    counter = tile * (HEADS // GROUP) + group
    held = first_partial(tile, group, shares, places, HEADS // GROUP, DEALT) * lines
    out_places = out + line[:, None] * RANK + ranks[None, :]
    in_out = real[:, None] & (ranks < RANK)[None, :]
    if SPLIT_KEYS > 0:
        found = tl.zeros([BLOCK_M, RANK_TILE], tl.float32)
        row_max, row_sum = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        for split in range(own, splits, shares):
            low = base + split * SPLIT_KEYS
            partial, lse = attend_split(
                q_latent, q_turned, pages, table, position, scale, low, tl.minimum(low + SPLIT_KEYS, end),
                RANK, DIM, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
            if SPLIT_K:
                store_partial(partials, lses, held + split * lines, partial, lse, real, RANK, RANK_TILE)
            else:
                found, row_max, row_sum = combine(found, row_max, row_sum, partial, lse)
        if not SPLIT_K:
            found = found / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
            tl.store(out_places, found.to(out.dtype.element_ty), mask=in_out)
    else:
        low = base + own * size
        partial, lse = attend_split(
            q_latent, q_turned, pages, table, position, scale, low, tl.minimum(low + size, end),
            RANK, DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        if SPLIT_K and splits > 1:
            store_partial(partials, lses, held + own * lines, partial, lse, real, RANK, RANK_TILE)
        else:
            tl.store(out_places, partial.to(out.dtype.element_ty), mask=in_out)
    if SPLIT_K and (SPLIT_KEYS > 0 or splits > 1):  # noqa: SIM102 - `and` of the language evaluates both sides
        if arrives_last(arrivals + counter, tl.minimum(splits, shares)):
            write_combined(
                out, partials + held * RANK, lses + held, splits, lines, start, count, first_query, group,
                HEADS, GROUP, RANK, RANK_TILE, BLOCK_M, COMBINE_M,
            )  # fmt: skip


def store_by_token(
    latents: Tensor, keys: Tensor, weight: Tensor, eps: float, queries: Tensor, turned: Tensor, rotation: Rotation,
    pages: Tensor, slot_mapping: Tensor,
) -> None:  # fmt: skip
    """`kernels.latent_attention.store_latents` by the kernel: a program for a token's latent, others for its heads."""
    tokens, heads, dim = queries.shape
    rank = latents.shape[1]
    assert pages.is_contiguous() and all(part.stride(-1) == 1 for part in (latents, keys, queries, turned))  # noqa: PT018
    pdl = chip_of(latents.device).pdl
    store_kernel[(tokens, 1 + triton.cdiv(heads, HEADS_TILE))](
        latents, keys, weight, queries, turned, rotation.cos, rotation.sin, pages, slot_mapping, eps,
        latents.stride(0), keys.stride(0), queries.stride(0), queries.stride(1), turned.stride(0), turned.stride(1),
        HEADS=heads, RANK=rank, DIM=dim, RANK_TILE=power_of_2(rank), HALF_TILE=power_of_2(dim // 2),
        HEADS_TILE=HEADS_TILE, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def turn(source, target, cos, sin, places, to, there, DIM: tl.constexpr, HALF_TILE: tl.constexpr):
    """Some heads of one token, which begin at `places` of the source and go `to` those of the target, turned."""
    HALF: tl.constexpr = DIM // 2
    pairs = tl.arange(0, HALF_TILE)
    held = there[:, None] & (pairs < HALF)[None, :]
    left = tl.load(source + places[:, None] + pairs[None, :], mask=held, other=0.0).to(tl.float32)
    right = tl.load(source + places[:, None] + HALF + pairs[None, :], mask=held, other=0.0).to(tl.float32)
    c = tl.load(cos + pairs, mask=pairs < HALF, other=0.0)[None, :]
    s = tl.load(sin + HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    kind = target.dtype.element_ty
    tl.store(target + to[:, None] + pairs[None, :], (left * c - right * s).to(kind), mask=held)
    tl.store(target + to[:, None] + HALF + pairs[None, :], (right * c + left * s).to(kind), mask=held)


@triton.jit(do_not_specialize_on_alignment=("slot_mapping",))
def store_kernel(
    latents, keys, weight, queries, turned, cos, sin, pages, slot_mapping, eps,
    latent_stride, key_stride, query_stride, query_head, turned_stride, turned_head,
    HEADS: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, RANK_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
    HEADS_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: its latent and key, or a few heads of its queries."""
    begin_pdl(PDL)
    token = tl.program_id(0).to(tl.int64)
    cos += token * DIM
    sin += token * DIM
    lanes = tl.arange(0, HEADS_TILE)
    if tl.program_id(1) == 0:
        slot = pages + tl.load(slot_mapping + token) * (RANK + DIM)
        ranks = tl.arange(0, RANK_TILE)
        x = tl.load(latents + token * latent_stride + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
        gain = tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
        x = x * gain * tl.load(weight + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
        tl.store(slot + ranks, x.to(pages.dtype.element_ty), mask=ranks < RANK)
        turn(keys + token * key_stride, slot + RANK, cos, sin, lanes, lanes, lanes == 0, DIM, HALF_TILE)
    else:
        head = (tl.program_id(1) - 1) * HEADS_TILE + lanes
        turn(
            queries + token * query_stride, turned + token * turned_stride, cos, sin, head * query_head,
            head * turned_head, head < HEADS, DIM, HALF_TILE,
        )  # fmt: skip


def multiply_heads_by_tiles(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """`kernels.latent_attention.multiply_heads` in tiles that follow from nothing but the matrices: a row's sums are
    the same whatever the other rows are."""
    tokens, heads, inputs = x.shape
    outputs = weights.shape[2]
    pdl = chip_of(x.device).pdl
    assert x.stride(2) == 1 and out.stride(2) == 1  # noqa: PT018
    heads_kernel[(triton.cdiv(tokens, 32), triton.cdiv(outputs, 64), heads)](
        x, weights, out, tokens, *x.stride()[:2], *weights.stride(), *out.stride()[:2],
        INPUTS=inputs, OUTPUTS=outputs, BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, PDL=pdl, num_warps=4, num_stages=3,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=("tokens",))
def heads_kernel(
    x, weights, out, tokens, x_stride, x_head, head_stride, input_stride, output_stride, out_stride, out_head,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some tokens by some outputs of one head."""
    begin_pdl(PDL)
    head = tl.program_id(2).to(tl.int64)
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        rows = tl.load(
            x + token[:, None] * x_stride + head * x_head + inner[None, :],
            mask=(token < tokens)[:, None] & (inner < INPUTS)[None, :], other=0.0,
        )  # fmt: skip
        matrix = tl.load(
            weights + head * head_stride + inner[:, None] * input_stride + columns[None, :] * output_stride,
            mask=(inner < INPUTS)[:, None] & (columns < OUTPUTS)[None, :], other=0.0,
        )  # fmt: skip
        sums = tl.dot(rows, matrix, sums, input_precision="ieee")
    places = out + token[:, None] * out_stride + head * out_head + columns[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (columns < OUTPUTS)[None, :])
