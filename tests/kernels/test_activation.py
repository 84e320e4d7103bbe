from __future__ import annotations

import pytest
import torch

from kernels.activation import silu_mul


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_comes_first(dtype: torch.dtype) -> None:
    gate, up = torch.randn(7, 24).to(dtype), torch.randn(7, 24).to(dtype)
    fused = torch.cat((gate, up), dim=-1)
    before = fused.clone()
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    found = silu_mul(fused)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype), rtol=3 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(fused, before)
