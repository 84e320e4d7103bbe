"""Mamba-2 (Dao and Gu, 2024), on one rank's share of its groups of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine_core.models.layer_spec import NormSpec
from penstock.engine_core.models.layers import Destinations
from penstock.engine_core.models.parts import Placement, spread
from penstock.engine_core.models.recurrence import Recurrence
from penstock.engine_core.models.recurrence_spec import MambaSpec
from penstock.kernels.gated_norm import gated_norm
from penstock.kernels.quantized import Rows
from penstock.kernels.recurrence import state_space
from penstock.kernels.short_convolution import short_convolution
from penstock.kernels.state_gates import time_gates
from penstock.kernels.states import LayerState, StateBatch


class Mamba(Recurrence[MambaSpec]):
    """A short convolution, the state space, and a gate, before or behind which a norm may stand, group by group."""

    def __init__(self, spec: MambaSpec, norm: NormSpec, hidden: int, placement: Placement) -> None:
        widths = spec.inner, *spec.mixed, spec.heads
        parts = tuple(spread("in_proj", width, placement) for width in widths)
        super().__init__(spec, parts, hidden, placement, conv_bias=spec.conv_bias)
        self.eps = norm.eps
        self.norm = placement.vector(self.share.inner) if spec.norm else None
        factors = [factor for factor, part in zip(spec.scales, parts, strict=False) for _ in range(part.share)]
        self.scales = torch.tensor(factors, device=placement.device) if factors else None  # fp32
        self.decays, self.biases, self.skips = (
            torch.empty(self.share.heads, device=placement.device) for _ in range(3)
        )  # fp32

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
        yield from super().destinations()
        yield from self.shared(("A_log", self.decays), ("dt_bias", self.biases), ("D", self.skips))
        if self.norm is not None:
            yield from self.shared(("norm.weight", self.norm))
