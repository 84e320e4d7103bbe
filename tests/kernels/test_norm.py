from __future__ import annotations

import pytest
import torch

from kernels.norm import add_rms_norm, rms_norm


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (9, 33), (5, 3, 16)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact(x, weight, 1e-6).to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_eps_bounds_the_gain_of_small_rows() -> None:
    x = torch.full((1, 8), 1e-4)
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-2), exact(x, torch.ones(8), 1e-2).float())


def test_sum_is_the_next_residual() -> None:
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
    before = residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(total, x + before)
    torch.testing.assert_close(normed, exact(x + before, weight, 1e-5).float())
    assert torch.equal(residual, before)
