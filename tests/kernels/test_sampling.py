"""The sampler against a plain reference in float64, its distributions, and that a row never depends on its company."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.kernels import sampling
from penstock.kernels.sampling import Draws, sample_entries
from tests.kernels.sampling_scene import (
    EDGES,
    Row,
    chi_square,
    distribution,
    edge_logits,
    random_rows,
    scene,
    scores,
)

VOCABULARY = 64


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The token of each row's last entry."""
    found = scene(rows, logits.shape[1])
    tokens = sample_entries(logits[found.row_of], found.entries, found.sampling, found.history).tokens
    return tokens[found.lasts].tolist()


FILTERS = [
    Row(),
    Row(temperature=0.7),
    Row(temperature=2.0),
    Row(top_k=5),
    Row(top_k=1000),
    Row(top_p=0.8),
    Row(top_p=0.05),
    Row(min_p=0.1),
    Row(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    Row(temperature=1.5, top_p=0.95, min_p=0.05, presence=0.5),
    Row(repetition=1.3, frequency=0.4, presence=-0.3, tokens=(5, 6, 5, 6, 7, 6), prompt=2),
    Row(bias=((7, 3.0), (8, -100.0)), top_k=8),
    Row(allowed=(3, 9, 27, 40)),
    Row(bad_words=((4,), (2, 3, 5), (3, 6), (1, 2, 3, 7)), tokens=(1, 2, 3), prompt=1),
    Row(forbidden_until=((10, 99), (11, 2)), temperature=0.9),
    Row(mask=(1, 2, 3, 31, 32, 63), allowed=(2, 3, 32, 33, 63)),
    Row(bad_words=((5, 6, 4), (6, 8)), repetition=1.5, frequency=0.5, drafts=(5, 6), forbidden_until=((9, 6), (7, 5))),
]


@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_sampled_distribution(row: Row) -> None:
    draws = 6_000
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2
    rows = [dataclasses.replace(row, seed=seed) for seed in range(draws)]
    expected = distribution(logits.double().numpy(), row) * draws
    counts = np.bincount(sample(logits.expand(draws, -1), rows), minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    statistic, limit = chi_square(counts, expected)
    assert statistic < limit


@pytest.mark.parametrize("case", range(30))
def test_random_rows_match_the_plain_reference_noise_included(case: int) -> None:
    rows = random_rows(np.random.default_rng(case), 40, VOCABULARY)
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(case)) * 2
    for token, row, line in zip(sample(logits, rows), rows, logits, strict=True):
        expected = scores(line.double().numpy(), row)
        # Equal within float32: where the best two are closer than its rounding either may win.
        assert expected[token] > expected.max() - 1e-4


def test_a_row_is_the_same_alone_and_in_any_company() -> None:
    logits = torch.randn(len(FILTERS) + 1, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    rows = [*FILTERS, Row(temperature=0)]
    together = sample(logits, rows)
    assert together == [sample(logits[at : at + 1], [row])[0] for at, row in enumerate(rows)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])


def test_few_candidates_and_whole_rows_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    peaked = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 40
    rows = [Row(seed=seed, temperature=0.8) for seed in range(64)]
    few = sample(peaked, rows)
    monkeypatch.setattr(sampling, "GUMBEL_MAX", 1e9)
    assert sample(peaked, rows) == few
    assert len(set(few)) > 10


def test_greedy_takes_the_lowest_of_equals_and_needs_no_noise() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[0, [9, 4, 60]] = 2.0
    logits[2, 63] = 0.5
    assert sample(logits, [Row(temperature=0, seed=seed) for seed in (1, 2, 3)]) == [4, 0, 63]


def test_equals_at_a_floor_are_all_kept() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, :10] = 1.0
    for row in (Row(top_k=3), Row(top_p=0.1), Row(min_p=0.9)):
        found = {sample(logits, [dataclasses.replace(row, seed=seed)])[0] for seed in range(300)}
        assert found == set(range(10))


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(1))
    assert sample(logits, [Row(top_k=1, seed=at) for at in range(50)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [*FILTERS, Row(temperature=0)], ids=str)
def test_a_row_with_a_non_finite_logit_fails_alone(bad: float, row: Row) -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(7))
    rows = [Row(top_p=0.9, seed=3), row, Row(temperature=0)]
    good = sample(logits, rows)
    logits[1, 13] = bad
    assert sample(logits, rows) == [good[0], -1, good[2]]
    assert good[1] != -1


