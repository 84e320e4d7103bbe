"""Routes: the plain form against probabilities, and the kernels against the plain form."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.experts import route


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (128, 8), (5, 5), (1, 1)])
def test_reference(experts: int, chosen: int, dtype: torch.dtype) -> None:
    logits = torch.randn(9, experts).to(dtype)
    probabilities = torch.softmax(logits.double(), dim=1)
    found = route(logits, chosen, normalised=False)
    assert (found.experts.dtype, found.shares.dtype) == (torch.int32, torch.float32)
    expected = probabilities.gather(1, found.experts.long())
    torch.testing.assert_close(found.shares.double(), expected, rtol=1e-5, atol=1e-7)
    assert (found.shares.diff(dim=1) <= 0).all()
    others = probabilities.scatter(1, found.experts.long(), -1.0).amax(dim=1)
    assert (others <= expected[:, -1]).all()
    shared = route(logits, chosen, normalised=True)
    assert torch.equal(shared.experts, found.experts)
    torch.testing.assert_close(shared.shares.double(), expected / expected.sum(1, keepdim=True), rtol=1e-5, atol=1e-7)


def test_of_equals_the_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert route(logits, 3, normalised=True).experts.tolist() == [[1, 2, 4], [0, 1, 2]]


def test_a_row_of_nan_has_experts_and_stays_alone() -> None:
    logits = torch.randn(3, 8)
    expected = route(logits, 2, normalised=True)
    logits[1, 5] = torch.nan
    found = route(logits, 2, normalised=True)
    assert found.shares[1].isnan().all()
    assert ((found.experts >= 0) & (found.experts < 8)).all()
    assert torch.equal(found.shares[::2], expected.shares[::2])
