from __future__ import annotations

import pytest
import torch

from penstock.kernels.norm import add_norm, layer_norm, rms_norm
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
    normed, total = add_norm(x, residual, weight, 1e-5)
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


def centered(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm in fp64."""
    return torch.nn.functional.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), eps)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (9, 33), (3, 1000)])
def test_layer_norm_and_a_scaled_sum(dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    """The plain form and the kernel; their residual's share of rounding is the type's."""
    x, residual, weight, bias = (torch.randn(size).to(dtype) for size in (shape, shape, shape[1:], shape[1:]))
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    alone = centered(x, weight, bias, 1e-5).to(dtype)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), alone, **close)
    on = [tensor.to(device) for tensor in (x, residual, weight, bias)]
    torch.testing.assert_close(norm_rows(on[0], on[2], 1e-5, on[3]).cpu(), alone, **close)
    summed = (residual.double() + 0.22 * x.double()).to(dtype)
    for normed, total in (add_norm(x, residual, weight, 1e-5, bias, 0.22), add_norm_rows(*on[:3], 1e-5, on[3], 0.22)):
        torch.testing.assert_close(total.cpu(), summed, **close)
        torch.testing.assert_close(normed.cpu(), centered(total.cpu(), weight, bias, 1e-5).to(dtype), **close)


def test_a_weight_of_single_precision(device: str) -> None:
    """One plus a small number stays what it is."""
    x, weight = torch.randn(5, 48).bfloat16(), 1 + torch.randn(48) * 1e-3
    expected = exact(x, weight, 1e-6).bfloat16()
    close = {"rtol": 2 * torch.finfo(torch.bfloat16).eps, "atol": 0.0}
    assert rms_norm(x, weight, 1e-6).dtype == torch.bfloat16
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected, **close)
    torch.testing.assert_close(norm_rows(x.to(device), weight.to(device), 1e-6).cpu(), expected, **close)


def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    x, residual, weight = (torch.randn(size).to(device) for size in ((40, 300), (40, 300), (300,)))
    together, _ = add_norm_rows(x, residual, weight, 1e-5)
    for row in (0, 39):
        part = slice(row, row + 1)
        assert torch.equal(add_norm_rows(x[part], residual[part], weight, 1e-5)[0], together[part])


@pytest.mark.gpu
def test_a_gpu_gives_the_reference() -> None:
    x, residual, weight = (torch.randn(size).bfloat16() for size in ((700, 4096), (700, 4096), (4096,)))
    normed, total = add_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-5)
    expected, expected_total = add_norm(x, residual, weight, 1e-5)
    assert torch.equal(total.cpu(), expected_total)
    torch.testing.assert_close(normed.cpu(), expected, rtol=0.02, atol=1e-3)