def test_a_row_with_every_token_forbidden_fails_alone() -> None:
    logits = torch.randn(2, VOCABULARY)
    everything = Row(allowed=(5,), bias=((5, -math.inf),))
    for nothing in (everything, dataclasses.replace(everything, temperature=0, repetition=1.2)):
        found = sample(logits, [nothing, Row(temperature=0)])
        assert found == [-1, int(logits[1].argmax())]


@pytest.mark.parametrize(("row", "kept"), EDGES, ids=str)
def test_a_nucleus_that_reaches_its_mass_exactly_is_complete(row: Row, kept: set[int]) -> None:
    logits = edge_logits(VOCABULARY)
    assert torch.equal(logits[:4].exp(), torch.tensor([1.0, 0.5, 0.25, 0.25])), "these are exact"
    rows = [dataclasses.replace(row, seed=seed) for seed in range(200)]
    assert set(sample(logits.expand(200, -1), rows)) == kept


@pytest.mark.parametrize("top_k", [0, 700])
def test_a_nucleus_is_the_smallest_set_that_reaches_its_mass(top_k: int) -> None:
    vocabulary = 5000
    spread = torch.tensor([[0.01], [1], [3], [9]])
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(1)) * spread
    logits -= logits.amax(-1, keepdim=True)
    for p in (0.3, 0.9, 0.999):
        ways = torch.full((4,), top_k), torch.full((4,), p)
        draws = Draws(torch.arange(4), torch.ones(4), torch.zeros(4), *ways, top_k, True)
        floor = sampling.floors(logits, draws)
        for at in range(4):
            left = logits[at].sort(descending=True).values[: top_k or vocabulary].double().exp()
            kept = logits[at][logits[at] >= floor[at]].double().exp()
            assert len(kept) <= len(left)
            assert float(kept.sum() - kept.min()) < p * float(left.sum()) * (1 + 1e-6)
            assert float(kept.sum()) > p * float(left.sum()) * (1 - 1e-6)


@pytest.mark.parametrize("row", [Row(temperature=0), Row(), Row(temperature=0.8, top_p=0.95, top_k=40)], ids=str)
def test_sixty_four_rows_of_a_small_vocabulary_take_few_milliseconds(row: Row) -> None:
    vocabulary, rows = 4096, 64
    logits = torch.randn(rows, vocabulary) * 3
    found = scene([dataclasses.replace(row, seed=seed) for seed in range(rows)], vocabulary)
    threads, best = torch.get_num_threads(), math.inf
    torch.set_num_threads(1)  # so that this thread's CPU time is all of it, whatever else runs
    try:
        for _ in range(5):
            start = time.thread_time()
            sample_entries(logits, found.entries, found.sampling, found.history)
            best = min(best, time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert best < 0.1  # 1 to 9 ms


def test_logits_stay_as_they_are() -> None:
    logits = torch.randn(2, VOCABULARY)
    before = logits.clone()
    sample(logits, [Row(bias=((3, 5.0),), presence=1.0), Row(mask=(3,))])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_models_type_is_taken(kind: torch.dtype) -> None:
    logits = (torch.randn(len(FILTERS), VOCABULARY, generator=torch.Generator().manual_seed(9)) * 3).to(kind)
    assert sample(logits, FILTERS) == sample(logits.float(), FILTERS)


def test_entries_behind_drafts_sample_as_if_the_drafts_stood_there() -> None:
    chance = np.random.default_rng(4)
    for row in [row for row in FILTERS if not row.drafts]:
        drafts = tuple(int(token) for token in chance.integers(1, 9, 3))
        logits = torch.from_numpy(chance.normal(size=(1, VOCABULARY)) * 2).float()
        found = scene([dataclasses.replace(row, drafts=drafts)], VOCABULARY)
        tokens = sample_entries(logits.expand(4, -1), found.entries, found.sampling, found.history).tokens
        plain = [dataclasses.replace(row, tokens=row.tokens + drafts[:depth]) for depth in range(4)]
        assert tokens.tolist() == [sample(logits, [one])[0] for one in plain]


def test_padding_changes_nothing() -> None:
    logits = torch.randn(len(FILTERS), VOCABULARY, generator=torch.Generator().manual_seed(6))
    found = scene(FILTERS, VOCABULARY, padding=3)
    padded = torch.cat([logits[found.row_of[:-3]], torch.full((3, VOCABULARY), math.nan)])
    tokens = sample_entries(padded, found.entries, found.sampling, found.history).tokens
    assert tokens[found.lasts].tolist() == sample(logits, FILTERS)
    assert tokens[-3:].tolist() == [-1] * 3
