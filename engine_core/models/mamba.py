"""Mamba-2 (Dao and Gu, 2024), on one rank's share of its groups of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.layers import Destination, Destinations, Linear, Placement, named, spread, whole
from penstock.engine_core.models.mamba_spec import MambaSpec
from penstock.kernels.gated_norm import gated_norm
from penstock.kernels.quantized import RowFormat, Rows
from penstock.kernels.recurrence import state_space
from penstock.kernels.short_convolution import short_convolution
from penstock.kernels.state_gates import time_gates
from penstock.kernels.states import LayerState, StateBatch


class Mamba:
    """A short convolution, the state space, and a gate, before or behind which a norm may stand, group by group."""

    def __init__(self, spec: MambaSpec, norm: NormSpec, hidden: int, placement: Placement) -> None:
        share = spec.share(placement.size)
        assert isinstance(share, MambaSpec)
        self.spec = spec
        self.share = share
        self.rank = placement.rank
        self.eps = norm.eps
        widths = spec.inner, spec.inner, spec.shared, spec.shared, spec.heads
        parts = tuple(spread("in_proj", width, placement) for width in widths)
        self.inputs = Linear(parts, hidden, placement, bias=False, formats=spec.formats)
        self.output = Linear(
            (whole("out_proj", hidden),), spec.inner, placement, bias=False, split_inputs=True, formats=spec.formats
        )
        self.filters = placement.matrix(share.channels, spec.width)
        self.bias = placement.vector(share.channels) if spec.conv_bias else None
        self.norm = placement.vector(share.inner) if spec.norm else None
        held = share.inner, share.inner, share.shared, share.shared, share.heads
        factors = [factor for factor, width in zip(spec.scales, held, strict=False) for _ in range(width)]
        self.scales = torch.tensor(factors, device=placement.device) if factors else None  # fp32
        self.decays, self.biases, self.skips = (
            torch.empty(share.heads, device=placement.device) for _ in range(3)
        )  # fp32

    @property
    def rows(self) -> RowFormat | None:
        """What x may be rounded to before."""
        return self.inputs.rows

    def forward(self, x: Rows, batch: StateBatch, state: LayerState) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum."""
        share = self.share
        assert state.cache is not None, "it has one"
        product = self.inputs.forward(x)
        if self.scales is not None:
            product *= self.scales
        z, mixed, times = torch.split(product, [share.inner, share.channels, share.heads], -1)
        mixed = short_convolution(mixed, self.filters, self.bias, state.ring, batch, tails=state.tails)
        values, b, c = torch.split(mixed, [share.inner, share.shared, share.shared], -1)
        b, c = (part.view(len(part), share.groups, share.state_dim) for part in (b, c))
        gates = time_gates(times, self.decays, self.biases)
        values = values.view(len(values), share.heads, share.head_dim)
        found = state_space(values, b, c, gates, self.skips, state.cache, batch)
        found, z = (part.reshape(len(part), share.groups, -1) for part in (found, z))
        weight = None if self.norm is None else self.norm.view(share.groups, -1)
        gated = gated_norm(found, z, weight, self.eps, gate_first=self.spec.norm == "gated")
        return self.output.forward(gated.flatten(1))

    def destinations(self) -> Destinations:
        """By names within the layer's part."""
        spec, share = self.spec, self.share
        yield from named(("", self.inputs), ("", self.output))
        first, runs = 0, []
        for whole_width, own in ((spec.inner, share.inner), (spec.shared, share.shared), (spec.shared, share.shared)):
            runs.append(slice(first + self.rank * own, first + (self.rank + 1) * own))
            first += whole_width
        filters = self.filters.unsqueeze(1)
        yield "conv1d.weight", Destination(filters, (first, 1, spec.width), fan_in=spec.width, runs=tuple(runs))
        if self.bias is not None:
            yield "conv1d.bias", Destination(self.bias, (first,), runs=tuple(runs))
        for name, held in (("A_log", self.decays), ("dt_bias", self.biases), ("D", self.skips)):
            yield name, Destination(held, (spec.heads,), 0, self.rank * share.heads)
        if self.norm is not None:
            yield "norm.weight", Destination(self.norm, (spec.inner,), 0, self.rank * share.inner)
