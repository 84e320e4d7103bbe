"""Products of few tokens with experts, pair by pair: every format against the reference, and when tiles serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import experts_triton, vector_experts_triton
from penstock.kernels.activation import SILU
from penstock.kernels.experts import expert_mlp, route
from penstock.kernels.experts_triton import multiply_experts
from penstock.kernels.linear_tilings import VectorTiling
from penstock.kernels.quantized import Float8Weight, QuantizedWeight
from penstock.kernels.records import NO_BIASES, Activation, ExpertBiases, Routes, Routing
from penstock.kernels.vector_experts_triton import (
    MOST_SCALED,
    MOST_TOKENS,
    SHORT,
    Weight,
    multiply_pair_by_pair,
    takes_pairs,
)
from tests.kernels.quantized_experts import quantized
from tests.kernels.test_activation import CLAMPED
from tests.kernels.test_experts import biases_of, weights
from tests.kernels.test_experts_triton import check as check_plain
from tests.kernels.test_experts_triton import operands as plain_operands
from tests.kernels.test_experts_triton import types
from tests.kernels.test_grouped_experts_triton import COUNT, HIDDEN, WIDTH, operands
from tests.kernels.test_quantized_experts_triton import SCALED, check, experts, reference


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product takes its 192 inputs in two iterations."""
    monkeypatch.setattr(
        vector_experts_triton, "tilings", lambda weight: (VectorTiling(4, 128, 4), VectorTiling(2, 64, 4))
    )


def multiply(
    x: Tensor, routes: Routes, gate_up: Tensor | QuantizedWeight, down: Tensor | QuantizedWeight, first: int = 0,
    biases: ExpertBiases = NO_BIASES, activation: Activation = SILU, *, gated: bool = True,
) -> Tensor:  # fmt: skip
    assert isinstance(gate_up, Weight)
    assert isinstance(down, Weight)
    found = multiply_pair_by_pair(x, routes, gate_up, down, first, biases, activation, gated=gated)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    return found


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", [1, 3])
def test_plain_numbers(tokens: int, device: str) -> None:
    for dtype in types(device):
        x, routes, gate_up, down = plain_operands(tokens, 2, dtype, device)
        check_plain(multiply(x, routes, gate_up, down), x, routes, gate_up, down)


