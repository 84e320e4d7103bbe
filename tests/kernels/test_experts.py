"""Products with experts: the plain form in double precision against sums token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.experts import expert_mlp, route
from penstock.kernels.records import Routes, Routing
from tests.engine_core.models.parity import without_mkldnn


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def weights(experts: int, hidden: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    gate_up, down = torch.randn(experts, 2 * width, hidden), torch.randn(experts, hidden, width)
    return (gate_up * hidden**-0.5).to(dtype), (down * width**-0.5).to(dtype)


def exact(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, first: int = 0) -> Tensor:
    """In double precision, token by token."""
    found = torch.zeros(x.shape, dtype=torch.float64)
    for token, values in enumerate(x.double()):
        for expert, share in zip(routes.experts[token].tolist(), routes.shares[token].double(), strict=True):
            if 0 <= expert - first < len(down):
                gate, up = (gate_up[expert - first].double() @ values).chunk(2)
                found[token] += share * (down[expert - first].double() @ (gate * gate.sigmoid() * up))
    return found


@pytest.mark.parametrize(("first", "held"), [(0, 8), (4, 2), (6, 2)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_reference(tokens: int, first: int, held: int) -> None:
    gate_up, down = weights(held, 24, 12)
    x, routes = torch.randn(tokens, 24), route(torch.randn(tokens, 8), Routing(3, True))
    found = expert_mlp(x, routes, gate_up, down, first=first)
    torch.testing.assert_close(found.double(), exact(x, routes, gate_up, down, first), rtol=1e-4, atol=1e-5)


def test_sums_are_single_precision() -> None:
    """Results of bfloat16 are rounded once, not expert by expert. Without oneDNN: see `without_mkldnn`."""
    gate_up, down = weights(8, 64, 32, torch.bfloat16)
    x, routes = torch.randn(40, 64).bfloat16(), route(torch.randn(40, 8), Routing(8, True))
    with without_mkldnn():
        found = expert_mlp(x, routes, gate_up, down)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact(x, routes, gate_up, down), rtol=2**-7, atol=2**-7)


def test_a_row_of_nan_stays_alone() -> None:
    gate_up, down = weights(4, 24, 12)
    x, logits = torch.randn(6, 24), torch.randn(6, 4)
    expected = expert_mlp(x, route(logits, Routing(2, True)), gate_up, down)
    x[3], logits[3] = torch.nan, torch.nan
    found = expert_mlp(x, route(logits, Routing(2, True)), gate_up, down)
    others = [0, 1, 2, 4, 5]
    torch.testing.assert_close(found[others], expected[others])
    assert found[3].isnan().all()
