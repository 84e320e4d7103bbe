"""Attention on a GPU: which launches serve a batch.

Rows of few queries and long chunks want tiles of different heights, so that a step that mixes them takes two launches,
each of which leaves the other's rows alone. Which rows are which is found on the device; the host knows bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from penstock.kernels import gluon
from penstock.kernels.attention_prefix import attend_prefixes, schedule_of, serves
from penstock.kernels.attention_tiling import (
    LOW,
    WAVES,
    Shape,
    Tiling,
    invariant_tiling,
    low_tiling,
    packed_lines,
    tall_tiling,
    wants_split_k,
)
from penstock.kernels.attention_triton import attend_tiles
from penstock.kernels.chip import Chip, chip_of
from penstock.kernels.records import AttentionBatch, AttentionOptions

FEW_SHARES = 8  # programs of a row up to which those of a row that may be the only one are too few
ChunkAttention = Callable[[Tensor, Tensor, Tensor, Tensor, AttentionBatch, AttentionOptions, int], None]


def attend_pages(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, options: AttentionOptions
) -> Tensor:
    """`kernels.attention.paged_attention` by the kernels, without waiting for the device.

    A row without keys gives zeros; tokens past the last row's end are left unwritten.
    """
    shape, chip = shape_of(q, k_pages, batch, options.window), chip_of(q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    by_row, chunks, shortest = launches(shape, batch.invariant, chip)
    if by_row is not None:
        prefixes = attend_prefixes(q, k_pages, v_pages, batch, options) if serves(q, k_pages, batch, options) else None
        attend_tiles(q, k_pages, v_pages, out, batch, options, by_row, prefixes=prefixes)
    if chunks is not None:
        general = batch.invariant or batch.limits is not None or wants_split_k(shape, chip)
        attend = None if general else chunk_attention(q, k_pages, options)
        if attend is not None:
            attend(q, k_pages, v_pages, out, batch, options, shortest)
        else:
            attend_tiles(q, k_pages, v_pages, out, batch, options, chunks, shortest)
    return out


def attend_long_rows(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, options: AttentionOptions
) -> Tensor:
    """The same of rows all of which have many queries, in one launch."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attend = chunk_attention(q, k_pages, options)
    if attend is not None:
        attend(q, k_pages, v_pages, out, batch, options, 1)
    else:
        tiling = tall_tiling(shape_of(q, k_pages, batch, options.window), chip_of(q.device))
        attend_tiles(q, k_pages, v_pages, out, batch, options, tiling)
    return out


@lru_cache(maxsize=256)  # a step's layers ask the same
def launches(shape: Shape, invariant: bool, chip: Chip) -> tuple[Tiling | None, Tiling | None, int]:
    """How rows of few queries are cut, how chunks are, and the fewest queries of what the latter launch serves."""
    if invariant:
        tiling = invariant_tiling(shape, chip)
        return (tiling, None, 1) if tiling.by_row else (None, tiling, 1)
    if shape.max_query * shape.group <= packed_lines(shape, chip):
        low = low_tiling(shape, shape.max_query, chip)
        single = 1 < shape.rows == shape.max_query == shape.tokens  # a captured graph's, which may all be of one row
        if single and low.programs <= FEW_SHARES and wants_split_k(shape, chip):
            return None, tall_tiling(shape, chip), 1
        return low, None, 1
    if shape.rows == 1:
        return None, tall_tiling(shape, chip), 1
    low = low_tiling(shape, max(LOW // shape.group, 1), chip)
    return low, tall_tiling(shape, chip), low.block_m // shape.group + 1


def chunk_attention(q: Tensor, k_pages: Tensor, options: AttentionOptions) -> ChunkAttention | None:
    """The kernel of Hopper's own instructions, if the device, the types and the sizes are such as it takes."""
    if not chip_of(q.device).runs_triton:
        return None
    hopper = gluon.load("attention_hopper")
    attend: ChunkAttention | None = None
    if hopper is not None and hopper.serves(q, k_pages, options, chip_of(q.device)):
        attend = hopper.attend_chunks
    return attend


def prepare_pages(q: Tensor, k_pages: Tensor, batch: AttentionBatch, options: AttentionOptions) -> None:
    """`kernels.attention.prepare_attention` on a GPU: the schedule of rows that may share a prefix."""
    if serves(q, k_pages, batch, options):
        schedule_of(q, k_pages, batch)


def shape_of(q: Tensor, k_pages: Tensor, batch: AttentionBatch, window: int) -> Shape:
    tokens, heads, dim = q.shape
    longest = batch.block_tables.shape[1] * k_pages.shape[1]
    rows, kv_heads = len(batch.context), k_pages.shape[2]
    dtype = k_pages.dtype if q.element_size() == 2 else q.dtype
    return Shape(rows, tokens, batch.max_query, batch.max_context, heads, kv_heads, dim, dtype, window, longest)


def arrival_counters(device: torch.device) -> Tensor:
    """Zeros for `AttentionBatch.arrivals`, enough for any batch: the kernels leave them zero."""
    return torch.zeros(WAVES * chip_of(device).num_sms, dtype=torch.int32, device=device)
