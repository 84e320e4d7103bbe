"""Products with experts: the plain form in double precision against sums token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.activation import SILU
from penstock.kernels.experts import expert_mlp, route
from penstock.kernels.quantized import expert_of, rounded_rows
from penstock.kernels.records import Activation, ExpertBiases, Routes, Routing
from tests.engine_core.models.parity import without_mkldnn
from tests.kernels.quantized_experts import LAYOUTS, quantized
from tests.kernels.test_activation import CLAMPED
from tests.kernels.test_activation import exact as exact_activation


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def weights(experts: int, hidden: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    gate_up, down = torch.randn(experts, 2 * width, hidden), torch.randn(experts, hidden, width)
    return (gate_up * hidden**-0.5).to(dtype), (down * width**-0.5).to(dtype)


def biases_of(gate_up: Tensor, down: Tensor) -> ExpertBiases:
    """Random ones of these weights."""
    return ExpertBiases(*(torch.randn(weight.shape[:2]).to(weight) for weight in (gate_up, down)))


def exact(
    x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, first: int = 0, biases: ExpertBiases | None = None,
    activation: Activation = SILU,
) -> Tensor:  # fmt: skip
    """In double precision, token by token."""
    found = torch.zeros(x.shape, dtype=torch.float64)
    for token, values in enumerate(x.double()):
        for expert, share in zip(routes.experts[token].tolist(), routes.shares[token].double(), strict=True):
            if 0 <= expert - first < len(down):
                own = expert - first
                inner = gate_up[own].double() @ values
                inner = inner if biases is None else inner + biases.gate_up[own].double()
                gate, *up = inner.split(down.shape[-1])
                outer = down[own].double() @ exact_activation(gate, activation, *up)
                found[token] += share * (outer if biases is None else outer + biases.down[own].double())
    return found


@pytest.mark.parametrize(("first", "held"), [(0, 8), (4, 2), (6, 2)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_reference(tokens: int, first: int, held: int) -> None:
    gate_up, down = weights(held, 24, 12)
    x, routes = torch.randn(tokens, 24), route(torch.randn(tokens, 8), Routing(3, True))
    found = expert_mlp(x, routes, gate_up, down, first=first)
    torch.testing.assert_close(found.double(), exact(x, routes, gate_up, down, first), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", [Activation("gelu_tanh"), CLAMPED], ids=str)
def test_biases_and_other_gates(activation: Activation) -> None:
    gate_up, down = weights(8, 24, 12)
    biases = biases_of(gate_up, down)
    x, routes = 4 * torch.randn(9, 24), route(torch.randn(9, 8), Routing(3, True))
    found = expert_mlp(x, routes, gate_up, down, biases=biases, activation=activation)
    expected = exact(x, routes, gate_up, down, 0, biases, activation)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_experts_without_gates() -> None:
    gate_up, down = weights(8, 24, 12)
    gate_up = gate_up[:, :12]
    biases, activation = biases_of(gate_up, down), Activation("relu2")
    x, routes = torch.randn(9, 24), route(torch.randn(9, 8), Routing(3, True))
    found = expert_mlp(x, routes, gate_up, down, biases=biases, activation=activation, gated=False)
    expected = exact(x, routes, gate_up, down, 0, biases, activation)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_experts_are_products_of_rounded_rows(layout: str) -> None:
    gate_up, down = quantized(layout, (4, 256, 192)), quantized(layout, (4, 192, 128))
    x, routes = torch.randn(5, 192), route(torch.randn(5, 4), Routing(2, True))
    found = expert_mlp(x, routes, gate_up, down, first=0)
    expected = torch.zeros(5, 192, dtype=torch.float64)
    for token in range(5):
        for expert, share in zip(routes.experts[token].tolist(), routes.shares[token].double(), strict=True):
            one, two = expert_of(gate_up, expert), expert_of(down, expert)
            gate, up = (rounded_rows(x[token, None], one).double() @ one.dequantized(torch.float64).T).chunk(2, 1)
            inner = (gate * gate.sigmoid() * up).float()
            expected[token] += share * (rounded_rows(inner, two).double() @ two.dequantized(torch.float64).T)[0]
    # An inner number at the edge of two of 8 bits may fall to the other.
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=2e-2 if "8_" in layout else 1e-4)
