"""Attention both ways within sequences of any lengths in Triton.

A program computes a tile of one sequence's queries by one head. The grid follows from the longest sequence, and tiles
behind the end of a shorter one return at once. Softmax runs over blocks of keys with a running maximum
(FlashAttention-2: Dao, 2023), in fp32. How keys are cut follows from the head's size and the window, so that a result
has the same bits whatever else is in the batch.
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


def attend_sequences(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, longest: int, options: AttentionOptions
) -> Tensor:
    """`kernels.varlen_attention.varlen_attention` by the kernel, without waiting for the device."""
    _, heads, dim = q.shape
    assert options.plain, "no encoder has caps or sinks"
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_m, block_n, warps, stages = tile_of(dim, q.dtype.itemsize)
    pdl = chip_of(q.device).pdl
    varlen_kernel[(triton.cdiv(longest, block_m), heads, len(query_start) - 1)](
        q, k, v, out, query_start, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], options.scale * LOG2_E,
        HEADS=heads, GROUP=heads // k.shape[1], DIM=dim, DIM_TILE=max(16, triton.next_power_of_2(dim)),
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
    return (128, 32, 8, 3) if dim <= 128 else (64, 32, 4, 2)


@triton.jit
def attend_keys(
    q, k, v, k_stride, v_stride, own, count, scale, found, row_max, row_sum, first, end,
    DIM: tl.constexpr, DIM_TILE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Carry the softmax of a tile on over keys first .. end - 1. Unless MASKED every query sees all of them.

    found: fp32 [queries, dim], unnormalised. row_max, row_sum: fp32 [queries]. scale: of scores, in base 2.
    """
    dims = tl.arange(0, DIM_TILE)
    in_head = dims < DIM
    for low in range(first, end, BLOCK_N):
        places = low + tl.arange(0, BLOCK_N)  # [keys]
        there = places < count
        k_places = k + places[None, :] * k_stride + dims[:, None]  # [dim, keys]
        v_places = v + places[:, None] * v_stride + dims[None, :]  # [keys, dim]
        if MASKED or DIM < DIM_TILE:
            keys = tl.load(k_places, mask=there[None, :] & in_head[:, None], other=0.0)
            values = tl.load(v_places, mask=there[:, None] & in_head[None, :], other=0.0)
        else:
            keys = tl.load(k_places)
            values = tl.load(v_places)
        scores = tl.dot(q, keys, input_precision="ieee") * scale  # [queries, keys]
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
        found = tl.dot(weights.to(values.dtype), values, found * alpha[:, None], input_precision="ieee")
        row_max = highest
    return found, row_max, row_sum


@triton.jit
def varlen_kernel(
    q, k, v, out, query_start, q_stride, q_head, k_stride, k_head, v_stride, v_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
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
        dims = tl.arange(0, DIM_TILE)
        there = (own < count)[:, None] & (dims < DIM)[None, :]
        queries = tl.load(q + (token + own)[:, None] * q_stride + head * q_head + dims[None, :], mask=there, other=0.0)
        k += token * k_stride + head // GROUP * k_head
        v += token * v_stride + head // GROUP * v_head
        found = tl.zeros([BLOCK_M, DIM_TILE], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        if WINDOW > 0:
            low = tl.maximum(first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            end = tl.minimum(count, first_query + BLOCK_M + WINDOW - 1)
        else:
            low = count // BLOCK_N * BLOCK_N
            end = count
            found, row_max, row_sum = attend_keys(
                queries, k, v, k_stride, v_stride, own, count, scale, found, row_max, row_sum, 0, low,
                DIM, DIM_TILE, WINDOW, BLOCK_N, False,
            )  # fmt: skip
        found, row_max, row_sum = attend_keys(
            queries, k, v, k_stride, v_stride, own, count, scale, found, row_max, row_sum, low, end,
            DIM, DIM_TILE, WINDOW, BLOCK_N, True,
        )  # fmt: skip
        found = found / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]  # a query behind the end may have seen nothing
        target = out + ((token + own)[:, None] * HEADS + head) * DIM + dims[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=there)
