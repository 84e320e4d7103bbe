"""Root-mean-square normalisation with a gate, behind recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from penstock.kernels.chip import chip_of


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, gate_first: bool) -> Tensor:
    """`x  # [tokens, groups, size]` over its root mean square along the last axis, times `weight` and silu(gate).

    gate_first: x is multiplied by silu(gate) before it is normalised (Mamba-2), else behind that (Gated DeltaNet). The
    gate has x's shape, weight is `[size]` for all groups or `[groups, size]`; without one x is gated alone. Computed in
    fp32, returned in x's type and contiguous.
    """
    if chip_of(x.device).runs_triton:
        from penstock.kernels.gated_norm_triton import gated_norm_rows

        return gated_norm_rows(x, gate, weight, eps, gate_first=gate_first)
    found, gain = x.float(), silu(gate.float())
    if weight is None:
        return (found * gain).to(x.dtype)
    if gate_first:
        found, gain = found * gain, torch.ones(())
    found = found * (found.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (found * weight.float() * gain).to(x.dtype)
