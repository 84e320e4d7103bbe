"""Latent attention of rows with many queries: the latents that they see are expanded to keys and values of each head.

For a pair of a query and a key that takes half the products of absorbed attention or less, and the kernels of ordinary
heads. A head of a row is a row of its own here, with one head: whatever number of heads is expanded at once, there is
one kernel. So memory is bounded by taking some heads after the others, and nothing has to be merged. Keys and values
lie in blocks of scratch memory, one behind the other. Values are as wide as keys: the columns that they lack hold
anything, and what is attended of them is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.attention import attend_spans
from penstock.kernels.chip import chip_of
from penstock.kernels.latent_attention import multiply_heads
from penstock.kernels.records import AttentionBatch, AttentionOptions, ExpandedGroup, RowSet

LONG = 128  # queries of a row from which expanding pays, reckoned for an H200: about 70 are as fast either way
BLOCK = 64  # keys
GROUP_KEYS = 8192  # of several rows that are expanded together
LATENTS = 8192  # expanded by one product
MEMORY = 256 << 20  # bytes of expanded keys and values, unless one head's take more


def memory_bytes(longest: int, width: int, item_bytes: int, least: int = MEMORY) -> int:
    """Of expanded keys and values at any one time. longest: keys of a row; width: numbers of a key."""
    return max(least, 2 * max(-(-longest // BLOCK) * BLOCK, GROUP_KEYS) * width * item_bytes)


def attend_expanded(
    q: Tensor, pages: Tensor, batch: AttentionBatch, keys: Tensor, values: Tensor, scale: float, out: Tensor,
    memory: int = MEMORY,
) -> None:  # fmt: skip
    """Softmax attention of `q  # [tokens, heads, nope + dim]`, the last `dim` turned, over each row's `pages  #
    [blocks, block_size, rank + dim]` for the batch's long rows, into their tokens of `out  # [tokens, heads, value]`.

    keys, values: what expands latents, `[heads, rank, nope]` and `[heads, rank, value]`. Keys and values are rounded to
    q's type, sums are fp32. memory: bytes, see `memory_bytes`; it does not follow from the batch, so that a server
    knows what a step takes.
    """
    assert batch.long_rows is not None, "there are some"
    heads, width = q.shape[1], max(q.shape[2], values.shape[2])
    held = memory_bytes(batch.block_tables.shape[1] * pages.shape[1], width, q.element_size(), memory)
    scratch = torch.empty(held // q.element_size(), dtype=q.dtype, device=q.device)
    options = AttentionOptions(scale)
    for number, group in enumerate(batch.long_rows.groups):
        each = 2 * len(group.block_rows) * BLOCK * width  # numbers of a head
        parts = -(-heads // max(1, min(heads, len(scratch) // each)))
        own = heads_first(q, group.own, width)
        for part in range(parts):
            some = slice(heads * part // parts, heads * (part + 1) // parts)
            rows, places = rows_of_heads(batch, pages.shape[1], number, group, some.stop - some.start)
            k, v = expand(pages, places, keys[some], values[some], q.shape[2], scratch, width)
            found = attend(own[some].flatten(0, 1)[:, None], k, v, rows, options)
            found = found.view(some.stop - some.start, -1, width)[..., : values.shape[2]]
            out[group.own.tokens, some] = found.transpose(0, 1)


def heads_first(q: Tensor, rows: RowSet, width: int) -> Tensor:
    """The queries of some rows: [heads, tokens, width], zero behind their own numbers."""
    own = q[rows.tokens].transpose(0, 1)
    made = torch.empty(*own.shape[:2], width, dtype=q.dtype, device=q.device)
    made[..., : own.shape[2]] = own
    made[..., own.shape[2] :] = 0
    return made


def expand(
    pages: Tensor, places: Tensor, keys: Tensor, values: Tensor, query_dim: int, scratch: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of some heads, `[heads * blocks, BLOCK, 1, width]` each, of the latents at `places`."""
    heads, rank, nope = keys.shape
    shape = heads, len(places), width
    k, v = scratch[: 2 * heads * len(places) * width].view(2, *shape)
    for first in range(0, len(places), LATENTS):
        part = slice(first, first + LATENTS)
        latents = pages.flatten(0, 1).index_select(0, places[part])
        shared = latents[:, None, :rank].expand(-1, heads, -1)
        multiply_heads(shared, keys, k[:, part, :nope].transpose(0, 1), False)
        multiply_heads(shared, values, v[:, part, : values.shape[2]].transpose(0, 1), False)
        k[:, part, nope:query_dim] = latents[:, rank:]
    k[..., query_dim:] = 0
    return k.view(-1, BLOCK, 1, width), v.view(-1, BLOCK, 1, width)


def attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, options: AttentionOptions) -> Tensor:
    if chip_of(q.device).runs_triton:
        from penstock.kernels.attention_device import attend_long_rows

        return attend_long_rows(q, k, v, batch, options)
    return attend_spans(q, k, v, batch, options)


def rows_of_heads(
    batch: AttentionBatch, block_size: int, number: int, group: ExpandedGroup, heads: int
) -> tuple[AttentionBatch, Tensor]:
    """Each row of a group once for each of so many heads, over pages that `expand` makes, and where the latents stand
    in the flattened pages: int64 [blocks * BLOCK]. Made once for all layers of a step."""
    key = number, heads
    if key not in batch.expansions:
        own = group.own
        context = batch.context[own.rows]
        turn = torch.arange(heads, device=context.device)[:, None]
        tokens, blocks = own.tokens, len(group.block_rows)
        count = tokens.stop - tokens.start if isinstance(tokens, slice) else len(tokens)
        starts = (turn * count + own.query_start[:-1]).flatten()
        ends = torch.full((1,), heads * count, device=context.device)
        first = (turn * blocks + group.first_blocks).flatten()[:, None]
        tables = first + torch.arange(-(-own.max_context // BLOCK), device=context.device)
        rows = AttentionBatch(
            query_start=torch.cat((starts, ends)).int(), context=context.repeat(heads),
            slots=torch.arange(len(first), dtype=torch.int32, device=context.device), block_tables=tables.int(),
            slot_mapping=batch.slot_mapping, max_query=own.max_query, max_context=own.max_context,
            arrivals=batch.arrivals,
        )  # fmt: skip
        batch.expansions[key] = rows, find_places(batch, block_size, group, context)
    return batch.expansions[key]


def find_places(batch: AttentionBatch, block_size: int, group: ExpandedGroup, context: Tensor) -> Tensor:
    """Where the latents of a group stand; behind a row's end its last one's place."""
    places = group.block_places[:, None] + torch.arange(BLOCK, device=context.device)  # [blocks, BLOCK]
    places = torch.minimum(places, context[group.block_rows][:, None] - 1)
    lines = batch.slots[group.own.rows].long()[group.block_rows][:, None]
    blocks = batch.block_tables[lines, places // block_size].long()
    return (blocks * block_size + places % block_size).flatten()


def others_of(batch: AttentionBatch) -> AttentionBatch:
    """The rows that are not long, as a batch."""
    assert batch.long_rows is not None and batch.long_rows.others is not None, "there are some"  # noqa: PT018
    others = batch.long_rows.others
    if () not in batch.expansions:
        rows = AttentionBatch(
            query_start=others.query_start, context=batch.context[others.rows], slots=batch.slots[others.rows],
            block_tables=batch.block_tables, slot_mapping=batch.slot_mapping, max_query=others.max_query,
            max_context=batch.max_context, arrivals=batch.arrivals,
        )  # fmt: skip
        batch.expansions[()] = rows, others.rows
    return batch.expansions[()][0]
