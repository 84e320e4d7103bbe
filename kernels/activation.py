"""Activations of the MLP, most of them gates (GLU variants: Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from penstock.kernels.chip import chip_of

KINDS = ("silu", "gelu_tanh")


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused product `[tokens, 2 * width]`, gate first. Returns `[tokens, width]`."""
    return activate(gate_up, "silu")


def activate(product: Tensor, kind: str, *, gated: bool = True) -> Tensor:
    """activation(gate) * up of a fused product `[tokens, 2 * width]`, gate first: `[tokens, width]`. Without a gate the
    activation of `[tokens, width]`. kind: of KINDS; gelu_tanh is the approximation of Hendrycks and Gimpel, 2016.
    """
    if chip_of(product.device).runs_triton:
        from penstock.kernels.activation_triton import activate_rows

        return activate_rows(product, kind, gated=gated)
    gate = product.chunk(2, dim=-1)[0] if gated else product
    found = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")
    return found.mul_(product[..., gate.shape[-1] :]) if gated else found
