"""Low-rank additions of several adapters in one product: reference and kernels against double precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.low_rank import adapter_rows, expand, output_tiles, shrink
from penstock.kernels.low_rank_triton import (
    EARLY,
    FEW,
    LARGE,
    PLAIN,
    SMALL,
    Cut,
    expand_rows,
    shares_of,
    shrink_rows,
    sort_rows,
)
from penstock.kernels.records import AdapterRows, LowRankWeight

PLACES, INPUTS = 3, 160
PARTS = (slice(0, 96), slice(96, 112), slice(112, 135))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def weight_of(rank: int, dtype: torch.dtype, device: str, parts: tuple[slice, ...] = PARTS) -> LowRankWeight:
    """As places of one memory: a place's matrices stand one behind the other."""
    sizes = len(parts) * rank * INPUTS, parts[-1].stop * rank
    memory = (torch.randn(PLACES, sum(sizes)) / 8).to(dtype).to(device)
    a, b = memory.split(sizes, 1)
    tiles = output_tiles(parts, rank, torch.device(device))
    return LowRankWeight(a.unflatten(1, (-1, INPUTS)), b.unflatten(1, (-1, rank)), parts, tiles)


def exact(out: Tensor, x: Tensor, places: Tensor, weight: LowRankWeight) -> Tensor:
    found = out.double()
    for row, place in enumerate(places.tolist()):
        for at, part in enumerate(weight.parts if place else ()):
            a = weight.a[place - 1, at * weight.rank : (at + 1) * weight.rank].double()
            found[row, part] += weight.b[place - 1, part].double() @ (a @ x[row].double())
    return found


Add = Callable[[Tensor, Tensor, Tensor, LowRankWeight], None]


def by_reference(out: Tensor, x: Tensor, places: Tensor, weight: LowRankWeight) -> None:
    rows = adapter_rows(places, PLACES)
    expand(out, shrink(x, rows, weight))


def by_kernels(out: Tensor, x: Tensor, places: Tensor, weight: LowRankWeight) -> None:
    add_products(out, x, sort_rows(places, PLACES, invariant=True), weight)


def by_few_rows(out: Tensor, x: Tensor, places: Tensor, weight: LowRankWeight) -> None:
    """In steps of eight rows, whose weights are read before they may wait."""
    for first in range(0, len(x), 8):
        own = slice(first, first + 8)
        rows = sort_rows(places[own], PLACES, invariant=False)
        assert rows.early
        add_products(out[own], x[own], rows, weight)


def by_many_rows(out: Tensor, x: Tensor, places: Tensor, weight: LowRankWeight) -> None:
    """As of more rows than FEW, twice: the counters are left as they were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.kernels.low_rank_triton.FEW", 0)
        rows = sort_rows(places, PLACES, invariant=False)
    assert rows.arrivals is not None
    shrink_rows(x, rows, weight)
    assert not rows.arrivals.any()
    addition = shrink_rows(x, rows, weight)
    assert len(addition.shrunk) == 1
    expand_rows(out, addition)


def add_products(out: Tensor, x: Tensor, rows: AdapterRows, weight: LowRankWeight) -> None:
    expand_rows(out, shrink_rows(x, rows, weight))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("add", [by_reference, by_kernels, by_few_rows, by_many_rows])
@pytest.mark.parametrize("rank", [16, 48, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.sweep
def test_definition(add: Add, rank: int, dtype: torch.dtype, device: str) -> None:
    """Places in any order, more rows of one than a tile has, none of another, and rows of the base model."""
    weight = weight_of(rank, dtype, device)
    places = torch.tensor([2, 0, *[2] * 17, 1, 0, 2], dtype=torch.int32)
    x = torch.randn(len(places), INPUTS + 8).to(dtype)[:, :INPUTS]
    out = torch.randn(len(places), 135).to(dtype)
    found = out.clone().to(device)
    add(found, x.to(device), places.to(device), weight)
    expected = exact(out, x, places, weight._replace(a=weight.a.cpu(), b=weight.b.cpu()))
    torch.testing.assert_close(
        found.cpu().double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-2 if dtype is torch.float16 else 1e-5
    )
    assert torch.equal(found.cpu()[places == 0], out[places == 0])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [5, 20])
def test_rows_of_the_base_model_alone(rows: int, device: str) -> None:
    """As in the warm-up: what no tile has written is not read as one."""
    weight, out = weight_of(16, torch.float32, device), torch.randn(rows, 135, device=device)
    found, x = out.clone(), torch.randn(rows, INPUTS, device=device)
    none = torch.zeros(rows, dtype=torch.int32, device=device)
    add_products(found, x, sort_rows(none, PLACES, invariant=False), weight)
    assert torch.equal(found, out)


def test_a_row_does_not_depend_on_its_neighbours(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on their number, their adapters, its place among them, nor on how large the tiles are."""
    weight = weight_of(16, torch.float32, device)
    places = torch.tensor([1, 2, 0, 2, 1, 3] * 3, dtype=torch.int32, device=device)
    x, out = torch.randn(18, INPUTS, device=device), torch.randn(18, 135, device=device)
    alone = out[3:4].clone()
    add_products(alone, x[3:4], sort_rows(places[3:4], PLACES, invariant=True), weight)
    for few, tile in ((FEW, SMALL), (0, LARGE)):
        monkeypatch.setattr("penstock.kernels.low_rank_triton.FEW", few)
        rows, together = sort_rows(places, PLACES, invariant=False), out.clone()
        assert rows.tile == tile
        add_products(together, x, rows, weight)
        assert torch.equal(together[3:4], alone)


@pytest.mark.parametrize(("lines", "inputs"), [(16, 4096), (48, 4096), (768, 4096), (16, 14336), (2048, 512), (16, 40)])
@pytest.mark.parametrize("cut", [PLAIN, EARLY])
def test_shares_cover_the_inputs(lines: int, inputs: int, cut: Cut) -> None:
    shares, share = shares_of(lines, inputs, cut)
    assert (shares - 1) * share < inputs <= shares * share
    assert shares == 1 or shares * lines <= 1024
