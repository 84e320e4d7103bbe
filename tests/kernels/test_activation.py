from __future__ import annotations

import pytest
import torch

from penstock.kernels.activation import KINDS, activate, silu_mul
from penstock.kernels.activation_triton import TILE, activate_rows


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


def exact(x: torch.Tensor, kind: str) -> torch.Tensor:
    """In fp64, from the definition."""
    x = x.double()
    if kind == "silu":
        return x / (1 + (-x).exp())
    return x / 2 * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gate(kind: str) -> None:
    x = torch.randn(7, 24) * 4
    before = x.clone()
    torch.testing.assert_close(activate(x, kind, gated=False), exact(x, kind).float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [24, TILE, TILE + 40])
def test_kernel(dtype: torch.dtype, width: int, kind: str, gated: bool, device: str) -> None:
    size = 2 * width if gated else width
    wide = (torch.randn(3, size + 8) * 4).to(dtype)
    expected = exact(wide[:, :width], kind)
    if gated:
        expected *= wide[:, width:size].double()
    found = activate_rows(wide.to(device)[:, :size], kind, gated=gated)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), expected.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.gpu
def test_a_gpu_gives_the_reference() -> None:
    fused = torch.randn(700, 2 * 14336).bfloat16()
    torch.testing.assert_close(silu_mul(fused.cuda()).cpu(), silu_mul(fused), rtol=0.02, atol=1e-3)
