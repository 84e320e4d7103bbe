"""Gates of recurrent layers against their definitions in fp64."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.state_gates import delta_gates, time_gates
from penstock.kernels.state_gates_triton import launch_gates

pytestmark = pytest.mark.usefixtures("poisoned")

CLOSE = {"rtol": 2e-5, "atol": 1e-12}


def softplus(x: torch.Tensor) -> torch.Tensor:
    return (1 + x.exp()).log()


def test_delta_gates(device: str) -> None:
    torch.manual_seed(0)
    wide, a_log, bias = 3 * torch.randn(7, 20), torch.randn(6), torch.randn(6)
    a, b = wide[:, 2:8], wide[:, 8:14]
    wide = wide.to(device)
    kernel = launch_gates(wide[:, 2:8], wide[:, 8:14], a_log.to(device), bias.to(device))
    for found in (delta_gates(a, b, a_log, bias), kernel):
        torch.testing.assert_close(
            found.decay.cpu().double(), -a_log.double().exp() * softplus(a.double() + bias), **CLOSE
        )
        torch.testing.assert_close(found.weight.cpu().double(), 1 / (1 + (-b.double()).exp()), **CLOSE)


def test_time_gates(device: str) -> None:
    torch.manual_seed(0)
    dt, a_log, bias = 3 * torch.randn(7, 6), torch.randn(6), torch.randn(6)
    dt[0, 0] = 60.0
    kernel = launch_gates(dt.to(device), None, a_log.to(device), bias.to(device))
    expected = softplus(dt.double() + bias)
    for found in (time_gates(dt, a_log, bias), kernel):
        torch.testing.assert_close(found.weight.cpu().double(), expected, **CLOSE)
        torch.testing.assert_close(found.decay.cpu().double(), -a_log.double().exp() * expected, **CLOSE)
