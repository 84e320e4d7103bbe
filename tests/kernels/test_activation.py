from __future__ import annotations

import math

import pytest
import torch

from penstock.kernels.activation import KINDS, activate
from penstock.kernels.activation_triton import TILE, activate_rows
from penstock.kernels.records import Activation

CLAMPED = Activation("silu", 1.702, 7.0, 1.0)  # gpt-oss's
ACTIVATIONS = (*map(Activation, KINDS), CLAMPED)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_comes_first(dtype: torch.dtype) -> None:
    gate, up = torch.randn(7, 24).to(dtype), torch.randn(7, 24).to(dtype)
    fused = torch.cat((gate, up), dim=-1)
    before = fused.clone()
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    found = activate(fused)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype), rtol=3 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(fused, before)


def exact(x: torch.Tensor, activation: Activation, up: torch.Tensor | None = None) -> torch.Tensor:
    """In fp64, from the definition."""
    x = x.double()
    if up is not None:
        limit = activation.limit or torch.inf
        return exact(x.clamp(max=limit), activation) * (up.double().clamp(-limit, limit) + activation.shift)
    if activation.kind == "silu":
        return x / (1 + (-x * activation.slope).exp())
    if activation.kind == "relu2":
        return torch.where(x > 0, x * x, 0)
    if activation.kind == "gelu":
        return x * torch.special.ndtr(x)
    return x / 2 * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_without_a_gate(activation: Activation) -> None:
    x = torch.randn(7, 24) * 4
    before = x.clone()
    torch.testing.assert_close(activate(x, activation, gated=False), exact(x, activation).float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


def test_a_gate_is_clamped_from_above_and_the_other_half_on_both_sides() -> None:
    gate, up = torch.tensor([[-9.0, 9.0, 3.0, 3.0]]), torch.tensor([[2.0, 2.0, -9.0, 9.0]])
    values = (-9 / (1 + math.exp(1.702 * 9)) * 3, 7 / (1 + math.exp(-1.702 * 7)) * 3)
    three = 3 / (1 + math.exp(-1.702 * 3))
    expected = torch.tensor([[*values, three * -6, three * 8]])
    torch.testing.assert_close(activate(torch.cat((gate, up), dim=1), CLAMPED), expected)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [24, TILE, TILE + 40])
def test_kernel(dtype: torch.dtype, width: int, activation: Activation, gated: bool, device: str) -> None:
    size = 2 * width if gated else width
    wide = (torch.randn(3, size + 8) * 4).to(dtype)
    expected = exact(wide[:, :width], activation, wide[:, width:size] if gated else None)
    found = activate_rows(wide.to(device)[:, :size], activation, gated=gated)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), expected.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_nan_stays_nan(activation: Activation, device: str) -> None:
    product = torch.ones(1, 16)
    product[0, 3], product[0, 12] = torch.nan, torch.nan
    for found in (activate(product, activation), activate_rows(product.to(device), activation, gated=True).cpu()):
        assert found.isnan().nonzero()[:, 1].tolist() == [3, 4]


@pytest.mark.gpu
def test_a_gpu_gives_the_reference() -> None:
    fused = torch.randn(700, 2 * 14336).bfloat16()
    torch.testing.assert_close(activate(fused.cuda()).cpu(), activate(fused), rtol=0.02, atol=1e-3)
