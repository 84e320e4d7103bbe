"""Products with experts of 8 bits: every way against the reference, the same bits in every tiling and company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.activation import SILU, activate
from penstock.kernels.experts import expert_linear, expert_mlp, route
from penstock.kernels.experts_triton import multiply_sorted
from penstock.kernels.linear_tilings import SCALED_BY_MEAN, ExpertTiling, Tiling
from penstock.kernels.quantized import QuantizedWeight
from penstock.kernels.records import NO_BIASES, Activation, ExpertBiases, Routes, Routing
from tests.kernels.quantized_experts import quantized
from tests.kernels.test_activation import CLAMPED

pytestmark = pytest.mark.sweep

SCALED = ("fp8_block", "fp8_lines", "fp8_row", "fp8_static", "fp8_weights", "int8_row")
COUNT, CHOSEN, HIDDEN, WIDTH, BLOCK = 4, 2, 80, 64, 32


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tilings(block: int) -> dict[str, ExpertTiling]:
    """Tiles of the gate as wide as a block, which then are rounded where they end, and less wide."""
    found = {}
    for name, wide, swap_ab, tma in (
        ("plain", block, False, False), ("narrow", block // 2, False, False), ("swap_ab", block, True, False),
        ("tma", block // 2, True, True), ("upright", block, False, True),
    ):  # fmt: skip
        gate_up = Tiling(16, wide, block, 4, 2, swap_ab=swap_ab, tma=tma)
        found[name] = ExpertTiling(gate_up, Tiling(16, block, block, 4, 2, swap_ab=swap_ab, tma=tma))
    return found


def operands(layout: str, tokens: int, device: str) -> tuple[Tensor, Routes, QuantizedWeight, QuantizedWeight]:
    with torch.device(device):
        gate_up = quantized(layout, (COUNT, 2 * WIDTH, HIDDEN), BLOCK)
        down = quantized(layout, (COUNT, HIDDEN, WIDTH), BLOCK)
        x = torch.randn(tokens, HIDDEN) * torch.exp(torch.randn(tokens, HIDDEN))
    routes = route(torch.randn(tokens, COUNT), Routing(CHOSEN, True))
    return x, Routes(routes.experts.to(device), routes.shares.to(device), COUNT), gate_up, down


def reference(
    x: Tensor, routes: Routes, gate_up: QuantizedWeight, down: QuantizedWeight, biases: ExpertBiases = NO_BIASES,
    activation: Activation = SILU,
) -> Tensor:  # fmt: skip
    """Token by token."""
    found = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, share in zip(routes.experts[token].tolist(), routes.shares[token].tolist(), strict=True):
            one, two = (None if bias is None else bias[expert] for bias in biases)
            product = expert_linear(x[token, None], gate_up, expert, one)
            inner = activate(product, activation, gated=gate_up.shape[1] > down.shape[2])
            found[token] += share * expert_linear(inner, down, expert, two)[0].double().cpu()
    return found


@pytest.mark.parametrize("layout", ["fp8_block", "int8_row"])
def test_experts_without_gates(layout: str, device: str) -> None:
    """Rows are rounded behind the activation."""
    x, routes, _, down = operands(layout, 5, device)
    with torch.device(device):
        up = quantized(layout, (COUNT, WIDTH, HIDDEN), BLOCK)
    activation = Activation("relu2")
    found = multiply_sorted(x, routes, up, down, 0, tilings(BLOCK)["plain"], NO_BIASES, activation, gated=False)
    check(found, reference(x, routes, up, down, NO_BIASES, activation))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("layout", SCALED)
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.long if "upright" in way or way == "tma" else ()) for way in tilings(BLOCK)],
)
def test_products(layout: str, way: str, device: str) -> None:
    x, routes, gate_up, down = operands(layout, 5, device)
    found = multiply_sorted(x, routes, gate_up, down, 0, tilings(BLOCK)[way])
    expected = reference(x, routes, gate_up, down)
    check(found, expected)


def check(found: Tensor, expected: Tensor) -> None:
    """Almost equal: an inner number at the edge of two of 8 bits may fall to the other. Hopper's sums of E4M3 products
    have few bits, so there more do."""
    distance = (found.double().cpu() - expected).norm() / expected.norm()
    assert distance < (0.03 if found.is_cuda else 1e-3), distance


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("way", ["swap_ab", pytest.param("narrow", marks=pytest.mark.long)])
def test_biases_and_clamped_gates(way: str, device: str) -> None:
    x, routes, gate_up, down = operands("fp8_block", 3, device)
    biases = ExpertBiases(torch.randn(COUNT, 2 * WIDTH, device=device), torch.randn(COUNT, HIDDEN, device=device))
    found = multiply_sorted(x, routes, gate_up, down, 0, tilings(BLOCK)[way], biases, CLAMPED)
    check(found, reference(x, routes, gate_up, down, biases, CLAMPED))


@pytest.mark.parametrize("layout", ["fp8_block", "int8_row"])
def test_some_experts_are_held_alone(layout: str, device: str) -> None:
    """Those of another rank have no part in the sums: these of all ranks are the whole."""
    x, routes, gate_up, down = operands(layout, 5, device)
    way = tilings(BLOCK)["swap_ab"]
    parts = [
        multiply_sorted(x, routes, experts(gate_up, first, held), experts(down, first, held), first, way)
        for first, held in ((0, 1), (1, 3))
    ]
    torch.testing.assert_close(sum(parts), multiply_sorted(x, routes, gate_up, down, 0, way))


def experts(weight: QuantizedWeight, first: int, held: int) -> QuantizedWeight:
    return replace(weight, values=weight.values[first : first + held], scales=weight.scales[first : first + held])


@pytest.mark.parametrize("layout", ["fp8_block", "fp8_row", "int8_row"])
def test_a_shared_expert_stands_behind_the_others(layout: str, device: str) -> None:
    """Of which there are fewer than are held."""
    x, _, gate_up, down = operands(layout, 5, device)
    found = route(torch.randn(5, COUNT - 1), Routing(CHOSEN, True, shared=True), torch.randn(5))
    routes = Routes(found.experts.to(device), found.shares.to(device), found.total)
    assert (routes.experts[:, -1] == COUNT - 1).all()
    check(multiply_sorted(x, routes, gate_up, down, 0, tilings(BLOCK)["swap_ab"]), reference(x, routes, gate_up, down))


@pytest.mark.parametrize("layout", ["fp8_block", "fp8_static", "int8_row"])
@pytest.mark.parametrize("way", ["plain", pytest.param("narrow", marks=pytest.mark.long)])
def test_a_token_does_not_depend_on_its_neighbours(layout: str, way: str, device: str) -> None:
    """Not on their number, their size or its place among them, to the last bit."""
    x, routes, gate_up, down = operands(layout, 9, device)
    tiling = tilings(BLOCK)[way]
    together = multiply_sorted(x, routes, gate_up, down, 0, tiling)
    x[:8] *= 30
    own = slice(8, 9)
    alone = Routes(routes.experts[own], routes.shares[own], COUNT)
    assert torch.equal(multiply_sorted(x[own], alone, gate_up, down, 0, tiling), together[own])
    assert torch.equal(multiply_sorted(x, routes, gate_up, down, 0, tiling)[own], together[own])


@pytest.mark.parametrize("layout", [pytest.param("fp8_block", marks=pytest.mark.long), "fp8_row", "int8_row"])
def test_tilings_give_the_same_bits(layout: str, device: str) -> None:
    """A GPU's of E4M3 do from 64 outputs on, see `test_a_gpu_gives_the_product`."""
    if device == "cuda" and layout != "int8_row":
        pytest.skip("tiles of few outputs")
    x, routes, gate_up, down = operands(layout, 3, device)
    x = x.half()
    found = [multiply_sorted(x, routes, gate_up, down, 0, tiling) for tiling in tilings(BLOCK).values()]
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_a_row_of_nan_stays_alone(device: str) -> None:
    x, routes, gate_up, down = operands("fp8_block", 4, device)
    way = tilings(BLOCK)["plain"]
    expected = multiply_sorted(x, routes, gate_up, down, 0, way)
    x[3, 5] = torch.nan
    found = multiply_sorted(x, routes, gate_up, down, 0, way)
    assert found[3].isnan().all()
    assert torch.equal(found[:3], expected[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", SCALED)
@pytest.mark.parametrize(
    ("count", "chosen", "hidden", "width", "shared"),
    [(128, 8, 2048, 768, False), (8, 2, 1024, 3584, False), (256, 8, 2048, 512, True)],
)
def test_a_gpu_gives_the_product(
    layout: str, count: int, chosen: int, hidden: int, width: int, shared: bool
) -> None:  # fmt: skip
    """shared: of one expert more, to which all tokens go."""
    held = count + shared
    with torch.device("cuda"):
        gate_up, down = quantized(layout, (held, 2 * width, hidden)), quantized(layout, (held, hidden, width))
    x = torch.randn(900, hidden, device="cuda").bfloat16()
    logits = torch.randn(900, held, device="cuda")
    routes = route(logits[:, :count], Routing(chosen, True, shared=shared), logits[:, count] if shared else None)
    whole = expert_mlp(x, routes, gate_up, down)  # tiles
    some = [0, 17, 899]
    part = Routes(routes.experts[some], routes.shares[some], count)
    expected = reference(x[some], part, gate_up, down)
    check(whole[some], expected)
    for _, way in SCALED_BY_MEAN:
        assert torch.equal(multiply_sorted(x, routes, gate_up, down, 0, way), whole), way
    for rows in (1, 2, 5, 33, 300):
        part = Routes(routes.experts[:rows], routes.shares[:rows], count)
        assert torch.equal(expert_mlp(x[:rows], part, gate_up, down, invariant=True), whole[:rows]), rows
