"""Products with experts: every kernel against double precision, whoever goes where; the same bits in every tiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.activation import SILU
from penstock.kernels.experts import NO_BIASES, expert_mlp, route
from penstock.kernels.experts_triton import multiply_experts, multiply_sorted
from penstock.kernels.linear_tilings import BY_MEAN, ExpertTiling, Tiling
from penstock.kernels.records import Activation, ExpertBiases, Routes, Routing
from penstock.kernels.routing_triton import route_rows
from tests.kernels.test_activation import CLAMPED
from tests.kernels.test_experts import biases_of, exact, weights

PLAIN = ExpertTiling(Tiling(16, 16, 32, 4, 2), Tiling(16, 32, 16, 4, 2))
SWAP_AB = ExpertTiling(Tiling(16, 32, 16, 4, 2, swap_ab=True), Tiling(16, 16, 32, 4, 2, swap_ab=True))
TMA = ExpertTiling(Tiling(16, 16, 32, 4, 2, tma=True), Tiling(16, 32, 16, 4, 2, tma=True))
WAYS = {"plain": PLAIN, "swap_ab": SWAP_AB, "tma": TMA}
COUNT, CHOSEN, HIDDEN, WIDTH = 4, 2, 48, 24
SCENES: dict[str, tuple[int, int]] = {"one token": (1, CHOSEN), "more than a tile": (20, 1), "all": (3, COUNT)}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def types(device: str) -> list[torch.dtype]:
    """The interpreter's products of bfloat16 fail."""
    return [torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]


def multiply(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, first: int, way: ExpertTiling) -> Tensor:
    found = multiply_sorted(x, routes, gate_up, down, first, way)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    return found


def check(found: Tensor, x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, first: int = 0) -> None:
    """Within what rounding gates and lines to the type of x makes of sums of about 1."""
    expected = exact(x.cpu(), on_host(routes), gate_up.cpu(), down.cpu(), first)
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(found.double().cpu(), expected, rtol=8 * eps, atol=16 * eps)


def on_host(routes: Routes) -> Routes:
    return Routes(routes.experts.cpu(), routes.shares.cpu(), routes.total)


def operands(
    tokens: int, chosen: int, dtype: torch.dtype, device: str, experts: int = COUNT
) -> tuple[Tensor, Routes, Tensor, Tensor]:
    gate_up, down = (weight.to(device) for weight in weights(experts, HIDDEN, WIDTH, dtype))
    routes = route(torch.randn(tokens, experts), Routing(chosen, True))
    routes = Routes(routes.experts.to(device), routes.shares.to(device), experts)
    return torch.randn(tokens, HIDDEN).to(dtype).to(device), routes, gate_up, down


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("way", "scene"),
    [
        *(("swap_ab", scene) for scene in SCENES),
        *(pytest.param(way, scene, marks=pytest.mark.long) for way in ("plain", "tma") for scene in SCENES),
    ],
)
def test_products(way: str, scene: str, device: str) -> None:
    tokens, chosen = SCENES[scene]
    for dtype in types(device) if scene == "one token" or device == "cuda" else types(device)[:1]:
        x, routes, gate_up, down = operands(tokens, chosen, dtype, device)
        found = multiply(x, routes, gate_up, down, 0, WAYS[way])
        check(found, x, routes, gate_up, down)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("activation", [Activation("gelu_tanh"), CLAMPED], ids=str)
@pytest.mark.parametrize("way", ["swap_ab", "tma"])
def test_biases_and_other_gates(way: str, activation: Activation, device: str) -> None:
    """The width is no multiple of a tile's outputs, and some experts are held alone."""
    for dtype in types(device)[-1:]:
        x, routes, gate_up, down = operands(7, CHOSEN, dtype, device)
        own = slice(1, 3)
        gate_up, down = gate_up[own], down[own]
        biases = ExpertBiases(*(bias.to(device) for bias in biases_of(gate_up.cpu(), down.cpu())))
        found = multiply_sorted(3 * x, routes, gate_up, down, 1, WAYS[way], biases, activation)
        host = ExpertBiases(*(bias.cpu() for bias in biases))
        expected = exact(3 * x.cpu(), on_host(routes), gate_up.cpu(), down.cpu(), 1, host, activation)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double().cpu(), expected, rtol=16 * eps, atol=64 * eps)


@pytest.mark.usefixtures("poisoned")
def test_experts_without_gates(device: str) -> None:
    """The activation is a pass of its own."""
    x, routes, gate_up, down = operands(7, CHOSEN, torch.float32, device)
    gate_up, activation = gate_up[:, :WIDTH].contiguous(), Activation("relu2")
    biases = ExpertBiases(*(bias.to(device) for bias in biases_of(gate_up.cpu(), down.cpu())))
    found = multiply_sorted(x, routes, gate_up, down, 0, SWAP_AB, biases, activation, gated=False)
    host = ExpertBiases(*(bias.cpu() for bias in biases))
    expected = exact(x.cpu(), on_host(routes), gate_up.cpu(), down.cpu(), 0, host, activation)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("poisoned")
def test_some_experts_are_held_alone(device: str) -> None:
    """Those of another rank have no part in the sums: these of all ranks are the whole."""
    x, routes, gate_up, down = operands(5, CHOSEN, torch.float32, device)
    parts = []
    for first, held in ((0, 1), (1, 3)):
        own = slice(first, first + held)
        parts.append(multiply(x, routes, gate_up[own], down[own], first, SWAP_AB))
        check(parts[-1], x, routes, gate_up[own], down[own], first)
    torch.testing.assert_close(sum(parts), multiply(x, routes, gate_up, down, 0, SWAP_AB))


