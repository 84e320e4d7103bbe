"""Products with quantized weights on a GPU: each layout's kernels, and the reference where it has none."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.activation import silu_mul
from penstock.kernels.quantized import QuantizedWeight, multiply_reference


def multiply_quantized(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, gated: bool = False, invariant: bool = False
) -> Tensor:
    """`kernels.linear.linear`, or `gated_linear`, with a quantized weight: `[rows, inputs] -> [rows, outputs]`."""
    found = multiply_reference(x, weight, bias)
    return silu_mul(found) if gated else found
