"""From a spec to a model of its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine_core.models import llama, mistral, qwen2, qwen3
from engine_core.models.decoder import Decoder
from engine_core.models.layers import Placement
from engine_core.models.spec import ModelSpec

FAMILIES: Mapping[str, Callable[[ModelSpec, Placement, int], Decoder]] = {
    "llama": llama.build,
    "mistral": mistral.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}


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
    return FAMILIES[spec.family](spec, Placement(dtype, device, rank, size, invariant), length)
