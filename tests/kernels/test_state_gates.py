"""Gates of recurrent layers against their definitions in fp64."""

from __future__ import annotations

import torch

from penstock.kernels.state_gates import delta_gates, time_gates


def softplus(x: torch.Tensor) -> torch.Tensor:
    return (1 + x.exp()).log()


def test_delta_gates() -> None:
    torch.manual_seed(0)
    wide, a_log, bias = 3 * torch.randn(7, 20), torch.randn(6), torch.randn(6)
    a, b = wide[:, 2:8], wide[:, 8:14]
    found = delta_gates(a, b, a_log, bias)
    torch.testing.assert_close(found.decay.double(), -a_log.double().exp() * softplus(a.double() + bias))
    torch.testing.assert_close(found.weight.double(), 1 / (1 + (-b.double()).exp()))


def test_time_steps_are_bounded() -> None:
    torch.manual_seed(0)
    dt, a_log, bias = 3 * torch.randn(7, 6), torch.randn(6), torch.randn(6)
    dt[0, 0] = 60.0
    for least, most in ((0.0, float("inf")), (0.5, 1.5)):
        found = time_gates(dt, a_log, bias, least, most)
        expected = softplus(dt.double() + bias).clamp(least, most)
        torch.testing.assert_close(found.weight.double(), expected)
        torch.testing.assert_close(found.decay.double(), -a_log.double().exp() * expected)
