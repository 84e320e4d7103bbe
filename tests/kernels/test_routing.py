"""Routes: the plain form against probabilities, and the kernels against the plain form."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.experts import route
from penstock.kernels.records import Routing


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (128, 8), (5, 5), (1, 1)])
def test_reference(experts: int, chosen: int, dtype: torch.dtype) -> None:
    logits = torch.randn(9, experts).to(dtype)
    probabilities = torch.softmax(logits.double(), dim=1)
    found = route(logits, Routing(chosen, False))
    assert (found.experts.dtype, found.shares.dtype) == (torch.int32, torch.float32)
    expected = probabilities.gather(1, found.experts.long())
    torch.testing.assert_close(found.shares.double(), expected, rtol=1e-5, atol=1e-7)
    assert (found.shares.diff(dim=1) <= 0).all()
    others = probabilities.scatter(1, found.experts.long(), -1.0).amax(dim=1)
    assert (others <= expected[:, -1]).all()
    shared = route(logits, Routing(chosen, True))
    assert torch.equal(shared.experts, found.experts)
    torch.testing.assert_close(shared.shares.double(), expected / expected.sum(1, keepdim=True), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_bias_decides_who_is_chosen_and_not_the_shares(sigmoid: bool) -> None:
    """DeepSeek-V3's selection bias, and the scale of its shares."""
    logits, bias = torch.randn(9, 12), torch.randn(12)
    scores = logits.double().sigmoid() if sigmoid else logits.double().softmax(1)
    found = route(logits, Routing(3, False, sigmoid, 2.5, bias))
    assert torch.equal(found.experts.long(), (scores + bias).topk(3).indices)
    torch.testing.assert_close(found.shares.double(), 2.5 * scores.gather(1, found.experts.long()), rtol=1e-5, atol=0)
    shared = route(logits, Routing(3, True, sigmoid, 2.5, bias))
    torch.testing.assert_close(shared.shares.sum(1), torch.full((9,), 2.5))


@pytest.mark.parametrize("best", [1, 2])
@pytest.mark.parametrize(("experts", "groups", "top"), [(32, 8, 3), (20, 4, 1), (24, 3, 3), (160, 8, 3)])
def test_groups_limit_the_choice(experts: int, groups: int, top: int, best: int) -> None:
    """As DeepSeek-V2 (the best of a group) and V3 (the sum of the best two) have it, group by group."""
    logits, bias = torch.randn(9, experts), torch.randn(experts) * 0.3
    found = route(logits, Routing(4, False, True, 1.0, bias, groups, top, best))
    size = experts // groups
    for row, ranked in enumerate((logits.sigmoid() + bias).tolist()):
        sums = [sum(sorted(ranked[at * size :][:size])[-best:]) for at in range(groups)]
        kept = sorted(range(groups), key=lambda at: -sums[at])[:top]
        allowed = [at for at in range(experts) if at // size in kept]
        assert found.experts[row].tolist() == sorted(allowed, key=lambda at: -ranked[at])[:4]


def test_of_equals_the_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert route(logits, Routing(3, True)).experts.tolist() == [[1, 2, 4], [0, 1, 2]]


def test_a_row_of_nan_has_experts_and_stays_alone() -> None:
    logits = torch.randn(3, 8)
    expected = route(logits, Routing(2, True))
    logits[1, 5] = torch.nan
    found = route(logits, Routing(2, True))
    assert found.shares[1].isnan().all()
    assert ((found.experts >= 0) & (found.experts < 8)).all()
    assert torch.equal(found.shares[::2], expected.shares[::2])


@pytest.mark.parametrize("gated", [False, True])
def test_every_token_goes_to_the_shared_expert(gated: bool) -> None:
    """Behind the others, in a share that nothing scales."""
    logits, gates = torch.randn(9, 12), torch.randn(9)
    alone = route(logits, Routing(3, True, scale=2.5))
    found = route(logits, Routing(3, True, scale=2.5, shared=True), gates if gated else None)
    assert torch.equal(found.experts[:, :3], alone.experts)
    assert torch.equal(found.shares[:, :3], alone.shares)
    assert (found.experts[:, 3] == 12).all()
    torch.testing.assert_close(found.shares[:, 3], gates.sigmoid() if gated else torch.ones(9))
    assert found.total == 12


def test_tokens_of_padding_go_to_nobody() -> None:
    logits = torch.randn(5, 8)
    whole, found = (route(logits, Routing(3, True), real=real) for real in (None, torch.tensor([2], dtype=torch.int32)))
    assert torch.equal(found.experts[:2], whole.experts[:2])
    assert (found.experts[2:] == -1).all()
