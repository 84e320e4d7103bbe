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


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dim", [8, 24])
def test_each_frequency_turns_by_its_axis(dim: int, device: str) -> None:
    """Of M-RoPE, in the reference and the kernel; positions that are all the same turn as one."""
    rows, positions = table(50, dim), torch.tensor([[49, 0, 7, 7], [1, 2, 3, 4], [30, 0, 30, 20]])
    axes = torch.arange(dim // 2, dtype=torch.int32) % 3
    found = gather_rotation(rows, positions, axes=axes)
    for token in range(4):
        for pair, axis in enumerate(axes.tolist()):
            cos, sin = rows[positions[axis, token], pair], rows[positions[axis, token], dim // 2 + pair]
            assert [found.cos[token, 0, pair], found.cos[token, 0, pair + dim // 2]] == [cos, cos]
            assert [found.sin[token, 0, pair], found.sin[token, 0, pair + dim // 2]] == [-sin, sin]
    by_kernel = rotation_rows(rows.to(device), positions.to(device), axes.to(device))
    same, alone = gather_rotation(rows, positions[:1].repeat(3, 1), axes=axes), gather_rotation(rows, positions[0])
    for part, expected, one, other in zip(by_kernel[:2], found[:2], same[:2], alone[:2], strict=True):
        assert torch.equal(part.cpu(), expected)
        assert torch.equal(one, other)


def test_queries_are_scaled_by_their_time() -> None:
    scales, axes = torch.arange(50.0), torch.zeros(4, dtype=torch.int32)
    found = gather_rotation(table(50, 8), torch.tensor([[7, 9], [1, 1], [2, 2]]), scales, axes)
    assert found.query_scale is not None
    assert found.query_scale.tolist() == [7, 9]
