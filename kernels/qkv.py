"""From the fused projection to what attention reads: queries turned, keys turned and put into the pages with values."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from penstock.kernels.attention import write_kv
from penstock.kernels.norm import rms_norm
from penstock.kernels.rope import Rotation, apply_rope


class HeadNorms(NamedTuple):
    """Norms of each head's query and key, for the families that have them."""

    query: Tensor  # [dim]
    key: Tensor  # [dim]
    eps: float


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: Rotation,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Turned queries `[tokens, heads, dim]`; keys, turned likewise, and values go to their slots of the pages.

    q is `[tokens, heads, dim]`, k and v `[tokens, kv_heads, dim]`: views of one product. Norms come before the turn.
    On a GPU it is one kernel, which rounds once.
    """
    if q.is_cuda:
        from penstock.kernels.qkv_triton import rotate_heads

        return rotate_heads(q, k, v, rotation, k_pages, v_pages, slot_mapping, norms)
    if norms is not None:
        q, k = rms_norm(q, norms.query, norms.eps), rms_norm(k, norms.key, norms.eps)
    write_kv(apply_rope(k, rotation), v, k_pages, v_pages, slot_mapping)
    return apply_rope(q, rotation)
