"""Products with experts in groups of 4 and 8 bits: the kernel against the reference, alone and among others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.experts import expert_mlp, lines_of, prepared, route
from penstock.kernels.experts_triton import multiply_sorted
from penstock.kernels.grouped_linear import PlaneWeight, planes_of
from penstock.kernels.linear_tilings import ExpertTiling, Tiling
from penstock.kernels.quantized import Float4Weight, GroupedWeight, QuantizedWeight
from penstock.kernels.records import NO_BIASES, Activation, ExpertBiases, Routes, Routing
from tests.kernels.quantized_experts import quantized
from tests.kernels.test_activation import CLAMPED
from tests.kernels.test_quantized_experts_triton import check, reference

pytestmark = pytest.mark.sweep

GROUPED = ("mxfp4", "nvfp4", "int4", "int4_zeros", "int8_group")
COUNT, CHOSEN, HIDDEN, WIDTH = 4, 2, 192, 64
TILING = ExpertTiling(Tiling(16, 16, 64, 4, 2), Tiling(16, 32, 64, 4, 2))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def in_planes(weight: QuantizedWeight) -> PlaneWeight:
    assert isinstance(weight, GroupedWeight | Float4Weight)
    found = planes_of(lines_of(weight))
    assert found is not None
    return found


def operands(layout: str, tokens: int, device: str) -> tuple[Tensor, Routes, QuantizedWeight, QuantizedWeight]:
    with torch.device(device):
        gate_up, down = quantized(layout, (COUNT, 2 * WIDTH, HIDDEN)), quantized(layout, (COUNT, HIDDEN, WIDTH))
        x = torch.randn(tokens, HIDDEN) * torch.exp(torch.randn(tokens, HIDDEN))
    routes = route(torch.randn(tokens, COUNT), Routing(CHOSEN, True))
    return x, Routes(routes.experts.to(device), routes.shares.to(device), COUNT), gate_up, down


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", GROUPED)
def test_products(layout: str, biased: bool, device: str) -> None:
    x, routes, gate_up, down = operands(layout, 3, device)
    given: ExpertBiases = NO_BIASES
    if biased:
        given = ExpertBiases(torch.randn(COUNT, 2 * WIDTH, device=device), torch.randn(COUNT, HIDDEN, device=device))
    found = multiply_sorted(x, routes, in_planes(gate_up), in_planes(down), 0, TILING, given, CLAMPED)
    check(found, reference(x, routes, gate_up, down, given, CLAMPED))


def test_experts_without_gates(device: str) -> None:
    x, routes, _, down = operands("int4", 3, device)
    with torch.device(device):
        up = quantized("int4", (COUNT, WIDTH, HIDDEN))
    given, activation = NO_BIASES, Activation("relu2")
    found = multiply_sorted(x, routes, in_planes(up), in_planes(down), 0, TILING, given, activation, gated=False)
    check(found, reference(x, routes, up, down, given, activation))


@pytest.mark.parametrize("layout", ["mxfp4", "int4_zeros"])
def test_a_token_does_not_depend_on_its_neighbours(layout: str, device: str) -> None:
    x, routes, gate_up, down = operands(layout, 9, device)
    x = x.half()
    one, two = in_planes(gate_up), in_planes(down)
    together = multiply_sorted(x, routes, one, two, 0, TILING)
    own = slice(8, 9)
    alone = Routes(routes.experts[own], routes.shares[own], COUNT)
    assert torch.equal(multiply_sorted(x[own], alone, one, two, 0, TILING), together[own])


def test_some_experts_are_held_alone(device: str) -> None:
    """Those of another rank have no part in the sums."""
    x, routes, gate_up, down = operands("int4", 5, device)
    parts = [
        multiply_sorted(x, routes, in_planes(held(gate_up, own)), in_planes(held(down, own)), own.start, TILING)
        for own in (slice(0, 1), slice(1, COUNT))
    ]
    torch.testing.assert_close(sum(parts), multiply_sorted(x, routes, in_planes(gate_up), in_planes(down), 0, TILING))


def held(weight: QuantizedWeight, own: slice) -> GroupedWeight:
    assert isinstance(weight, GroupedWeight)
    assert weight.zeros is None
    return GroupedWeight(weight.bits, weight.group, weight.values[own], weight.scales[own])


def test_a_host_keeps_experts_as_they_are() -> None:
    for layout in ("mxfp4", "fp8_block"):
        weight = quantized(layout, (2, 128, 128))
        assert prepared(weight, torch.bfloat16) is weight


@pytest.mark.gpu
@pytest.mark.parametrize("layout", GROUPED)
@pytest.mark.parametrize(("count", "chosen", "hidden", "width"), [(32, 4, 2880, 2880), (64, 8, 2048, 768)])
def test_a_gpu_gives_the_product(layout: str, count: int, chosen: int, hidden: int, width: int) -> None:
    with torch.device("cuda"):
        gate_up, down = quantized(layout, (count, 2 * width, hidden)), quantized(layout, (count, hidden, width))
    one, two = prepared(gate_up, torch.bfloat16), prepared(down, torch.bfloat16)
    assert isinstance(one, PlaneWeight)
    x = torch.randn(900, hidden, device="cuda").bfloat16()
    routes = route(torch.randn(900, count, device="cuda"), Routing(chosen, True))
    whole = expert_mlp(x, routes, one, two)
    some = [0, 17, 899]
    part = Routes(routes.experts[some], routes.shares[some], count)
    expected = reference(x[some], part, gate_up, down)
    check(whole[some], expected)
    for rows in (1, 2, 5, 33, 300):
        part = Routes(routes.experts[:rows], routes.shares[:rows], count)
        assert torch.equal(expert_mlp(x[:rows], part, one, two), whole[:rows]), rows
