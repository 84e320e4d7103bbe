"""What enters the layers, on one rank's share of it: rows of the vocabulary, and what is added to them.

Encoders add tables of positions and types; Gemma 4 E2B and E4B (2026) give each layer a part of an embedding of its
own, of which the layer adds a product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu

from penstock.engine_core.models.layer_spec import LayerSpec
from penstock.engine_core.models.layers import Destination, Destinations, Linear, Norm, named
from penstock.engine_core.models.parts import Part, Placement, vocabulary, whole
from penstock.engine_core.models.quantized_matrix import Owner
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.linear import Operand, prepared

TABLE, PROJECTION, NORM = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"


class Embedding(Owner):
    """A row for each token of the vocabulary, times a scale. Tied models read logits off them too (`read_off`), so they
    lie row by row on every device.

    A rank has a part of the rows, and zeros for the others' tokens: the sum over the ranks is exact.
    """

    def __init__(self, part: Part, width: int, placement: Placement, scale: float, *, read_off: bool = False) -> None:
        self.part = part
        self.group = placement.group
        self.scale = torch.tensor(scale, dtype=placement.dtype).item()  # as it is multiplied with
        self.weight = placement.matrix(part.share, width)
        self.weight[part.held :].zero_()
        self.operand: Operand = self.weight  # of the products that give logits
        self.read_off = read_off

    def forward(self, ids: Tensor) -> Tensor:
        """`[tokens] -> [tokens, width]`."""
        if self.group.size == 1:
            found = embedding(ids, self.weight)
        else:
            local = ids - self.part.start
            others = (local < 0) | (local >= self.part.share)
            found = embedding(local.masked_fill(others, 0), self.weight)
            found = self.group.all_reduce(found.masked_fill(others[:, None], 0.0))
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
        held, width = self.part.held, self.weight.shape[1]
        weight = self.weight[:held] if held else None
        owner = self if self.read_off else None
        yield "weight", Destination(weight, (self.part.outputs, width), 0, self.part.start, width, owner=owner)


class InputEmbedding:
    """Positions and types of tokens, added to their embedding, and the norm of the sum."""

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        self.spec = spec.body.embedding
        self.hidden = spec.hidden
        rows = self.spec.positions, self.spec.types
        self.positions, self.types = (placement.matrix(count, spec.hidden) if count else None for count in rows)
        self.norm = None if self.spec.norm is None else Norm(spec.hidden, self.spec.norm, placement)

    def forward(self, x: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`. positions: int64 `[tokens]`. types: int32 `[tokens]`, None: zeros."""
        if self.types is not None:
            told = types is not None and len(self.types) > 1
            x = x + (embedding(types, self.types) if types is not None and told else self.types[0])
        if self.positions is not None:
            x = x + embedding(positions + self.spec.first_position, self.positions)
        return x if self.norm is None else self.norm.forward(x)

    def destinations(self) -> Destinations:
        for name, table in (("embed_positions", self.positions), ("embed_types", self.types)):
            if table is not None:
                yield f"{name}.weight", Destination(table, tuple(table.shape), fan_in=self.hidden)
        yield from named(("embed_norm.", self.norm))


class LayerEmbedding:
    """A part for each layer, made of a table of its own and of the embedding."""

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        own = spec.body.embedding
        self.width = spec.blocks[0].layer_input
        rows = vocabulary(TABLE, own.layer_rows, placement)
        self.table = Embedding(rows, own.layer_inputs, placement, self.width**0.5)
        self.projection = Linear((whole(PROJECTION, own.layer_inputs),), spec.hidden, placement, bias=False)
        self.root = spec.hidden**-0.5
        self.norm = Norm(self.width, spec.norm, placement)

    def forward(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """`[tokens], [tokens, hidden] -> [tokens, layers, width]`."""
        projected = self.projection.forward(embedded).mul_(self.root)
        normed = self.norm.forward(projected.view(-1, self.width)).view_as(projected)
        return normed.add_(self.table.forward(ids)).mul_(2**-0.5).view(len(ids), -1, self.width)

    def destinations(self) -> Destinations:
        """By names within the model."""
        return named((f"{TABLE}.", self.table), ("", self.projection), (f"{NORM}.", self.norm))


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
