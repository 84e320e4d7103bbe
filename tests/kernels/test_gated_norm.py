"""Gated norms against their definition in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from penstock.kernels.gated_norm import gated_norm
from penstock.kernels.gated_norm_triton import gated_norm_rows

EPS = 1e-5


def exact(x: Tensor, gate: Tensor, weight: Tensor | None, *, gate_first: bool) -> Tensor:
    x, gain = x.double(), silu(gate.double())
    if weight is None:
        return x * gain
    if gate_first:
        x, gain = x * gain, torch.ones(())
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double() * gain


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("weights", ["groups", "shared", "none"])
def test_definition(weights: str, gate_first: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x, wide = torch.randn(5, 3, 24).to(dtype), torch.randn(5, 100).to(dtype)
    gate = wide[:, 10:82].unflatten(1, (3, 24))
    weight = {"groups": torch.randn(3, 24), "shared": torch.randn(24), "none": None}[weights]
    found = gated_norm(x, gate, weight, EPS, gate_first=gate_first)
    expected = exact(x, gate, weight, gate_first=gate_first).to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    there = [None if part is None else part.to(device) for part in (x, gate, weight)]
    assert there[0] is not None
    assert there[1] is not None
    kernel = gated_norm_rows(there[0], there[1], there[2], EPS, gate_first=gate_first)
    torch.testing.assert_close(kernel.cpu(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_token_does_not_depend_on_its_neighbours(device: str) -> None:
    torch.manual_seed(1)
    x, gate, weight = (torch.randn(size).to(device) for size in ((9, 40, 32), (9, 40, 32), (32,)))
    together = gated_norm_rows(x, gate, weight, EPS, gate_first=False)
    assert torch.equal(gated_norm_rows(x[4:5], gate[4:5], weight, EPS, gate_first=False), together[4:5])
