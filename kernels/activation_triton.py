"""The gate of the MLP in Triton: one pass over the fused product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl

TILE = 1024


def silu_mul_rows(gate_up: Tensor) -> Tensor:
    """`kernels.activation.silu_mul` by the kernel."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    pdl = chip_of(gate_up.device).pdl
    silu_mul_kernel[(tokens, triton.cdiv(width, TILE))](
        gate_up, out, gate_up.stride(0), WIDTH=width, TILE=TILE, PDL=pdl, launch_pdl=pdl
    )
    return out


@triton.jit
def silu_mul_kernel(gate_up, out, stride, WIDTH: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """Part of one row, in fp32, rounded once."""
    begin_pdl(PDL)
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = places < WIDTH
    gate = tl.load(gate_up + row * stride + places, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + places, mask=there, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + places, gated.to(out.dtype.element_ty), mask=there)
