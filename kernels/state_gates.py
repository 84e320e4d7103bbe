"""Gates of recurrent layers, from the products of a step's tokens."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from penstock.kernels.chip import chip_of
from penstock.kernels.states import Gates


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Gates:
    """Of Gated DeltaNet: decay = -exp(a_log) softplus(a + dt_bias), weight = sigmoid(b).

    a and b are `[tokens, heads]`, a_log and dt_bias `[heads]`; arithmetic is fp32.
    """
    if chip_of(a.device).runs_triton:
        from penstock.kernels.state_gates_triton import launch_gates

        return launch_gates(a, b, a_log, dt_bias)
    decay = -a_log.float().exp() * softplus(a.float() + dt_bias.float())
    return Gates(decay, b.float().sigmoid())


def time_gates(dt: Tensor, a_log: Tensor, dt_bias: Tensor) -> Gates:
    """Of Mamba-2: weight = softplus(dt + dt_bias), decay = -exp(a_log) weight.

    dt is `[tokens, heads]`, a_log and dt_bias `[heads]`; arithmetic is fp32.
    """
    if chip_of(dt.device).runs_triton:
        from penstock.kernels.state_gates_triton import launch_gates

        return launch_gates(dt, None, a_log, dt_bias)
    weight = softplus(dt.float() + dt_bias.float())
    return Gates(-a_log.float().exp() * weight, weight)
