"""From a spec to a model."""

from __future__ import annotations

import torch

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import DraftSpec
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.sharding import stage_layers
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.vision.tower import Tower, tower


def build(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
    *,
    group: Group = ALONE,
    invariant: bool = False,
    expert_parallel: bool = False,
    adapters: bool = False,
    draft: DraftSpec | None = None,
) -> Decoder:
    """A model without its weights (`loading.load` fills them), for sequences of up to `length` tokens.

    In a group it holds the share of a rank: heads, MLP width, vocabulary, if `expert_parallel` whole experts instead of
    the experts' width. `draft` is what will draft for it, which a last stage leaves room for. With `adapters` all that
    they may add to has a product of its own.
    With `invariant` a token's logits have the same bits whatever the batch, the chunk and the cache; it needs a GPU.
    """
    placement = Placement(dtype, device, group, invariant, expert_parallel, adapters)
    layers = stage_layers(spec, group.stages, draft, group.size)[group.stage]
    spec = spec.part(layers)
    return Decoder(spec, placement, length, layers.start, head=draft is not None and draft.head is not None)


def build_tower(model: Decoder) -> Tower | None:
    """The vision encoder of a model without its weights, whole on each rank of the first stage; None: on another stage,
    and where no images are seen."""
    if model.spec.vision is None or not model.placement.group.begins:
        return None
    return tower(model.spec.vision, model.placement)