@pytest.mark.usefixtures("poisoned")
def test_all_tokens_go_to_one_expert(device: str) -> None:
    x, routes, gate_up, down = operands(17, 1, torch.float32, device)
    for expert in (COUNT - 1, 0) if device == "cuda" else (COUNT - 1,):
        one = Routes(torch.full_like(routes.experts, expert), routes.shares, COUNT)
        check(multiply(x, one, gate_up, down, 0, SWAP_AB), x, one, gate_up, down)


def test_a_row_of_nan_stays_alone(device: str) -> None:
    x, routes, gate_up, down = operands(4, CHOSEN, torch.float32, device)
    expected = multiply(x, routes, gate_up, down, 0, SWAP_AB)
    x[3], routes.shares[3] = torch.nan, torch.nan
    found = multiply(x, routes, gate_up, down, 0, SWAP_AB)
    assert found[3].isnan().all()
    others = [0, 1, 2]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("way", [pytest.param("swap_ab", marks=pytest.mark.long), "tma"])
def test_a_token_does_not_depend_on_its_neighbours(way: str, device: str) -> None:
    """Not on their number, their experts or its place among them, to the last bit."""
    for dtype in types(device)[::-1][:1]:
        x, routes, gate_up, down = operands(9, 3, dtype, device)
        together = multiply(x, routes, gate_up, down, 0, WAYS[way])
        shuffled = torch.randperm(9, device=device)
        some = Routes(routes.experts[shuffled], routes.shares[shuffled], COUNT)
        assert torch.equal(multiply(x[shuffled], some, gate_up, down, 0, WAYS[way]), together[shuffled])
        for token in (0, 8)[device == "cpu" :]:
            own = slice(token, token + 1)
            alone = Routes(routes.experts[own], routes.shares[own], COUNT)
            assert torch.equal(multiply(x[own], alone, gate_up, down, 0, WAYS[way]), together[own])


def test_rows_that_lie_apart(device: str) -> None:
    x, routes, gate_up, down = operands(2, CHOSEN, torch.float32, device)
    wide = torch.cat((x, x), dim=1)[:, :HIDDEN]
    assert wide.stride(0) == 2 * HIDDEN
    for way in (SWAP_AB, PLAIN):
        assert torch.equal(multiply(wide, routes, gate_up, down, 0, way), multiply(x, routes, gate_up, down, 0, way))


class Waits(TorchDispatchMode):
    """Complains of what would wait for the device, or makes a size of what stands on it."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "repeat_interleave")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.FORBIDDEN), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [1, 20])
def test_nothing_waits_for_the_device(tokens: int, device: str) -> None:
    """Neither do the kernels, nor is a size made of what stands on the device: a graph may hold them."""
    x, _, gate_up, down = operands(tokens, CHOSEN, torch.float32, device)
    logits = torch.randn(tokens, COUNT, device=device)
    with Waits():
        routes = route_rows(logits, Routing(CHOSEN, True))
        found = multiply_experts(x, routes, gate_up, down, 0, NO_BIASES, SILU)
    check(found, x, routes, gate_up, down)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "chosen", "hidden", "width"), [(128, 8, 2048, 768), (8, 2, 1024, 3584)])
def test_a_gpu_gives_the_product(experts: int, chosen: int, hidden: int, width: int) -> None:
    gate_up, down = (weight.cuda() for weight in weights(experts, hidden, width, torch.bfloat16))
    for tokens in (1, 2, 4, 7, 32, 64, 200, 600, 3000):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        routes = route(torch.randn(tokens, experts, device="cuda"), Routing(chosen, True))
        expected = expert_mlp(x.float().cpu(), on_host(routes), gate_up.float().cpu(), down.float().cpu())
        found = expert_mlp(x, routes, gate_up, down)
        torch.testing.assert_close(found.float().cpu(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "chosen", "hidden", "width"), [(128, 8, 2048, 768), (8, 2, 4096, 3584)])
def test_tilings_of_the_product_give_the_same_bits(experts: int, chosen: int, hidden: int, width: int) -> None:
    gate_up, down = (weight.cuda() for weight in weights(experts, hidden, width, torch.bfloat16))
    x = torch.randn(900, hidden, device="cuda").bfloat16()
    routes = route(torch.randn(900, experts, device="cuda"), Routing(chosen, True))
    first = multiply_sorted(x, routes, gate_up, down, 0, PLAIN)
    for _, way in BY_MEAN:
        assert torch.equal(multiply_sorted(x, routes, gate_up, down, 0, way), first), way
    for rows in (1, 2, 5, 33, 300):
        part = Routes(routes.experts[:rows], routes.shares[:rows], experts)
        assert torch.equal(expert_mlp(x[:rows], part, gate_up, down, invariant=True), first[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 40, 300])
def test_a_graph_gives_what_calls_give(tokens: int) -> None:
    """Replayed over inputs that go to other experts each time."""
    gate_up, down = (weight.cuda() for weight in weights(32, 512, 256, torch.bfloat16))
    router = torch.randn(32, 512, device="cuda").bfloat16()
    x = torch.zeros(tokens, 512, device="cuda").bfloat16()

    def layer() -> Tensor:
        return expert_mlp(x, route(x @ router.T, Routing(4, True)), gate_up, down)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer()
    for _ in range(20):
        x.copy_(torch.randn(tokens, 512))
        expected = layer()
        graph.replay()
        assert torch.equal(found, expected)
