"""Embeddings of tokens by layer: each layer adds a product of its own part of them (Gemma 4 E2B and E4B, 2026)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from penstock.engine_core.models.embedding import look_up
from penstock.engine_core.models.layer_spec import LayerSpec
from penstock.engine_core.models.layers import (
    Destination,
    Destinations,
    Linear,
    Norm,
    Placement,
    named,
    vocabulary,
    whole,
)
from penstock.engine_core.models.spec import ModelSpec

TABLE, PROJECTION, NORM = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"


class LayerEmbedding:
    """A part for each layer, made of a table of its own and of the embedding. A rank has some rows of the table."""

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        own = spec.body.embedding
        self.width = spec.blocks[0].layer_input
        self.group = placement.group
        self.part = vocabulary(TABLE, own.layer_rows, placement)
        self.table = placement.matrix(self.part.share, own.layer_inputs)
        self.table[self.part.held :].zero_()
        self.scale = torch.tensor(self.width**0.5, dtype=placement.dtype).item()  # as it is multiplied with
        self.projection = Linear((whole(PROJECTION, own.layer_inputs),), spec.hidden, placement, bias=False)
        self.root = spec.hidden**-0.5
        self.norm = Norm(self.width, spec.norm, placement)

    def forward(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """`[tokens], [tokens, hidden] -> [tokens, layers, width]`."""
        projected = self.projection.forward(embedded).mul_(self.root)
        normed = self.norm.forward(projected.view(-1, self.width)).view_as(projected)
        found = look_up(ids, self.table, self.part, self.group) * self.scale
        return normed.add_(found).mul_(2**-0.5).view(len(ids), -1, self.width)

    def destinations(self) -> Destinations:
        """By names within the model."""
        held, shape = self.part.held, (self.part.outputs, self.table.shape[1])
        yield f"{TABLE}.weight", Destination(self.table[:held] if held else None, shape, 0, self.part.start, shape[1])
        yield from named(("", self.projection), (f"{NORM}.", self.norm))


class LayerInput:
    """What a layer adds of its part."""

    def __init__(self, layer: LayerSpec, hidden: int, placement: Placement) -> None:
        width = layer.layer_input
        self.gate = Linear((whole("per_layer_input_gate", width),), hidden, placement, bias=False)
        self.projection = Linear((whole("per_layer_projection", hidden),), width, placement, bias=False)
        self.norm = Norm(hidden, layer.norm, placement)

    def forward(self, stream: Tensor, part: Tensor) -> Tensor:
        """To `stream  # [tokens, hidden]`, by `part  # [tokens, width]`."""
        gated = gelu(self.gate.forward(stream), approximate="tanh") * part
        return stream.add_(self.norm.forward(self.projection.forward(gated)))

    def destinations(self) -> Destinations:
        """By names within the layer."""
        return named(("", self.gate), ("", self.projection), ("post_per_layer_input_norm.", self.norm))
