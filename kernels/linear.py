"""Products with a weight `[outputs, inputs]`, and the gate of the MLP fused to one.

On a GPU sizes alone choose between cuBLAS and the kernels of `kernels.linear_triton`, so a captured graph keeps its
form. `invariant` asks for products whose rows do not depend on how many other rows there are, to the last bit.

On a CPU oneDNN multiplies, by weights in a layout of its own (`packed`). Its products of few rows take a half to a
seventh of the time that MKL's do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation import silu_mul
from penstock.kernels.chip import chip_of


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """`x @ weight.T + bias`: `[rows, inputs] -> [rows, outputs]`, summed in fp32, returned in x's type."""
    if chip_of(x.device).runs_triton:
        from penstock.kernels.linear_triton import multiply

        return multiply(x, weight, bias, gated=False, invariant=invariant)
    return host_linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """silu(gate) * up of a fused weight `[2 * width, inputs]`, gate first: `[rows, inputs] -> [rows, width]`."""
    if chip_of(x.device).runs_triton:
        from penstock.kernels.linear_triton import multiply

        return multiply(x, weight, bias, gated=True, invariant=invariant)
    return silu_mul(host_linear(x, weight, bias))


def host_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product on a CPU; the weight may be packed."""
    if weight.is_mkldnn:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return found
    return functional.linear(x, weight, bias)


def packed(weight: Tensor) -> Tensor:
    """The weight as oneDNN multiplies by it, in new memory; itself on a GPU, and where oneDNN lacks its type here."""
    if chip_of(weight.device).vendor != "cpu" or not torch._C._has_mkldnn:
        return weight
    if weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and has_bfloat16()):
        found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return found
    return weight


def has_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 on this processor, in hardware or not."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
