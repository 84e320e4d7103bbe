"""Root-mean-square normalisation (Zhang and Sennrich, 2019), and LayerNorm (Ba et al., 2016)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.chip import chip_of
from penstock.kernels.quantized import QuantizedRows, RowFormat


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` over its root mean square along the last axis, times `weight`; computed in fp32, returned in x's type.

    x is `[..., width]`, weight `[width]`, of x's type or fp32.
    """
    if chip_of(x.device).runs_triton and x.dim() == 2:
        from penstock.kernels.norm_triton import norm_rows

        return norm_rows(x, weight, eps)
    if weight.dtype != x.dtype:
        return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`x` less its mean, over its standard deviation, times `weight`, plus `bias`: `[tokens, width]`, as above."""
    if chip_of(x.device).runs_triton:
        from penstock.kernels.norm_triton import norm_rows

        return norm_rows(x, weight, eps, bias)
    if weight.dtype != x.dtype:
        return functional.layer_norm(x.float(), weight.shape, weight, bias.float(), eps).to(x.dtype)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The norm of residual + scale * x, and that sum, which is the next residual. All are `[tokens, width]`. With a
    bias it is LayerNorm, else the RMS norm."""
    if chip_of(x.device).runs_triton:
        from penstock.kernels.norm_triton import add_norm_rows

        return add_norm_rows(x, residual, weight, eps, bias, scale)
    total = torch.add(residual, x, alpha=scale)
    return (rms_norm(total, weight, eps) if bias is None else layer_norm(total, weight, bias, eps)), total


def add_norm_rounded(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    rows: RowFormat,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[QuantizedRows, Tensor]:
    """`add_norm` on a GPU, with the norm as the product behind it wants its rows; rounded to x's type before."""
    from penstock.kernels.norm_triton import add_norm_rounded_rows

    return add_norm_rounded_rows(x, residual, weight, eps, rows, bias, scale)
