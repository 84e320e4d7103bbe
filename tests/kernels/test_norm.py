from __future__ import annotations

import pytest
import torch

from penstock.kernels.norm import add_rms_norm, rms_norm
from penstock.kernels.norm_triton import add_norm_rows, norm_rows


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


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (9, 33), (3, 1000)])
def test_kernel_of_sum_and_norm(dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    """The sum is the reference's; the norm is that of the sum as it was rounded, and rounded once itself."""
    x, residual, weight = (torch.randn(size).to(dtype) for size in (shape, shape, shape[1:]))
    normed, total = add_norm_rows(x.to(device), residual.to(device), weight.to(device), 1e-5)
    assert normed.dtype == total.dtype == dtype
    if device == "cpu" and dtype == torch.bfloat16:  # the interpreter rounds to bfloat16 towards zero
        torch.testing.assert_close(total, x + residual, rtol=torch.finfo(dtype).eps, atol=0)
    else:
        assert torch.equal(total.cpu(), x + residual)
    expected = exact(total.cpu(), weight, 1e-5).to(dtype)
    torch.testing.assert_close(normed.cpu(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_kernel_takes_rows_of_a_wider_tensor(device: str) -> None:
    wide, residual, weight = torch.randn(4, 80), torch.randn(4, 32), torch.randn(32)
    x = wide.to(device)[:, 16:48]
    normed, total = add_norm_rows(x, residual.to(device), weight.to(device), 1e-5)
    torch.testing.assert_close(total.cpu(), wide[:, 16:48] + residual)
    torch.testing.assert_close(normed.cpu(), exact(wide[:, 16:48] + residual, weight, 1e-5).float())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [(1, 64), (9, 33), (3, 1000)])
def test_kernel_of_the_norm_alone(shape: tuple[int, int], device: str) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[1])
    found = norm_rows(x.to(device), weight.to(device), 1e-5)
    torch.testing.assert_close(found.cpu(), exact(x, weight, 1e-5).float())


def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    x, residual, weight = (torch.randn(size).to(device) for size in ((40, 300), (40, 300), (300,)))
    together, _ = add_norm_rows(x, residual, weight, 1e-5)
    for row in (0, 39):
        part = slice(row, row + 1)
        assert torch.equal(add_norm_rows(x[part], residual[part], weight, 1e-5)[0], together[part])


@pytest.mark.gpu
def test_a_gpu_gives_the_reference() -> None:
    x, residual, weight = (torch.randn(size).bfloat16() for size in ((700, 4096), (700, 4096), (4096,)))
    normed, total = add_rms_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-5)
    expected, expected_total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total.cpu(), expected_total)
    torch.testing.assert_close(normed.cpu(), expected, rtol=0.02, atol=1e-3)
