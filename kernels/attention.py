"""Attention over paged keys and values (Kwon et al., 2023), and the write into the pages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.kernels.chip import chip_of
from penstock.kernels.records import AttentionBatch, AttentionOptions, Span, Spans

GROUP_NUMBERS = 1 << 19  # gathered at once for rows of one query: what stays in a core's cache measures best
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # number in e4m3
QUERY_PIECE = 256  # queries of a chunk taken at once: bounds the mask, and skips keys that lie in their future


def write_kv(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> None:
    """Put `k, v  # [tokens, kv_heads, dim]` into `pages  # [blocks, block_size, kv_heads, dim]` at their slots.

    Several tokens may share a slot only in the scratch block 0, where any of them may win.
    kv_scales: of pages in e4m3, see `AttentionOptions`.
    """
    if kv_scales is not None:
        k, v = (quantized(part, scale).view(torch.uint8) for part, scale in zip((k, v), kv_scales, strict=True))
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    k_pages.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_pages.flatten(0, 1).index_copy_(0, slot_mapping, v)


def quantized(x: Tensor, scale: Tensor) -> Tensor:
    """`x  # [tokens, heads, dim]` over its head's scale in e4m3, the nearest that there is; NaN stays NaN. Not every
    torch saturates."""
    return (x.float() * (1.0 / scale)[:, None]).clamp_(-LARGEST, LARGEST).to(E4M3)


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, options: AttentionOptions
) -> Tensor:
    """Softmax attention of `q  # [tokens, heads, dim]` over each row's pages; returns the same shape and type.

    Pages are `[blocks, block_size, kv_heads, dim]`; heads share keys in groups of heads / kv_heads. Arithmetic is fp32.
    What stands in the pages behind a row's end is never read. On a GPU it is a kernel that waits for nothing.
    Pages may be in e4m3, with the options' scales.
    """
    if chip_of(q.device).runs_triton:
        from penstock.kernels.attention_device import attend_pages

        return attend_pages(q, k_pages, v_pages, batch, options)
    return attend_spans(q, k_pages, v_pages, batch, options)


def prepare_attention(q: Tensor, k_pages: Tensor, batch: AttentionBatch, options: AttentionOptions) -> None:
    """Find out what `paged_attention` will ask first of a step, before the step's keys are written: then it need not
    wait. q: any tensor of the queries' shape and type.
    """
    if chip_of(q.device).runs_triton:
        from penstock.kernels.attention_device import prepare_pages

        prepare_pages(q, k_pages, batch, options)


def attend_spans(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, options: AttentionOptions
) -> Tensor:
    """The plain-torch reference of `paged_attention`: it reads the rows' lengths on the host, once per step."""
    key = *k_pages.shape[1:], options.window
    spans = batch.spans.get(key)
    if spans is None:
        spans = batch.spans[key] = cut_spans(batch, *key)
    found = [attend(q[span.tokens], k_pages, v_pages, span, spans.memory, options) for span in spans.spans]
    return found[0] if len(found) == 1 else torch.cat(found)


def cut_spans(batch: AttentionBatch, block_size: int, kv_heads: int, dim: int, window: int) -> Spans:
    """The batch in order: rows of one query in groups, whose padded keys are at most GROUP_NUMBERS numbers; longer rows
    one by one."""
    most = GROUP_NUMBERS // (kv_heads * dim)
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
                if (row + 1 - first) * min(longest, window or longest) > most:
                    break
                row += 1
        spans.append(cut_span(batch, slice(first, row), starts[first], queries, context[first:row], block_size, window))
    keys = max((span.slots.numel() for span in spans), default=0)
    return Spans(tuple(spans), torch.empty(2, keys, kv_heads, dim, device=batch.context.device))


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
    limits = None
    if queries > 1 and batch.limits is not None:  # a row's only query is its last token, behind which it has no keys
        limits = batch.limits[start : start + queries] - lows[0]
    return Span(
        tokens=slice(start, start + len(context) * queries),
        slots=blocks * block_size + positions % block_size,
        seen=seen,
        first=counts[0] - queries,
        queries=queries,
        limits=limits,
    )


def attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, span: Span, memory: Tensor, options: AttentionOptions
) -> Tensor:
    """Attention of the span's own queries: q `[tokens, heads, dim]`. memory: as `Spans` has it."""
    k_scale, v_scale = (None, None) if options.kv_scales is None else options.kv_scales
    k, v = gather_pages(k_pages, span.slots, memory[0], k_scale), gather_pages(v_pages, span.slots, memory[1], v_scale)
    if span.queries == 1:
        grouped = q.float().reshape(len(q), k.shape[1], -1, q.shape[2])  # a group's heads take the place of queries
        return attend_heads(grouped, k, v, span.seen, options).flatten(1, 2).to(q.dtype)
    queries = q.float().transpose(0, 1)[None]  # [1, heads, queries, dim]
    places = torch.arange(span.first + span.queries, device=q.device)
    pieces = []
    for start in range(0, span.queries, QUERY_PIECE):
        end = min(start + QUERY_PIECE, span.queries)
        low = max(0, span.first + start + 1 - options.window) if options.window else 0
        own = places[span.first + start : span.first + end, None]
        reach, last = slice(low, span.first + end), own
        if span.limits is not None:
            reach, last = slice(low, None), torch.maximum(own, span.limits[start:end, None])
        seen = places[reach] <= last  # [queries, keys]
        if options.window:
            seen &= places[reach] > own - options.window
        pieces.append(attend_heads(queries[:, :, start:end], k[:, :, reach], v[:, :, reach], seen, options))
    return torch.cat(pieces, dim=2)[0].transpose(0, 1).to(q.dtype)


def attend_heads(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, options: AttentionOptions) -> Tensor:
    """Attention of q `[rows, heads, queries, dim]` over k, v `[rows, kv_heads, keys, dim]`, all fp32.

    seen: bool, None for all, of a shape that broadcasts to `[rows, heads, queries, keys]`.
    """
    if options.plain:
        gqa = q.shape[1] > k.shape[1]
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=options.scale, enable_gqa=gqa)
    kv_heads = k.shape[1]
    lines = q.reshape(len(q), kv_heads, -1, q.shape[3])  # queries of a group's heads, each key read once for them
    scores = (lines @ k.mT).mul_(options.scale)
    if options.softcap:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    if seen is not None:
        scores.view(*q.shape[:3], -1).masked_fill_(~seen, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.view(kv_heads, -1)  # [kv_heads, heads of a group]
        sinks = sinks.repeat_interleave(lines.shape[2] // sinks.shape[1], 1)[None, :, :, None]
        scores = torch.cat((scores, sinks.expand(len(q), -1, -1, -1)), dim=3)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).view(q.shape)


def gather_pages(pages: Tensor, slots: Tensor, memory: Tensor, scale: Tensor | None) -> Tensor:
    """Keys or values at `slots  # [rows, keys]` as fp32 `[rows, kv_heads, keys, dim]`, a view of the memory. scale: of
    pages in e4m3, [kv_heads]."""
    flat, places = pages.flatten(0, 1), slots.flatten()
    out = memory[: len(places)]
    if flat.dtype is out.dtype:
        torch.index_select(flat, 0, places, out=out)
    elif scale is None:
        out.copy_(flat.index_select(0, places))
    else:
        out.copy_(flat.view(torch.uint8).index_select(0, places).view(E4M3)).mul_(scale[:, None])
    return out.view(*slots.shape, *pages.shape[2:]).transpose(1, 2)
