"""Attention over paged latents (MLA: DeepSeek-V2, 2024), and what goes into the pages.

A page has for each token a latent of `rank` numbers and a turned key of some more, which all heads share. Queries are
absorbed, so that a score is one product with both, and what is attended is the latents.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.kernels.attention import QUERY_PIECE
from penstock.kernels.chip import chip_of
from penstock.kernels.norm import rms_norm
from penstock.kernels.records import AttentionBatch, Rotation
from penstock.kernels.rope import apply_rope


def multiply_heads(x: Tensor, weights: Tensor, out: Tensor, invariant: bool) -> None:
    """Each head by its own matrix: `x  # [tokens, heads, inputs]`, `weights  # [heads, inputs, outputs]` into `out  #
    [tokens, heads, outputs]`; all may be views. Summed in fp32.

    invariant: a token's result has the same bits whatever the others are.
    """
    if invariant and chip_of(x.device).runs_triton:
        from penstock.kernels.latent_attention_triton import multiply_heads_by_tiles

        multiply_heads_by_tiles(x, weights, out)
    else:
        torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))


def store_latents(
    latents: Tensor, keys: Tensor, weight: Tensor, eps: float, queries: Tensor, turned: Tensor, rotation: Rotation,
    pages: Tensor, slot_mapping: Tensor,
) -> None:  # fmt: skip
    """Put the norm of `latents  # [tokens, rank]` and the turned `keys  # [tokens, dim]` into their slots of `pages  #
    [blocks, block_size, rank + dim]`, and the turned `queries  # [tokens, heads, dim]` into `turned`.

    weight, eps: of the RMS norm, `[rank]`. Inputs may be views. On a GPU it is one kernel, which rounds once.
    """
    if chip_of(latents.device).runs_triton:
        from penstock.kernels.latent_attention_triton import store_by_token

        store_by_token(latents, keys, weight, eps, queries, turned, rotation, pages, slot_mapping)
        return
    turned.copy_(apply_rope(queries, rotation))
    own = rms_norm(latents, weight, eps), apply_rope(keys[:, None], rotation)[:, 0]
    pages.flatten(0, 1).index_copy_(0, slot_mapping, torch.cat(own, dim=1))


def latent_attention(q: Tensor, pages: Tensor, batch: AttentionBatch, rank: int, scale: float) -> Tensor:
    """Softmax attention of absorbed queries `q  # [tokens, heads, rank + dim]` over each row's pages `[blocks,
    block_size, rank + dim]`; returns what is attended of their latents, `[tokens, heads, rank]` of q's type.

    Arithmetic is fp32. What stands in the pages behind a row's end is never read. On a GPU it is a kernel that waits
    for nothing. scale: of the scores.
    """
    assert batch.limits is None, "no model with latents has tokens that see later ones"
    if chip_of(q.device).runs_triton:
        from penstock.kernels.latent_attention_triton import attend_latents

        return attend_latents(q, pages, batch, rank, scale)
    starts, context = batch.query_start.tolist(), batch.context.tolist()
    found = []
    for row, length in enumerate(context):
        places = torch.arange(length, device=q.device)
        blocks = batch.block_tables[batch.slots[row]].long()
        size = pages.shape[1]
        keys = pages.flatten(0, 1)[blocks[places // size] * size + places % size].float()  # [keys, rank + dim]
        own = q[starts[row] : starts[row + 1]]
        found += [attend(own, length - len(own), at, keys, rank, scale) for at in range(0, len(own), QUERY_PIECE)]
    return torch.cat(found) if found else q.new_empty(0, q.shape[1], rank)


def attend(q: Tensor, first: int, at: int, keys: Tensor, rank: int, scale: float) -> Tensor:
    """Of some of a row's queries, from number `at` on; the first of all stands at position `first`."""
    own = q[at : at + QUERY_PIECE].float().transpose(0, 1)  # [heads, queries, numbers]
    end = first + at + own.shape[1]
    places = torch.arange(end, device=q.device)
    seen = places <= places[first + at :, None]
    shared = keys[:end].expand(len(own), -1, -1)
    found = scaled_dot_product_attention(own, shared, shared[..., :rank], attn_mask=seen, scale=scale)
    return found.transpose(0, 1).to(q.dtype)
