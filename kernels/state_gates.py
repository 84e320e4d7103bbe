"""Gates of recurrent layers, from the products of a step's tokens."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from penstock.kernels.states import Gates


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Gates:
    """Of Gated DeltaNet: decay = -exp(a_log) softplus(a + dt_bias), weight = sigmoid(b).

    a and b are `[tokens, heads]`, a_log and dt_bias `[heads]`; arithmetic is fp32.
    """
    decay = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return Gates(decay, b.float().sigmoid())


def time_gates(dt: Tensor, a_log: Tensor, dt_bias: Tensor, least: float = 0.0, most: float = float("inf")) -> Gates:
    """Of Mamba-2: weight = softplus(dt + dt_bias) within least .. most, decay = -exp(a_log) weight.

    dt is `[tokens, heads]`, a_log and dt_bias `[heads]`; arithmetic is fp32.
    """
    weight = softplus(dt.float() + dt_bias.float()).clamp(least, most)
    return Gates(-a_log.float().exp() * weight, weight)
