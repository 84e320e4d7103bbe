"""The sampler's kernels against the plain steps in float64, noise included: sampling_triton.py, adjustment_triton.py,
ranking_triton.py and drawing_triton.py together, with vocabularies cut so small that each takes all of its ways."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from penstock.kernels.sampling_triton import CUT, choose_tokens
from tests.kernels.sampling_runs import SMALL, VOCABULARY, WAYS, check, sample
from tests.kernels.sampling_scene import EDGES, Row, chi_square, distribution, edge_logits, random_rows, scene

MORE_LOGITS = ((torch.bfloat16, 9.0), (torch.float16, 3.0))


@pytest.mark.parametrize(
    ("kind", "spread"),
    [
        (torch.float32, 2.0),
        (torch.bfloat16, 0.02),
        *(pytest.param(kind, spread, marks=pytest.mark.long) for kind, spread in MORE_LOGITS),
    ],
)
def test_every_way_together(kind: torch.dtype, spread: float, device: str) -> None:
    logits = torch.randn(len(WAYS), VOCABULARY, generator=torch.Generator().manual_seed(5)) * spread
    check(logits.to(kind), WAYS, device)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_random_requests(seed: int, device: str) -> None:
    chance = np.random.default_rng(seed)
    rows = random_rows(chance, 12, VOCABULARY)
    logits = torch.from_numpy(chance.normal(size=(12, VOCABULARY)) * chance.choice([0.1, 1, 4])).float()
    check(logits, rows, device)


def test_greedy_takes_the_lowest_of_equals(device: str) -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[0, [130, 129, 260]] = 2.0
    logits[2, 299] = 0.5
    assert sample(logits, [Row(temperature=0)] * 3, device) == [129, 0, 299]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_entry_with_a_non_finite_logit_fails_alone(bad: float, device: str) -> None:
    plain = [Row(temperature=0), Row(), Row(top_p=0.9), Row(top_k=5), Row(top_k=90), Row(presence=0.5, temperature=0)]
    logits = torch.randn(len(plain), VOCABULARY, generator=torch.Generator().manual_seed(7))
    good = sample(logits, plain, device)
    assert min(good) >= 0
    logits[::2, 200] = bad
    assert sample(logits, plain, device) == [-1 if at % 2 == 0 else token for at, token in enumerate(good)]


def test_an_entry_with_every_token_forbidden_fails_alone(device: str) -> None:
    logits = torch.randn(6, VOCABULARY)
    nothing = Row(allowed=(5,), bias=((5, -math.inf),))
    greedy, ranked, cut = (
        dataclasses.replace(nothing, temperature=0), dataclasses.replace(nothing, top_k=9),
        dataclasses.replace(nothing, top_p=0.5),
    )  # fmt: skip
    rows = [nothing, greedy, ranked, cut, Row(mask=()), Row(temperature=0)]
    assert sample(logits, rows, device) == [-1] * 5 + [int(logits[5].argmax())]


@pytest.mark.parametrize(("row", "kept"), EDGES, ids=str)
def test_a_nucleus_that_reaches_its_mass_exactly_is_complete(row: Row, kept: set[int], device: str) -> None:
    rows = [dataclasses.replace(row, seed=seed) for seed in range(12)]
    assert set(sample(edge_logits(VOCABULARY).expand(12, -1), rows, device)) == kept


def test_an_entry_is_the_same_alone_padded_and_in_any_company(device: str) -> None:
    rows = [dataclasses.replace(row, drafts=()) for row in WAYS[::3]]
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    together = sample(logits, rows, device)
    assert together[::-1] == sample(logits.flip(0), rows[::-1], device, padding=3)
    for at in range(1, len(rows), 3):
        assert sample(logits[at : at + 1], rows[at : at + 1], device) == together[at : at + 1]


def test_logits_stay_as_they_are_and_may_have_a_stride(device: str) -> None:
    rows = [Row(temperature=0), Row(top_k=5, presence=0.5), Row(top_p=0.9, bias=((3, 1.0),)), Row(mask=(5, 6, 200))]
    wide = torch.randn(len(rows), VOCABULARY + 52, generator=torch.Generator().manual_seed(3)).to(device)
    before = wide.clone()
    found = scene(rows, VOCABULARY).on(device)
    logits = wide[:, :VOCABULARY]
    tokens = choose_tokens(logits, found.entries, found.sampling, found.history, SMALL).tokens
    assert torch.equal(wide, before)
    assert tokens.tolist() == sample(logits.cpu(), rows, device)


def test_the_products_cut_gives_the_references_tokens(device: str) -> None:
    """With vocabularies of more than one span, and of one that is hardly begun."""
    for vocabulary in (9001, 70):
        rows = [row for row in WAYS[::2] if not row.mask and not row.allowed and not row.bias]
        logits = torch.randn(len(rows), vocabulary, generator=torch.Generator().manual_seed(8)) * 3
        check(logits, rows, device, CUT)


@pytest.mark.gpu
def test_draws_have_the_right_frequencies() -> None:
    """Too many for the interpreter; the noise of single draws is compared above."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 2
    for row in (Row(top_k=6, top_p=0.9), Row(top_p=0.8)):
        rows = [dataclasses.replace(row, seed=seed) for seed in range(4000)]
        counts = np.bincount(sample(logits.expand(len(rows), -1), rows, "cuda"), minlength=40)
        expected = distribution(logits.double().numpy(), row) * len(rows)
        assert counts[expected == 0].sum() == 0
        statistic, limit = chi_square(counts, expected)
        assert statistic < limit


