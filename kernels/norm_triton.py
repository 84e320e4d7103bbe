"""The norm of a row, the residual sum before it, and the rounding to 8 bits behind it, in Triton: each element is read
once.

A row's result depends on the row alone: the launch follows from its width, never from how many rows there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.quantize_triton import empty_rows, row_warps, store_rounded
from penstock.kernels.quantized import QuantizedRows, RowFormat, Rows


def norm_rows(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """`kernels.norm.rms_norm`, or with a bias `layer_norm`, of `[tokens, width]` by the kernel, one program a row."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(x, x, weight, bias, normed, normed, eps, None)
    return normed


def add_norm_rows(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`kernels.norm.add_norm` by the kernel, one program a row."""
    normed, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    launch(x, residual, weight, bias, normed, total, eps, scale)
    return normed, total


def add_norm_rounded_rows(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rows: RowFormat, bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[QuantizedRows, Tensor]:  # fmt: skip
    """`kernels.norm.add_norm_rounded` by the kernel."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = empty_rows(len(x), x.shape[1], rows, x)
    launch(x, residual, weight, bias, normed, total, eps, scale, rows)
    return normed, total


def launch(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, normed: Rows, total: Tensor, eps: float,
    scale: float | None, rows: RowFormat | None = None,
) -> None:  # fmt: skip
    """scale: of x in the sum with the residual; None: no sum."""
    tokens, width = x.shape
    assert x.stride(1) == residual.stride(1) == 1
    tile = triton.next_power_of_2(width)
    pdl = chip_of(x.device).pdl
    values, scales = (normed, normed) if isinstance(normed, Tensor) else (normed.values, normed.scales)
    norm_kernel[(tokens,)](
        x, residual, weight, weight if bias is None else bias, values, scales, total, x.stride(0), residual.stride(0),
        eps, SCALE=scale or 1.0, WIDTH=width, TILE=tile, ADD=scale is not None, CENTERED=bias is not None,
        ROUNDED=rows is not None, BLOCK=0 if rows is None else rows.block,
        STATIC=rows is not None and rows.scale is not None, PDL=pdl, num_warps=row_warps(tile), launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def norm_kernel(
    x, residual, weight, bias, normed, scales, total, x_stride, residual_stride, eps,
    SCALE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr, CENTERED: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK: tl.constexpr, STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: a sum is rounded to its type before the norm is taken, as it will be when it is read again."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, TILE)
    there = places < WIDTH
    weights = tl.load(weight + places, mask=there, other=0.0)
    begin_pdl(PDL)
    values = tl.load(x + row * x_stride + places, mask=there, other=0.0).to(tl.float32)
    if ADD:
        if SCALE != 1.0:
            values *= SCALE
        values += tl.load(residual + row * residual_stride + places, mask=there, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + places, rounded, mask=there)
        values = rounded.to(tl.float32)
    if CENTERED:
        values = tl.where(there, values - tl.sum(values, 0) / WIDTH, 0.0)
    gain = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    found = values * gain * weights.to(tl.float32)
    if CENTERED:
        found += tl.load(bias + places, mask=there, other=0.0).to(tl.float32)
    if ROUNDED:
        found = found.to(total.dtype.element_ty).to(tl.float32)
        store_rounded(found, row, tl.num_programs(0), 0, normed, scales, WIDTH, TILE, BLOCK, STATIC)
    else:
        tl.store(normed + row * WIDTH + places, found.to(normed.dtype.element_ty), mask=there)
