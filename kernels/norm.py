"""Root-mean-square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.chip import chip_of


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` over its root mean square along the last axis, times `weight`; computed in fp32, returned in x's type.

    x is `[..., width]`, weight `[width]`.
    """
    if chip_of(x.device).runs_triton and x.dim() == 2:
        from penstock.kernels.norm_triton import norm_rows

        return norm_rows(x, weight, eps)
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, which is the next residual. All are `[tokens, width]`."""
    if chip_of(x.device).runs_triton:
        from penstock.kernels.norm_triton import add_norm_rows

        return add_norm_rows(x, residual, weight, eps)
    total = x + residual
    return rms_norm(total, weight, eps), total
