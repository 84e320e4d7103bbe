"""Rows of the vocabulary, on one rank's share of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.models.layers import Destination, Destinations, Part, Placement, vocabulary
from penstock.engine_core.models.quantized_matrix import Owner
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.linear import Operand, prepared


class Embedding(Owner):
    """Rows of the vocabulary, times the model's scale; tied models read logits off them too, so they lie row by row on
    every device.

    A rank has a share of the rows, and zeros for the others' tokens: the sum over the ranks is exact.
    """

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        self.part = vocabulary("embed_tokens", spec.vocab_size, placement)
        self.group = placement.group
        self.scale = torch.tensor(spec.body.embedding_scale, dtype=placement.dtype).item()  # as it is multiplied with
        self.weight = torch.empty(self.part.share, spec.hidden, dtype=placement.dtype, device=placement.device)
        self.weight[self.part.held :].zero_()
        self.operand: Operand = self.weight  # of the products that give logits
        self.read_off = self.group.ends and (spec.tied or spec.headless) and not spec.encoder

    def forward(self, ids: Tensor) -> Tensor:
        """`[tokens] -> [tokens, hidden]`."""
        found = look_up(ids, self.weight, self.part, self.group)
        return found if self.scale == 1.0 else found * self.scale

    def pack(self) -> None:
        """Add a copy for logits, laid out as products on a CPU want it."""
        self.operand = prepared(self.operand, self.weight.dtype)

    def reopen(self) -> None:
        """Let go of the copy, which `pack` makes of what is filled then."""
        self.operand = self.weight

    @property
    def copied_bytes(self) -> int:
        return 0 if self.operand is self.weight else self.weight.nbytes

    def destinations(self) -> Destinations:
        held, hidden = self.part.held, self.weight.shape[1]
        weight = self.weight[:held] if held else None
        owner = self if self.read_off else None
        yield "weight", Destination(weight, (self.part.outputs, hidden), 0, self.part.start, hidden, owner=owner)


def look_up(ids: Tensor, weight: Tensor, part: Part, group: Group) -> Tensor:
    """Rows of a table of which each rank has a part."""
    if group.size == 1:
        return embedding(ids, weight)
    local = ids - part.start
    others = (local < 0) | (local >= part.share)
    found = embedding(local.masked_fill(others, 0), weight)
    return group.all_reduce(found.masked_fill(others[:, None], 0.0))
