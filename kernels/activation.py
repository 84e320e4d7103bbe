"""The gate of the MLP (SwiGLU: Shazeer, 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.chip import chip_of


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused product `[tokens, 2 * width]`, gate first. Returns `[tokens, width]`."""
    if chip_of(gate_up.device).runs_triton:
        from penstock.kernels.activation_triton import silu_mul_rows

        return silu_mul_rows(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
