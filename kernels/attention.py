"""Attention over paged keys and values (Kwon et al., 2023), and the write into the pages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.kernels.records import AttentionBatch, Span

GROUP_KEYS = 2048  # keys gathered at once for rows of one query: what stays in a core's cache measures best
QUERY_PIECE = 256  # queries of a chunk taken at once: bounds the mask, and skips keys that lie in their future


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
    """Put `k, v  # [tokens, kv_heads, dim]` into `pages  # [blocks, block_size, kv_heads, dim]` at their slots.

    Several tokens may share a slot only in the scratch block 0, where any of them may win.
    """
    k_pages.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_pages.flatten(0, 1).index_copy_(0, slot_mapping, v)


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, scale: float, window: int = 0
) -> Tensor:
    """Softmax attention of `q  # [tokens, heads, dim]` over each row's pages; returns the same shape and type.

    Pages are `[blocks, block_size, kv_heads, dim]`; heads share keys in groups of heads / kv_heads. `window` > 0 limits
    a query to its latest `window` keys, its own among them. Arithmetic is fp32. What stands in the pages behind a row's
    end is never read. On a GPU it is a kernel that waits for nothing.
    """
    if q.is_cuda:
        from penstock.kernels.attention_device import attend_pages

        return attend_pages(q, k_pages, v_pages, batch, scale, window)
    return attend_spans(q, k_pages, v_pages, batch, scale, window)


def prepare_attention(q: Tensor, k_pages: Tensor, batch: AttentionBatch, window: int = 0) -> None:
    """Find out what `paged_attention` will ask first of a step, before the step's keys are written: then it need not
    wait. q: any tensor of the queries' shape and type.
    """
    if q.is_cuda:
        from penstock.kernels.attention_device import prepare_pages

        prepare_pages(q, k_pages, batch, window)


def attend_spans(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, scale: float, window: int
) -> Tensor:
    """The plain-torch reference of `paged_attention`: it reads the rows' lengths on the host, once per step."""
    key = k_pages.shape[1], window
    spans = batch.spans.get(key)
    if spans is None:
        spans = batch.spans[key] = cut_spans(batch, *key)
    if len(spans) == 1:
        return attend(q, k_pages, v_pages, spans[0], scale, window)
    return torch.cat([attend(q[span.tokens], k_pages, v_pages, span, scale, window) for span in spans])


def cut_spans(batch: AttentionBatch, block_size: int, window: int) -> tuple[Span, ...]:
    """The batch in order: rows of one query in groups of at most GROUP_KEYS padded keys, longer rows one by one."""
    starts: list[int] = batch.query_start.tolist()
    context: list[int] = batch.context.tolist()
    spans = []
    row, rows = 0, len(context)
    while row < rows:
        first, queries = row, starts[row + 1] - starts[row]
        row += 1
        longest = context[first]
        if queries == 1:
            while row < rows and starts[row + 1] - starts[row] == 1:
                longest = max(longest, context[row])
                if (row + 1 - first) * min(longest, window or longest) > GROUP_KEYS:
                    break
                row += 1
        spans.append(cut_span(batch, slice(first, row), starts[first], queries, context[first:row], block_size, window))
    return tuple(spans)


def cut_span(
    batch: AttentionBatch, rows: slice, start: int, queries: int, context: list[int], block_size: int, window: int
) -> Span:
    """One span: its rows' keys from the first that any query sees on, short rows padded with their own first key."""
    device = batch.context.device
    counts = [max(1, min(length, window + queries - 1) if window else length) for length in context]
    keys = max(counts)
    lows = torch.tensor([length - count for length, count in zip(context, counts, strict=True)], device=device)
    places = torch.arange(keys, device=device)  # [keys]
    seen = None
    if min(counts) < keys:
        inside = places < torch.tensor(counts, device=device)[:, None]  # [rows, keys]
        seen = inside[:, None, None, :]
        places = places * inside
    positions = lows[:, None] + places  # [rows, keys]
    blocks = batch.block_tables[batch.slots[rows]].gather(1, positions // block_size)
    return Span(
        tokens=slice(start, start + len(context) * queries),
        slots=blocks * block_size + positions % block_size,
        seen=seen,
        first=counts[0] - queries,
        queries=queries,
    )


def attend(q: Tensor, k_pages: Tensor, v_pages: Tensor, span: Span, scale: float, window: int) -> Tensor:
    """Attention of the span's own queries: q `[tokens, heads, dim]`."""
    k, v = gather_pages(k_pages, span.slots), gather_pages(v_pages, span.slots)  # [rows, kv_heads, keys, dim]
    if span.queries == 1:
        grouped = q.float().reshape(len(q), k.shape[1], -1, q.shape[2])  # a group's heads take the place of queries
        found = scaled_dot_product_attention(grouped, k, v, attn_mask=span.seen, scale=scale)
        return found.flatten(1, 2).to(q.dtype)
    queries = q.float().transpose(0, 1)[None]  # [1, heads, queries, dim]
    places = torch.arange(span.first + span.queries, device=q.device)
    pieces = []
    for start in range(0, span.queries, QUERY_PIECE):
        end = min(start + QUERY_PIECE, span.queries)
        low = max(0, span.first + start + 1 - window) if window else 0
        reach = slice(low, span.first + end)
        own = places[span.first + start : span.first + end, None]
        seen = places[reach] <= own  # [queries, keys]
        if window:
            seen &= places[reach] > own - window
        pieces.append(
            scaled_dot_product_attention(
                queries[:, :, start:end], k[:, :, reach], v[:, :, reach], attn_mask=seen, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(pieces, dim=2)[0].transpose(0, 1).to(q.dtype)


def gather_pages(pages: Tensor, slots: Tensor) -> Tensor:
    """Keys or values at `slots  # [rows, keys]` as fp32 `[rows, kv_heads, keys, dim]`."""
    found = pages.flatten(0, 1).index_select(0, slots.flatten()).float()
    return found.view(*slots.shape, *pages.shape[2:]).transpose(1, 2)
