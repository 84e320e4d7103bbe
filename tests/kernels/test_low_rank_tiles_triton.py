"""Products whose own tiles add what adapters do, against double precision."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from penstock.kernels.linear_tilings import Tiling
from penstock.kernels.linear_triton import multiply_by
from penstock.kernels.low_rank import output_tiles
from penstock.kernels.low_rank_tiles_triton import fits_tiles
from penstock.kernels.low_rank_triton import sort_rows
from penstock.kernels.records import LowRankInputs, LowRankWeight

PLACES = 3
SMALL = (
    Tiling(16, 16, 32, 4, 2),
    Tiling(16, 32, 16, 4, 2, swap_ab=True),
    Tiling(32, 16, 32, 4, 2, tma=True),
    Tiling(16, 16, 64, 4, 2, swap_ab=True, tma=True, flat=True),
    Tiling(32, 16, 32, 4, 2, gated=False),
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def adapters(rank: int, sizes: tuple[int, ...], inputs: int, dtype: torch.dtype, device: str) -> LowRankWeight:
    """Of parts of so many outputs, in places of one memory."""
    ends = list(accumulate(sizes, initial=0))
    parts = tuple(map(slice, ends, ends[1:]))
    lines = len(parts) * rank
    memory = (torch.randn(PLACES, lines * inputs + ends[-1] * rank) / 8).to(dtype).to(device)
    a, b = memory.split((lines * inputs, ends[-1] * rank), 1)
    tiles = output_tiles(parts, rank, torch.device(device))
    return LowRankWeight(a.unflatten(1, (-1, inputs)), b.unflatten(1, (-1, rank)), parts, tiles)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor, added: LowRankWeight, gated: bool) -> Tensor:
    """In double precision; shrunk numbers are rounded, and both halves of a gate."""
    found = x.double() @ weight.double().T
    if bias is not None:
        found += bias.double()
    for row, place in enumerate(places.tolist()):
        for at, part in enumerate(added.parts if place else ()):
            a = added.a[place - 1, at * added.rank : (at + 1) * added.rank].double()
            shrunk = (a @ x[row].double()).to(x.dtype).double()
            found[row, part] += added.b[place - 1, part].double() @ shrunk
    if gated:
        first, second = found.to(x.dtype).double().chunk(2, dim=1)
        found = first / (1 + (-first).exp()) * second
    return found


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor, added: LowRankWeight, tiling: Tiling, gated: bool
) -> Tensor:
    inputs = LowRankInputs(x, sort_rows(places, PLACES, invariant=False), added)
    assert fits_tiles(inputs, tiling, gated=gated and tiling.gated)
    return multiply_by(tiling, x, weight, bias, gated=gated, added=inputs)


def operands(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x, bias = torch.randn(rows, inputs + 8)[:, :inputs].to(dtype), torch.randn(outputs).to(dtype)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    return x.to(device), weight.to(device), bias.to(device)


def some_places(rows: int, device: str) -> Tensor:
    """More rows of one adapter than a tile has, none of another, and rows of the base model."""
    return torch.tensor(([2, 0, *[2] * 17, 3, 0, 2] * 2)[:rows], dtype=torch.int32, device=device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rank", [16, 48, 64])
@pytest.mark.parametrize("tiling", SMALL)
@pytest.mark.sweep
def test_definition(tiling: Tiling, rank: int, gated: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parts of several sizes, whose inputs are shared out, with a bias or without."""
    monkeypatch.setattr("penstock.kernels.low_rank_tiles_triton.SHARE", 128)
    outputs, inputs = 96 if gated else 70, 160
    for dtype, rows, biased in ((torch.float32, 21, True), (torch.float16, 40, False)):
        x, weight, bias = operands(rows, outputs, inputs, dtype, device)
        added = adapters(rank, (48, 48) if gated else (32, 16, 22), inputs, dtype, device)
        places, chosen = some_places(rows, device), bias if biased else None
        found = multiply(x, weight, chosen, places, added, tiling, gated)
        expected = exact(x, weight, chosen, places, added, gated)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=8 * eps, atol=64 * eps)
        base = multiply_by(tiling, x, weight, chosen, gated=gated)
        assert torch.equal(found[places == 0], base[places == 0])
