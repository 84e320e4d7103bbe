"""Attention both ways within sequences of any lengths in Triton.

A program computes a tile of one sequence's queries by one head. The grid follows from the longest sequence, and tiles
behind the end of a shorter one return at once. Softmax runs over blocks of keys with a running maximum
(FlashAttention-2: Dao, 2023), in fp32. How keys are cut follows from the head's size and the window, so that a result
has the same bits whatever else is in the batch.

The columns of a head behind a power of two are a small tile of their own if they are few: heads of 72 and of 80, which
vision encoders have, are not padded to 128.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.records import AttentionOptions

LOG2_E = math.log2(math.e)
FEW = 16  # columns behind a power of two that are a tile of their own, the fewest that a product takes


def attend_sequences(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, longest: int, options: AttentionOptions
) -> Tensor:
    """`kernels.varlen_attention.varlen_attention` by the kernel, without waiting for the device."""
    _, heads, dim = q.shape
    assert options.plain, "no encoder has caps or sinks"
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (dim, 1), "views of products"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_m, block_n, warps, stages = tile_of(dim, q.dtype.itemsize)
    columns, rest = columns_of(dim)
    pdl = chip_of(q.device).pdl
    varlen_kernel[(triton.cdiv(longest, block_m), heads, len(query_start) - 1)](
        q, k, v, out, query_start, q.stride(0), k.stride(0), v.stride(0), options.scale * LOG2_E,
        HEADS=heads, GROUP=heads // k.shape[1], DIM=dim, COLUMNS=columns, REST=rest,
        WINDOW=options.window, BLOCK_M=block_m, BLOCK_N=block_n, PDL=pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def tile_of(dim: int, item_bytes: int) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps and stages: what fits the shared memory of every chip that is served."""
    if item_bytes > 2:
        return (32, 32, 4, 2) if dim <= 64 else (16, 16, 4, 2)  # larger ones spill most of their registers
    if dim <= 64:
        return 64, 64, 4, 3
    if sum(columns_of(dim)) <= 80:
        return 128, 64, 4, 3
    return (128, 32, 8, 3) if dim <= 128 else (64, 32, 4, 2)


def columns_of(dim: int) -> tuple[int, int]:
    """Columns of a head's first tile, and of the one of those behind; 0: there is none."""
    whole = max(FEW, triton.next_power_of_2(dim))
    return (whole // 2, FEW) if whole > 64 and dim - whole // 2 <= FEW else (whole, 0)


@triton.jit
def load_columns(
    k, v, places, there, k_stride, v_stride,
    FIRST: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the keys, [columns, keys], and of the values, [keys, columns], from the column FIRST on."""
    dims = FIRST + tl.arange(0, COLUMNS)
    k_places = k + places[None, :] * k_stride + dims[:, None]
    v_places = v + places[:, None] * v_stride + dims[None, :]
    if MASKED or DIM < FIRST + COLUMNS:
        in_head = dims < DIM
        keys = tl.load(k_places, mask=there[None, :] & in_head[:, None], other=0.0)
        values = tl.load(v_places, mask=there[:, None] & in_head[None, :], other=0.0)
    else:
        keys = tl.load(k_places)
        values = tl.load(v_places)
    return keys, values


@triton.jit
def attend_keys(
    q, q_rest, k, v, k_stride, v_stride, own, count, scale, found, found_rest, row_max, row_sum, first, end,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Carry the softmax of a tile on over keys first .. end - 1. Unless MASKED every query sees all of them.

    found, found_rest: fp32 [queries, columns], unnormalised; without REST nobody reads the second, nor q_rest. row_max,
    row_sum: fp32 [queries]. scale: of scores, in base 2.
    """
    for low in range(first, end, BLOCK_N):
        places = low + tl.arange(0, BLOCK_N)  # [keys]
        there = places < count
        keys, values = load_columns(k, v, places, there, k_stride, v_stride, 0, COLUMNS, DIM, MASKED)
        scores = tl.dot(q, keys, input_precision="ieee")  # [queries, keys]
        if REST > 0:
            keys_rest, values_rest = load_columns(
                k, v, places, there, k_stride, v_stride, COLUMNS, REST, DIM, MASKED
            )  # fmt: skip
            scores = tl.dot(q_rest, keys_rest, scores, input_precision="ieee")
        scores = scores * scale
        if MASKED:
            seen = there[None, :] & (own[:, None] >= 0)
            if WINDOW > 0:
                away = own[:, None] - places[None, :]
                seen = seen & (away < WINDOW) & (away > -WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(row_max, tl.max(scores, 1))
        level = highest
        if MASKED:  # a block may hold nothing of a query's window
            level = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - level[:, None])
        alpha = tl.exp2(row_max - level)
        row_sum = row_sum * alpha + tl.sum(weights, 1)
        weights = weights.to(values.dtype)
        found = tl.dot(weights, values, found * alpha[:, None], input_precision="ieee")
        if REST > 0:
            found_rest = tl.dot(weights, values_rest, found_rest * alpha[:, None], input_precision="ieee")
        row_max = highest
    return found, found_rest, row_max, row_sum


@triton.jit
def varlen_kernel(
    q, k, v, out, query_start, q_stride, k_stride, v_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some queries of one sequence, by one head."""
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin_pdl(PDL)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    first_query = tile * BLOCK_M
    if first_query < count:
        token = start.to(tl.int64)
        own = first_query + tl.arange(0, BLOCK_M)  # [queries]
        dims = tl.arange(0, COLUMNS)
        there = (own < count)[:, None] & (dims < DIM)[None, :]
        lines = q + (token + own)[:, None] * q_stride + head * DIM
        target = out + ((token + own)[:, None] * HEADS + head) * DIM
        queries = tl.load(lines + dims[None, :], mask=there, other=0.0)
        found = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        queries_rest, found_rest = queries, found
        if REST > 0:
            behind = COLUMNS + tl.arange(0, REST)
            rest = (own < count)[:, None] & (behind < DIM)[None, :]
            queries_rest = tl.load(lines + behind[None, :], mask=rest, other=0.0)
            found_rest = tl.zeros([BLOCK_M, REST], tl.float32)
        k += token * k_stride + head // GROUP * DIM
        v += token * v_stride + head // GROUP * DIM
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        if WINDOW > 0:
            low = tl.maximum(first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            end = tl.minimum(count, first_query + BLOCK_M + WINDOW - 1)
        else:
            low = count // BLOCK_N * BLOCK_N
            end = count
            found, found_rest, row_max, row_sum = attend_keys(
                queries, queries_rest, k, v, k_stride, v_stride, own, count, scale, found, found_rest, row_max, row_sum,
                0, low, DIM, COLUMNS, REST, WINDOW, BLOCK_N, False,
            )  # fmt: skip
        found, found_rest, row_max, row_sum = attend_keys(
            queries, queries_rest, k, v, k_stride, v_stride, own, count, scale, found, found_rest, row_max, row_sum,
            low, end, DIM, COLUMNS, REST, WINDOW, BLOCK_N, True,
        )  # fmt: skip
        row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]  # a query behind the end may have seen nothing
        tl.store(target + dims[None, :], (found / row_sum).to(out.dtype.element_ty), mask=there)
        if REST > 0:
            tl.store(target + behind[None, :], (found_rest / row_sum).to(out.dtype.element_ty), mask=rest)
