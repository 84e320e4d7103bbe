"""The residual sum and its norm in Triton: each element is read once and written twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_norm_rows(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`kernels.norm.add_rms_norm` by the kernel, one program a row."""
    tokens, width = x.shape
    assert x.stride(1) == residual.stride(1) == 1
    normed, total = (torch.empty(tokens, width, dtype=x.dtype, device=x.device) for _ in range(2))
    tile = triton.next_power_of_2(width)
    add_norm_kernel[(tokens,)](
        x, residual, weight, normed, total, x.stride(0), residual.stride(0), eps,
        WIDTH=width, TILE=tile, num_warps=min(16, max(4, tile // 512)),
    )  # fmt: skip
    return normed, total


@triton.jit
def add_norm_kernel(
    x, residual, weight, normed, total, x_stride, residual_stride, eps, WIDTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One row: the sum is rounded to its type before the norm is taken, as it will be when it is read again."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, TILE)
    there = places < WIDTH
    left = tl.load(x + row * x_stride + places, mask=there, other=0.0).to(tl.float32)
    right = tl.load(residual + row * residual_stride + places, mask=there, other=0.0).to(tl.float32)
    rounded = (left + right).to(total.dtype.element_ty)
    tl.store(total + row * WIDTH + places, rounded, mask=there)
    values = rounded.to(tl.float32)
    gain = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    weights = tl.load(weight + places, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + row * WIDTH + places, (values * gain * weights).to(normed.dtype.element_ty), mask=there)
