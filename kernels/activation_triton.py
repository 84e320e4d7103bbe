"""Activations of the MLP in Triton: one pass over the product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl

TILE = 1024


def activate_rows(product: Tensor, kind: str, *, gated: bool) -> Tensor:
    """`kernels.activation.activate` by the kernel."""
    tokens, width = product.shape[0], product.shape[1] // (2 if gated else 1)
    assert product.stride(1) == 1
    out = torch.empty(tokens, width, dtype=product.dtype, device=product.device)
    pdl = chip_of(product.device).pdl
    activation_kernel[(tokens, triton.cdiv(width, TILE))](
        product, out, product.stride(0), WIDTH=width, TILE=TILE, SILU=kind == "silu", GATED=gated, PDL=pdl,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def activation_kernel(
    product, out, stride, WIDTH: tl.constexpr, TILE: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Part of one row, in fp32, rounded once."""
    begin_pdl(PDL)
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = places < WIDTH
    gate = tl.load(product + row * stride + places, mask=there, other=0.0).to(tl.float32)
    # 0.5 (1 + tanh z) is the sigmoid of 2 z, where the approximation of GELU has z = sqrt(2 / pi) (x + 0.044715 x^3).
    slope = gate if SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    found = gate / (1.0 + tl.exp(-tl.maximum(slope, -80.0)))  # beyond it nothing is left
    if GATED:
        found *= tl.load(product + row * stride + WIDTH + places, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + places, found.to(out.dtype.element_ty), mask=there)
