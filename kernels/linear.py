"""Products with a weight `[outputs, inputs]`, and the gate of the MLP fused to one.

On a GPU sizes alone choose between cuBLAS and the kernels of `kernels.linear_triton`, so a captured graph keeps its
form. `invariant` asks for products whose rows do not depend on how many other rows there are, to the last bit.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation import silu_mul
from penstock.kernels.chip import chip_of


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """`x @ weight.T + bias`: `[rows, inputs] -> [rows, outputs]`, summed in fp32, returned in x's type."""
    if chip_of(x.device).runs_triton:
        from penstock.kernels.linear_triton import multiply

        return multiply(x, weight, bias, gated=False, invariant=invariant)
    return functional.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """silu(gate) * up of a fused weight `[2 * width, inputs]`, gate first: `[rows, inputs] -> [rows, width]`."""
    if chip_of(x.device).runs_triton:
        from penstock.kernels.linear_triton import multiply

        return multiply(x, weight, bias, gated=True, invariant=invariant)
    return silu_mul(functional.linear(x, weight, bias))