FULL = [row for row in WAYS if row.mask is None and not row.allowed]
LARGE = [
    Row(top_k=40, top_p=0.95, temperature=0.8),
    Row(top_k=1000),
    Row(top_k=5000, top_p=0.9),
    Row(top_k=100_000, temperature=2.0),
    Row(top_p=0.999),
    Row(top_p=0.001),
    Row(mask=tuple(range(0, 100_000, 3)), top_k=50),
    Row(mask=(77, 100_001), top_k=50),
]


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_at_full_size(spread: float) -> None:
    rows = [*FULL, *LARGE]
    for vocabulary, kind in ((128256, torch.bfloat16), (151936, torch.float32)):
        logits = torch.randn(len(rows), vocabulary, generator=torch.Generator().manual_seed(1)) * spread
        check(logits.to(kind), rows, "cuda", CUT)


@pytest.mark.gpu
def test_flat_and_peaked_rows_of_full_size() -> None:
    rows = [Row(), Row(temperature=0), Row(top_k=40), Row(top_p=0.95), Row(top_k=40, top_p=0.5), Row(min_p=0.5)]
    flat = torch.full((len(rows), 128256), 1.5, dtype=torch.bfloat16)
    check(flat, rows, "cuda", CUT)
    flat[:, 99_999] = 30.0
    assert check(flat, rows, "cuda", CUT)[1:] == [99_999] * 5


@pytest.mark.gpu
def test_a_graph_holds_it_and_neighbours_change_nothing() -> None:
    rows = [dataclasses.replace(row, drafts=(), seed=seed) for seed in range(8) for row in FULL]
    logits = (torch.randn(len(rows), 128256, generator=torch.Generator().manual_seed(2)) * 3).bfloat16().cuda()
    found = scene(rows, 128256).on("cuda")
    eager = choose_tokens(logits, found.entries, found.sampling, found.history).tokens
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = choose_tokens(logits, found.entries, found.sampling, found.history).tokens
    for _ in range(2):
        captured.fill_(-7)
        graph.replay()
        assert torch.equal(captured, eager)
    for at in range(0, len(rows), 13):
        alone = scene(rows[at : at + 1], 128256).on("cuda")
        token = choose_tokens(logits[at : at + 1], alone.entries, alone.sampling, alone.history).tokens
        assert token == eager[at]
