"""Products whose own tiles add what adapters do, against double precision."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from penstock.kernels import low_rank_tiles_triton
from penstock.kernels.chip import CHIPS, chip_of
from penstock.kernels.linear_tilings import PipelinedTiling, Tiling
from penstock.kernels.linear_triton import multiply_by
from penstock.kernels.low_rank import output_tiles
from penstock.kernels.low_rank_tiles_triton import fits_tiles
from penstock.kernels.low_rank_triton import multiply_adapted, sort_rows
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
    monkeypatch.setattr(low_rank_tiles_triton, "SHARE", 128)
    outputs, inputs = 96 if gated else 86, 160
    for dtype, rows, biased in ((torch.float32, 21, True), (torch.float16, 40, False)):
        x, weight, bias = operands(rows, outputs, inputs, dtype, device)
        added = adapters(rank, (48, 48) if gated else (32, 32, 22), inputs, dtype, device)
        places, chosen = some_places(rows, device), bias if biased else None
        found = multiply(x, weight, chosen, places, added, tiling, gated)
        expected = exact(x, weight, chosen, places, added, gated)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=8 * eps, atol=64 * eps)
        base = multiply_by(tiling, x, weight, chosen, gated=gated)
        assert torch.equal(found[places == 0], base[places == 0])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tiling", SMALL[:3])
@pytest.mark.sweep
def test_a_row_does_not_depend_on_its_neighbours(
    tiling: Tiling, gated: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on their number, their adapters or its place among them, to the last bit."""
    monkeypatch.setattr(low_rank_tiles_triton, "SHARE", 128)
    x, weight, _ = operands(37, 64, 160, torch.float32, device)
    added, places = adapters(16, (32, 32), 160, torch.float32, device), some_places(37, device)
    together = multiply(x, weight, None, places, added, tiling, gated)
    shuffled = torch.randperm(37, device=device)
    assert torch.equal(multiply(x[shuffled], weight, None, places[shuffled], added, tiling, gated), together[shuffled])
    for row in (0, 1, 36):
        own = slice(row, row + 1)
        assert torch.equal(multiply(x[own], weight, None, places[own], added, tiling, gated), together[own])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tiling", SMALL[1:3])
def test_products_of_a_step_take_turns(tiling: Tiling, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs shrink, and each product finds its counters as the step's first did."""
    several = replace(chip_of(torch.device(device)), num_sms=3)
    monkeypatch.setattr(low_rank_tiles_triton, "chip_of", lambda _: several)
    monkeypatch.setattr(low_rank_tiles_triton, "SHARE", 128)
    places = some_places(21, device)
    rows = sort_rows(places, PLACES, invariant=False)
    assert rows.counts is not None
    assert rows.schedule is not None
    for sizes in ((32, 64, 22), (48,), (32, 6)):
        x, weight, _ = operands(21, sum(sizes), 400, torch.float32, device)
        added = adapters(32, sizes, 400, torch.float32, device)
        found = multiply_by(tiling, x, weight, None, gated=False, added=LowRankInputs(x, rows, added))
        torch.testing.assert_close(found.double(), exact(x, weight, None, places, added, False), rtol=1e-5, atol=1e-4)
    assert rows.counts[:2].tolist() == [rows.schedule[2].item(), 0], "the third product's, and what the fourth takes"
    arrived = rows.counts[2:]
    assert arrived.tolist() == [(places == place).sum() for place in (1, 2, 3)] + [0] * (len(arrived) - PLACES)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("rows", "gated"), [(12, False), (12, True), (40, False), (70, True)])
def test_rules(rows: int, gated: bool, device: str) -> None:
    """Also where the plan of the product has the library's; an invariant product is left to other kernels."""
    dtype, outputs = torch.float16, 128
    x, weight, bias = operands(rows, outputs, 64, dtype, device)
    added = adapters(16, (64, 64), 64, dtype, device)
    places = some_places(rows, device) if rows < 48 else torch.arange(rows, dtype=torch.int32, device=device) % 4
    inputs = LowRankInputs(x, sort_rows(places, PLACES, invariant=False), added)
    found = multiply_adapted(x, weight, bias, inputs, gated=gated, invariant=False)
    assert found is not None
    expected = exact(x, weight, bias, places, added, gated)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=6e-2)
    apart = inputs._replace(rows=sort_rows(places, PLACES, invariant=True))
    assert multiply_adapted(x, weight, bias, apart, gated=gated, invariant=True) is None


@pytest.mark.parametrize(("rank", "rows", "early"), [(16, 4, True), (16, 5, False), (32, 2, True), (64, 1, False)])
def test_a_few_rows_of_a_small_rank_have_weights_fetched_early(
    rank: int, rows: int, early: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles take the others, whose ways measured worse: see benchmarks/notes.md."""
    taken = []

    def way(x: Tensor, weight: Tensor, gated: bool, invariant: bool, least: int = 1) -> object:
        return SMALL[0] if invariant else PipelinedTiling(8, 1, 2)

    def pipelined(x: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
        taken.append(x)
        return x.new_zeros(len(x), len(weight))

    monkeypatch.setattr("penstock.kernels.low_rank_triton.way_of", way)
    monkeypatch.setattr("penstock.kernels.low_rank_triton.pipelined_product", lambda: pipelined)
    monkeypatch.setattr("penstock.kernels.low_rank_triton.tma_compatible", lambda _: True)
    x, weight, _ = operands(rows, 96, 64, torch.float32, device)
    added = adapters(rank, (48, 48), 64, torch.float32, device)
    rows_of = sort_rows(some_places(rows, device), PLACES, invariant=False)
    found = multiply_adapted(x, weight, None, LowRankInputs(x, rows_of, added), gated=False, invariant=False)
    assert found is not None
    assert bool(taken) is early
    monkeypatch.setattr("penstock.kernels.low_rank_triton.fits_tiles", lambda *_, **__: False)
    multiply_adapted(x, weight, None, LowRankInputs(x, rows_of, added), gated=False, invariant=False)
    assert len(taken) == 1 + early, "what tiles have no room for"


def test_tiles_that_cannot_add(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their outputs would be of two parts, or the expanding weights have no room."""
    x, _, _ = operands(9, 96, 64, torch.float32, device)
    rows = sort_rows(some_places(9, device), PLACES, invariant=False)

    def fit(sizes: tuple[int, ...], tiling: Tiling, gated: bool) -> bool:
        inputs = LowRankInputs(x, rows, adapters(16, sizes, 64, torch.float32, device))
        return fits_tiles(inputs, tiling, gated=gated)

    narrow, wide = SMALL[0], Tiling(16, 64, 32, 4, 2)
    assert fit((48, 48), narrow, False)
    assert not fit((40, 56), narrow, False)
    assert not fit((48, 48), wide, False)
    assert fit((48, 48), wide, True)
    assert not fit((32, 64), narrow, True)
    assert not fit((16, 16, 32, 32), narrow, False)
    full = replace(CHIPS["sm_90"], shared_memory=2 * 4 * 32 * 80 + 1024 + 16 * 64 * 4)
    for bytes_less in (0, 1):
        chip = replace(full, shared_memory=full.shared_memory - bytes_less)
        monkeypatch.setattr(low_rank_tiles_triton, "chip_of", lambda _, chip=chip: chip)
        assert fit((128,), wide, False) == (not bytes_less)
