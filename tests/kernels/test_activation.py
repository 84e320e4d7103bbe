from __future__ import annotations

import pytest
import torch

from penstock.kernels.activation import silu_mul
from penstock.kernels.activation_triton import TILE, silu_mul_rows


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


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [24, TILE, TILE + 40])
def test_kernel(dtype: torch.dtype, width: int, device: str) -> None:
    wide = (torch.randn(3, 2 * width + 8) * 4).to(dtype)
    fused = wide[:, : 2 * width]
    gate, up = fused.double().chunk(2, dim=-1)
    found = silu_mul_rows(wide.to(device)[:, : 2 * width])
    assert found.dtype == dtype
    expected = (gate / (1 + (-gate).exp()) * up).to(dtype)
    torch.testing.assert_close(found.cpu(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.gpu
def test_a_gpu_gives_the_reference() -> None:
    fused = torch.randn(700, 2 * 14336).bfloat16()
    torch.testing.assert_close(silu_mul(fused.cuda()).cpu(), silu_mul(fused), rtol=0.02, atol=1e-3)
