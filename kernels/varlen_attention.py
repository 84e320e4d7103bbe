"""Attention both ways within sequences that lie back to back, as encoders need it: there are no pages."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from penstock.kernels.attention import attend_heads
from penstock.kernels.chip import chip_of
from penstock.kernels.records import AttentionOptions


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, longest: int, options: AttentionOptions
) -> Tensor:
    """Softmax attention of `q  # [tokens, heads, dim]` over `k, v  # [tokens, kv_heads, dim]`, each token over its own
    sequence, or over the keys less than `options.window` away; returns q's shape and type. Arithmetic is fp32.

    Sequence i is the tokens `query_start[i] .. query_start[i + 1]`, int32 `[sequences + 1]`; none is longer than
    `longest`. Heads share keys in groups of heads / kv_heads. A result depends on its own sequence alone.
    """
    if chip_of(q.device).runs_triton:
        from penstock.kernels.varlen_attention_triton import attend_sequences

        return attend_sequences(q, k, v, query_start, longest, options)
    ends = query_start.tolist()
    found = [attend_sequence(q[a:b], k[a:b], v[a:b], options) for a, b in itertools.pairwise(ends)]
    return found[0] if len(found) == 1 else torch.cat(found)


def attend_sequence(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """The plain-torch reference for one sequence."""
    seen, count = None, len(q)
    if 0 < options.window < count:
        places = torch.arange(count, device=q.device)
        seen = (places[:, None] - places).abs() < options.window  # [queries, keys]
    q32, k32, v32 = (part.float().transpose(0, 1)[None] for part in (q, k, v))  # [1, heads, tokens, dim] each
    return attend_heads(q32, k32, v32, seen, options)[0].transpose(0, 1).to(q.dtype)
