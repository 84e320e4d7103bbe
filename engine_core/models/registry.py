"""From a spec to a model."""

from __future__ import annotations

import torch

from engine_core.models.attention import SelfAttention
from engine_core.models.decoder import Decoder
from engine_core.models.layers import Placement
from engine_core.models.spec import ModelSpec


def build(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
    *,
    rank: int = 0,
    size: int = 1,
    invariant: bool = False,
) -> Decoder:
    """A model without its weights (`loading.load` fills them), for sequences of up to `length` tokens.

    With `size` > 1 it holds the share of `rank`: heads, MLP width; the products that end a block are then partial sums.
    With `invariant` a token's logits have the same bits whatever the batch, the chunk and the cache; it needs a GPU.
    """
    placement = Placement(dtype, device, rank, size, invariant)
    attentions = [SelfAttention(spec, layer, placement) for layer in range(spec.layers)]
    return Decoder(spec, attentions, placement, length)
