from __future__ import annotations

import pytest
import torch

from penstock.kernels.rope import apply_rope, gather_rotation
from penstock.kernels.rope_triton import rotation_rows


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def table(length: int, dim: int) -> torch.Tensor:
    angles = torch.arange(length)[:, None] * torch.rand(dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_turn_as_complex_numbers(dtype: torch.dtype) -> None:
    rows = table(50, 16)
    positions = torch.tensor([0, 49, 7, 7])
    x = torch.randn(4, 3, 16).to(dtype)
    found = apply_rope(x, gather_rotation(rows, positions))
    pairs = torch.complex(x[..., :8].double(), x[..., 8:].double())
    turned = pairs * torch.complex(rows[positions, :8].double(), rows[positions, 8:].double())[:, None]
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), -1).to(dtype))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_position_zero_changes_nothing(kind: torch.dtype) -> None:
    x = torch.randn(2, 1, 8)
    assert torch.equal(apply_rope(x, gather_rotation(table(3, 8), torch.zeros(2, dtype=kind))), x)


def test_scores_depend_on_distance_alone() -> None:
    rows = table(100, 32)
    q, k = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def score(at: int, distance: int) -> torch.Tensor:
        turned_q = apply_rope(q, gather_rotation(rows, torch.tensor([at + distance])))
        turned_k = apply_rope(k, gather_rotation(rows, torch.tensor([at])))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(3, 11), score(80, 11), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("dim", [8, 24, 128])
def test_kernel_of_the_gather(dim: int, kind: torch.dtype, device: str) -> None:
    rows, positions = table(50, dim), torch.tensor([49, 0, 7, 7, 13], dtype=kind)
    found = rotation_rows(rows.to(device), positions.to(device))
    for part, expected in zip(found[:2], gather_rotation(rows, positions)[:2], strict=True):
        assert torch.equal(part.cpu(), expected)
    assert found.query_scale is None
