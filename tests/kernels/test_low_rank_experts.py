"""Low-rank additions to experts' products: reference and kernels against experts whose weights have them added."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.activation import SILU
from penstock.kernels.experts import expert_mlp, route
from penstock.kernels.experts_triton import multiply_sorted
from penstock.kernels.linear_tilings import ExpertTiling, Tiling
from penstock.kernels.low_rank_experts_triton import Added, add_pairs
from penstock.kernels.records import NO_BIASES, ExpertAdapters, LowRankExperts, Routes, Routing
from penstock.kernels.routing_triton import sort_pairs
from tests.kernels import test_grouped_experts_triton as grouped
from tests.kernels import test_quantized_experts_triton as scaled
from tests.kernels.test_experts import exact, weights

COUNT, CHOSEN, HIDDEN, WIDTH, PLACES, RANK = 4, 2, 80, 72, 3, 48
TILING = ExpertTiling(Tiling(16, 16, 32, 4, 2), Tiling(16, 32, 16, 4, 2))
WIDE = ExpertTiling(Tiling(32, 16, 32, 4, 2), Tiling(32, 32, 16, 4, 2))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def adapters_of(
    places: Tensor, hidden: int, width: int, dtype: torch.dtype, held: int = COUNT, parts: int = 2
) -> ExpertAdapters:
    """As a place has them: its matrices stand one behind the other."""
    shapes = (held, parts * RANK, hidden), (held, parts * width, RANK), (held, RANK, width), (held, hidden, RANK)
    sizes = [shape[0] * shape[1] * shape[2] for shape in shapes]
    memory = (torch.randn(PLACES, sum(sizes)) / 12).to(dtype).to(places.device)
    found = [part.unflatten(1, shape) for part, shape in zip(memory.split(sizes, 1), shapes, strict=True)]
    return ExpertAdapters(places, LowRankExperts(*found[:2]), LowRankExperts(*found[2:]))


def merged(weight: Tensor, added: LowRankExperts, place: int) -> Tensor:
    """With what the adapter in a place adds, in double precision."""
    if not place:
        return weight.cpu().double()
    a, b = (half[place - 1].cpu().double().chunk(added.parts, 1) for half in added)
    return weight.cpu().double() + torch.cat([wide @ part for part, wide in zip(a, b, strict=True)], 1)


def expected(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, first: int, adapters: ExpertAdapters) -> Tensor:
    found = torch.empty(x.shape, dtype=torch.float64)
    for row, place in enumerate(adapters.places.tolist()):
        own = Routes(routes.experts[row, None].cpu(), routes.shares[row, None].cpu(), routes.total)
        pair = merged(gate_up, adapters.gate_up, place), merged(down, adapters.down, place)
        found[row] = exact(x[row, None].cpu(), own, *pair, first)[0]
    return found


Multiply = Callable[[Tensor, Routes, Tensor, Tensor, int, ExpertAdapters], Tensor]


def by_reference(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, first: int, added: ExpertAdapters) -> Tensor:
    return expert_mlp(x, routes, gate_up, down, first=first, adapters=added)


def by_kernels(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, first: int, added: ExpertAdapters) -> Tensor:
    return multiply_sorted(x, routes, gate_up, down, first, TILING, adapters=added)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("multiply", [by_reference, by_kernels])
@pytest.mark.parametrize(("first", "held"), [(0, COUNT), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.sweep
def test_definition(multiply: Multiply, first: int, held: int, dtype: torch.dtype, device: str) -> None:
    """More pairs of an expert than a tile has, of several adapters and of none; another rank has some experts."""
    if multiply is by_reference and (device == "cuda" or dtype is torch.float16):
        return  # the reference is the CPU's, in fp32
    tokens = 23
    places = torch.tensor([1, 2, 0, 3, *[2] * 6, 0, 0, *[1] * 11], dtype=torch.int32, device=device)
    gate_up, down = (weight.to(device) for weight in weights(held, HIDDEN, WIDTH, dtype))
    routes = route(torch.randn(tokens, COUNT), Routing(CHOSEN, True))
    routes = Routes(routes.experts.to(device), routes.shares.to(device), COUNT)
    x, adapters = torch.randn(tokens, HIDDEN).to(dtype).to(device), adapters_of(places, HIDDEN, WIDTH, dtype, held)
    found = multiply(x, routes, gate_up, down, first, adapters)
    eps = torch.finfo(dtype).eps
    wanted = expected(x, routes, gate_up, down, first, adapters)
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=16 * eps, atol=64 * eps)
    plain = expected(x, routes, gate_up, down, first, adapters._replace(places=torch.zeros_like(places)))
    assert (wanted - plain).abs().amax(1)[places.cpu() > 0].median() > 0.1


@pytest.mark.sweep
def test_experts_without_gates(device: str) -> None:
    """One product has one part."""
    places = torch.tensor([1, 0, 2, 3, 1], dtype=torch.int32, device=device)
    (up, down), added = weights(COUNT, HIDDEN, WIDTH), adapters_of(places, HIDDEN, WIDTH, torch.float32, parts=1)
    up, down = up[:, :WIDTH].contiguous().to(device), down.to(device)
    routes = route(torch.randn(5, COUNT), Routing(CHOSEN, True))
    routes, x = Routes(routes.experts.to(device), routes.shares.to(device), COUNT), torch.randn(5, HIDDEN).to(device)
    found = multiply_sorted(x, routes, up, down, 0, TILING, gated=False, adapters=added)
    wanted = expected(x, routes, up, down, 0, added)
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_a_pair_does_not_depend_on_its_neighbours(device: str) -> None:
    """Not on their adapters, nor on how large the tiles are; one without an adapter is not touched."""
    places = torch.tensor([1, 2, 0, 2, 1, 3] * 4, dtype=torch.int32, device=device)
    weight = adapters_of(places, HIDDEN, WIDTH, torch.float32).gate_up
    experts = torch.randint(0, COUNT, (24, 1), dtype=torch.int32).to(device)
    x, out = torch.randn(24, HIDDEN, device=device), torch.randn(24, 2 * WIDTH, device=device)
    alone = out[3:4].clone()
    own = Added(sort_pairs(experts[3:4].contiguous(), 0, COUNT, 16), 16, 1, None)
    add_pairs(alone, x[3:4], own, weight, places[3:4], 1)
    assert not torch.equal(alone, out[3:4])
    for rows in (16, 32):
        together = out.clone()
        add_pairs(together, x, Added(sort_pairs(experts, 0, COUNT, rows), rows, 1, None), weight, places, 1)
        assert torch.equal(together[3:4], alone)
        assert torch.equal(together[places == 0], out[places == 0])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("layout", ["fp8_block", "fp8_row", "fp8_static", "int8_row", "int4", "mxfp4"])
@pytest.mark.sweep
def test_quantized_experts(layout: str, device: str) -> None:
    """Additions are of the rows as they are, and of what the activation gives before it is rounded."""
    scene = scaled if layout in scaled.SCALED else grouped
    x, routes, gate_up, down = scene.operands(layout, 5, device)
    places = torch.tensor([1, 0, 2, 3, 1], dtype=torch.int32, device=device)
    adapters = adapters_of(places, x.shape[1], scene.WIDTH, x.dtype)
    if scene is scaled:
        found = multiply_sorted(x, routes, gate_up, down, 0, scaled.tilings(scaled.BLOCK)["plain"], adapters=adapters)
    else:
        pair = grouped.in_planes(gate_up), grouped.in_planes(down)
        found = multiply_sorted(x, routes, *pair, 0, grouped.TILING, NO_BIASES, SILU, adapters=adapters)
    on_host = [expert_mlp(x, routes, gate_up, down, adapters=adapters)] if device == "cpu" else []
    for wanted in on_host:
        scaled.check(found, wanted.double())
    assert (found - expert_mlp(x, routes, gate_up, down)).abs().amax(1)[places > 0].min() > 0.1
