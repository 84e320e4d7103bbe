"""Gated DeltaNet (Yang et al., 2025), on one rank's share of its heads."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.layers import Destination, Destinations
from penstock.engine_core.models.parts import Part, Placement, spread
from penstock.engine_core.models.recurrence import Recurrence
from penstock.engine_core.models.recurrence_spec import GatedDeltaSpec
from penstock.kernels.gated_norm import gated_norm
from penstock.kernels.quantized import Rows
from penstock.kernels.recurrence import gated_delta
from penstock.kernels.short_convolution import short_convolution
from penstock.kernels.state_gates import delta_gates
from penstock.kernels.states import LayerState, StateBatch, UnitHeads


def input_parts(spec: GatedDeltaSpec, placement: Placement) -> tuple[Part, ...]:
    """This rank's share of queries, keys, values, gates, betas and decays."""
    if not spec.fused:
        widths = {"in_proj_qkv": (spec.keys, spec.keys, spec.values), "in_proj_z": (spec.values,)}
        widths |= {"in_proj_b": (spec.value_heads,), "in_proj_a": (spec.value_heads,)}
        return tuple(spread(name, width, placement) for name, found in widths.items() for width in found)
    group = spec.value_heads // spec.key_heads
    parts = []
    for name, dims in (
        ("in_proj_qkvz", (spec.key_dim, spec.key_dim, group * spec.value_dim, group * spec.value_dim)),
        ("in_proj_ba", (group, group)),
    ):
        for at, dim in enumerate(dims):
            outputs, share = spec.key_heads * dim, placement.share(spec.key_heads) * dim
            parts.append(Part(name, outputs, share, placement.rank * share, (), dim, sum(dims), sum(dims[:at])))
    return tuple(parts)


class GatedDeltaNet(Recurrence[GatedDeltaSpec]):
    """A short convolution of queries, keys and values, the gated delta rule, and a norm with a gate."""

    def __init__(self, spec: GatedDeltaSpec, norm: NormSpec, hidden: int, placement: Placement) -> None:
        super().__init__(spec, input_parts(spec, placement), hidden, placement)
        self.eps = norm.eps
        self.norm = placement.vector(spec.value_dim)
        heads = self.share.value_heads
        self.decays, self.biases = (torch.empty(heads, device=placement.device) for _ in range(2))  # fp32
        self.unit = UnitHeads(2 * self.share.key_heads, self.share.key_dim)

    def forward(self, x: Rows, batch: StateBatch, state: LayerState) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum."""
        share = self.share
        assert state.cache is not None, "it has one"
        sizes = [share.channels, share.values, share.value_heads, share.value_heads]
        mixed, z, b, a = self.inputs.split(x, sizes)
        mixed = short_convolution(mixed, self.filters, None, state.ring, batch, unit=self.unit, tails=state.tails)
        q, k, v = torch.split(mixed, [share.keys, share.keys, share.values], -1)
        q, k = (part.view(len(part), share.key_heads, share.key_dim) for part in (q, k))
        gates = delta_gates(a, b, self.decays, self.biases)
        v, z = (part.view(len(part), share.value_heads, share.value_dim) for part in (v, z))
        found = gated_delta(q, k, v, gates, state.cache, batch, share.key_dim**-0.5)
        return self.output.forward(gated_norm(found, z, self.norm, self.eps, gate_first=False).flatten(1))

    def destinations(self) -> Destinations:
        """By names within the layer's part."""
        yield from super().destinations()
        yield from self.shared(("A_log", self.decays), ("dt_bias", self.biases))
        yield "norm.weight", Destination(self.norm, (self.spec.value_dim,))
