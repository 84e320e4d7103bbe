"""Rotary position embedding (Su et al., 2021) in the half-split layout: element i pairs with element i + dim / 2."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.attention import write_kv
from penstock.kernels.chip import chip_of
from penstock.kernels.norm import rms_norm
from penstock.kernels.records import HeadNorms, Rotation


def gather_rotation(
    table: Tensor, positions: Tensor, query_scales: Tensor | None = None, axes: Tensor | None = None
) -> Rotation:
    """Rows of the model's table `[length, dim]` (cosines of dim / 2 frequencies, then their sines) at `[tokens]`, and
    of `query_scales  # [length]`. Where positions are `[3, tokens]` (M-RoPE), `axes  # int32 [dim / 2]` says by which
    of the three each frequency turns, and queries are scaled by the first."""
    scale = None if query_scales is None else query_scales.index_select(0, positions.view(-1, positions.shape[-1])[0])
    if chip_of(table.device).runs_triton:
        from penstock.kernels.rope_triton import rotation_rows

        return rotation_rows(table, positions, axes)._replace(query_scale=scale)
    if positions.dim() == 1:
        rows = table.index_select(0, positions)
    else:
        assert axes is not None, "M-RoPE has sections"
        rows = table.gather(0, positions.index_select(0, axes.repeat(2)).T)
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, dim / 2]
    return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1), scale)


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """`x  # [tokens, heads, dim]` rotated by its tokens' angles; computed in fp32, returned in x's type."""
    half = x.shape[-1] // 2
    turned = (x * rotation.cos).addcmul_(x.roll(half, dims=-1), rotation.sin)
    return turned.to(x.dtype)


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor,
    norms: HeadNorms | None = None, kv_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rotated queries `[tokens, heads, dim]`; rotated keys, and values, are written to their slots of the pages.

    q is `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]`: views of one product, perhaps of no heads.
    kv_scales: of pages in e4m3, see `AttentionOptions`. On a GPU it is one kernel, which rounds once.
    """
    if chip_of(q.device).runs_triton:
        from penstock.kernels.rope_triton import rotate_heads

        return rotate_heads(q, k, v, rotation, k_pages, v_pages, slot_mapping, norms, kv_scales)
    if norms is not None and not norms.turned:
        q, k = rms_norm(q, norms.query, norms.eps), rms_norm(k, norms.key, norms.eps)
    q, k = apply_rope(q, rotation), apply_rope(k, rotation)
    if norms is not None and norms.turned:
        q, k = rms_norm(q, norms.query, norms.eps), rms_norm(k, norms.key, norms.eps)
    if norms is not None and norms.values:
        v = rms_norm(v, torch.ones_like(norms.key), norms.eps)
    if k.shape[1]:
        write_kv(k, v, k_pages, v_pages, slot_mapping, kv_scales)
    scale = rotation.query_scale
    return q if scale is None else (q * scale[:, None, None]).to(q.dtype)