@pytest.mark.usefixtures("poisoned", "several_turns")
@pytest.mark.parametrize("biased", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", SCALED)
def test_eight_bits(layout: str, biased: bool, device: str) -> None:
    x, routes, gate_up, down = operands(layout, 2, device)
    given: ExpertBiases = NO_BIASES
    if biased:
        given = ExpertBiases(torch.randn(COUNT, 2 * WIDTH, device=device), torch.randn(COUNT, HIDDEN, device=device))
    check(multiply(x, routes, gate_up, down, 0, given, CLAMPED), reference(x, routes, gate_up, down, given, CLAMPED))


@pytest.mark.usefixtures("poisoned")
def test_biases_and_other_gates(device: str) -> None:
    x, routes, gate_up, down = plain_operands(3, 2, torch.float32, device)
    biases = ExpertBiases(*(bias.to(device) for bias in biases_of(gate_up.cpu(), down.cpu())))
    expected = reference(x, routes, gate_up.cpu(), down.cpu(), ExpertBiases(*(bias.cpu() for bias in biases)), CLAMPED)
    check(multiply(x, routes, gate_up, down, 0, biases, CLAMPED), expected)


@pytest.mark.usefixtures("poisoned")
def test_experts_without_gates(device: str) -> None:
    x, routes, _, down = operands("fp8_block", 2, device)
    with torch.device(device):
        up = quantized("fp8_block", (COUNT, WIDTH, HIDDEN))
    activation = Activation("relu2")
    found = multiply(x, routes, up, down, 0, NO_BIASES, activation, gated=False)
    check(found, reference(x, routes, up, down, NO_BIASES, activation))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("layout", ["plain", "fp8_block", "int8_row"])
def test_some_experts_are_held_alone(layout: str, device: str) -> None:
    """Those of another rank have no part in the sums: these of all ranks are the whole."""
    if layout == "plain":
        x, routes, gate_up, down = plain_operands(3, 2, torch.float32, device)
    else:
        x, routes, gate_up, down = operands(layout, 3, device)
    parts = []
    for first, held in ((0, 1), (1, COUNT - 1)):
        own = [
            part[first : first + held] if isinstance(part, Tensor) else experts(part, first, held)
            for part in (gate_up, down)
        ]
        parts.append(multiply(x, routes, own[0], own[1], first))
    torch.testing.assert_close(sum(parts), multiply(x, routes, gate_up, down), rtol=1e-4, atol=1e-5)


def test_a_token_depends_on_itself_alone(device: str) -> None:
    """A row of NaN, too, stays alone."""
    x, routes, gate_up, down = operands("fp8_block", 3, device)
    expected = multiply(x, routes, gate_up, down)
    x[2], routes.shares[2] = torch.nan, torch.nan
    found = multiply(x, routes, gate_up, down)
    assert found[2].isnan().all()
    assert torch.equal(found[:2], expected[:2])
    alone = Routes(routes.experts[1:2], routes.shares[1:2], COUNT)
    assert torch.equal(multiply(x[1:2], alone, gate_up, down), expected[1:2])


def test_who_is_served(device: str) -> None:
    """One token always, a few where matrices are short; none in groups of 4 bits."""
    plain = torch.empty(2, 8, 16)
    wide = torch.empty(1, 2, SHORT, device="meta")
    assert [takes_pairs(plain, tokens) for tokens in (0, 1, 2, MOST_TOKENS, MOST_TOKENS + 1)] == [
        False, True, True, True, False,
    ]  # fmt: skip
    assert [takes_pairs(wide, tokens) for tokens in (1, 2)] == [True, False]
    scaled = quantized("int8_row", (1, 8, 32))
    assert [takes_pairs(scaled, tokens) for tokens in (1, MOST_SCALED, MOST_SCALED + 1)] == [True, True, False]
    assert not takes_pairs(quantized("mxfp4", (1, 8, 32)), 1)


@pytest.mark.parametrize(("invariant", "served"), [(False, True), (True, False)])
def test_batch_invariant_models_have_tiles(
    invariant: bool, served: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def count(*given: object, gated: bool) -> Tensor:
        calls.append(given)
        return multiply_pair_by_pair(*given, gated=gated)  # type: ignore[arg-type]

    monkeypatch.setattr(experts_triton, "multiply_pair_by_pair", count)
    x, routes, gate_up, down = plain_operands(1, 2, torch.float32, device)
    found = multiply_experts(x, routes, gate_up, down, 0, NO_BIASES, SILU, invariant=invariant)
    check_plain(found, x, routes, gate_up, down)
    assert bool(calls) is served


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["plain", *SCALED])
@pytest.mark.parametrize(("count", "chosen", "hidden", "width"), [(257, 9, 2048, 512), (8, 2, 4096, 3584)])
def test_a_gpu_gives_the_product(layout: str, count: int, chosen: int, hidden: int, width: int) -> None:
    with torch.device("cuda"):
        if layout == "plain":
            gate_up, down = (weight.cuda() for weight in weights(count, hidden, width, torch.bfloat16))
        else:
            gate_up, down = quantized(layout, (count, 2 * width, hidden)), quantized(layout, (count, hidden, width))
    for tokens in (1, 2, 4):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        routes = route(torch.randn(tokens, count, device="cuda"), Routing(chosen, True))
        check(multiply(x, routes, gate_up, down), reference(x, routes, gate_up, down))
        if isinstance(gate_up, Float8Weight) and gate_up.block == (128, 128):
            coarse = replace(gate_up, block=(64, 128), scales=gate_up.scales.repeat_interleave(2, 1))
            assert torch.equal(multiply(x, routes, coarse, down), multiply(x, routes, gate_up, down))
        most = MOST_TOKENS if layout == "plain" else MOST_SCALED
        assert takes_pairs(gate_up, tokens) is (tokens == 1 or (hidden == 2048 and tokens <= most))
        if takes_pairs(gate_up, tokens):
            assert torch.equal(expert_mlp(x, routes, gate_up, down), multiply(x, routes, gate_up, down))
