"""Activations of the MLP, most of them gates (GLU variants: Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from penstock.kernels.chip import chip_of
from penstock.kernels.quantized import QuantizedRows, RowFormat
from penstock.kernels.records import Activation

KINDS = ("silu", "gelu_tanh", "gelu", "relu2")
SILU = Activation()


def activate_rounded(product: Tensor, rows: RowFormat) -> QuantizedRows:
    """SiLU's gate of a fused product on a GPU, as the product behind it wants its rows; rounded to its type before."""
    from penstock.kernels.activation_triton import gate_rows

    return gate_rows(product, SILU, rows)


def activate(product: Tensor, activation: Activation = SILU, *, gated: bool = True) -> Tensor:
    """activation(gate) * up of a fused product `[tokens, 2 * width]`, gate first: `[tokens, width]`. Without a gate the
    activation of `[tokens, width]`.

    gelu_tanh is the approximation of Hendrycks and Gimpel, 2016; relu2 squares (Primer: So et al., 2021); a slope of
    1.702, a limit and a shift of 1 are gpt-oss's.
    """
    if chip_of(product.device).runs_triton:
        from penstock.kernels.activation_triton import activate_rows

        return activate_rows(product, activation, gated=gated)
    if not gated:
        return activated(product, activation)
    gate, up = product.chunk(2, dim=-1)
    if activation.limit:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return activated(gate, activation).mul_(up + activation.shift if activation.shift else up)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """The function alone, in memory of its own."""
    if activation.kind == "relu2":
        return functional.relu(x).square_()
    if activation.kind != "silu":
        return functional.gelu(x, approximate="tanh" if activation.kind == "gelu_tanh" else "none")
    return functional.silu(x) if activation.slope == 1.0 else (x * activation.slope).sigmoid_().mul_(x)
