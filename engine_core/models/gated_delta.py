"""Gated DeltaNet (Yang et al., 2025), on one rank's share of its heads."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.layers import Destination, Destinations, Linear, Part, Placement, named, spread, whole
from penstock.engine_core.models.recurrence_spec import GatedDeltaSpec
from penstock.kernels.gated_norm import gated_norm
from penstock.kernels.quantized import RowFormat, Rows
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


class GatedDeltaNet:
    """A short convolution of queries, keys and values, the gated delta rule, and a norm with a gate."""

    def __init__(self, spec: GatedDeltaSpec, norm: NormSpec, hidden: int, placement: Placement) -> None:
        share = spec.share(placement.size)
        assert isinstance(share, GatedDeltaSpec)
        self.spec = spec
        self.share = share
        self.rank = placement.rank
        self.eps = norm.eps
        self.inputs = Linear(input_parts(spec, placement), hidden, placement, bias=False, formats=spec.formats)
        self.output = Linear(
            (whole("out_proj", hidden),), spec.values, placement, bias=False, split_inputs=True, formats=spec.formats
        )
        self.filters = placement.matrix(share.channels, spec.width)
        self.norm = placement.vector(spec.value_dim)
        self.decays, self.biases = (torch.empty(share.value_heads, device=placement.device) for _ in range(2))  # fp32
        self.unit = UnitHeads(2 * share.key_heads, share.key_dim)

    @property
    def rows(self) -> RowFormat | None:
        """What x may be rounded to before."""
        return self.inputs.rows

    def forward(self, x: Rows, batch: StateBatch, state: LayerState) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum."""
        share = self.share
        assert state.cache is not None, "it has one"
        sizes = [share.channels, share.values, share.value_heads, share.value_heads]
        mixed, z, b, a = torch.split(self.inputs.forward(x), sizes, -1)
        mixed = short_convolution(mixed, self.filters, None, state.ring, batch, unit=self.unit, tails=state.tails)
        q, k, v = torch.split(mixed, [share.keys, share.keys, share.values], -1)
        q, k = (part.view(len(part), share.key_heads, share.key_dim) for part in (q, k))
        gates = delta_gates(a, b, self.decays, self.biases)
        v, z = (part.view(len(part), share.value_heads, share.value_dim) for part in (v, z))
        found = gated_delta(q, k, v, gates, state.cache, batch, share.key_dim**-0.5)
        return self.output.forward(gated_norm(found, z, self.norm, self.eps, gate_first=False).flatten(1))

    def destinations(self) -> Destinations:
        """By names within the layer's part."""
        spec, share = self.spec, self.share
        yield from named(("", self.inputs), ("", self.output))
        first, runs = 0, []
        for whole_width, own in ((spec.keys, share.keys), (spec.keys, share.keys), (spec.values, share.values)):
            runs.append(slice(first + self.rank * own, first + (self.rank + 1) * own))
            first += whole_width
        filters = self.filters.unsqueeze(1)
        yield "conv1d.weight", Destination(filters, (first, 1, spec.width), fan_in=spec.width, runs=tuple(runs))
        for name, held in (("A_log", self.decays), ("dt_bias", self.biases)):
            yield name, Destination(held, (spec.value_heads,), 0, self.rank * share.value_heads)
        yield "norm.weight", Destination(self.norm, (spec.value_dim,))
