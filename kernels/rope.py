"""Rotary position embedding (Su et al., 2021) in the half-split layout: element i pairs with element i + dim / 2."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines of one step's tokens, made once and used by every layer."""

    cos: Tensor  # [tokens, 1, dim], fp32
    sin: Tensor  # [tokens, 1, dim], fp32; the first half is negated


def gather_rotation(table: Tensor, positions: Tensor) -> Rotation:
    """Rows of the model's table `[length, dim]` (cosines of dim / 2 frequencies, then their sines) at `[tokens]`."""
    if table.is_cuda:
        from penstock.kernels.rope_triton import rotation_rows

        return rotation_rows(table, positions)
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, dim / 2]
    return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """`x  # [tokens, heads, dim]` turned by its tokens' angles; computed in fp32, returned in x's type."""
    half = x.shape[-1] // 2
    turned = (x * rotation.cos).addcmul_(x.roll(half, dims=-1), rotation.sin)
    return turned.to(x.dtype)
