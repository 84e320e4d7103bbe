"""The counter RNG: known answers, distribution, and that a draw depends on its own counter alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from penstock.kernels import random

FULL = 0xFFFFFFFF
# The known answers of the Random123 library for philox4x32-10: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def chi_square_limit(freedom: int) -> float:
    """The value that a chi-square of so many degrees of freedom exceeds once in 100,000 (Wilson and Hilferty, 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    found = random.philox((c0, c1, c2, c3), (torch.tensor([key[0]]), torch.tensor([key[1]])))
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers_in_numpy(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (np.array([word], np.int64) for word in counter)
    found = random.philox((c0, c1, c2, c3), (np.array([key[0]], np.int64), np.array([key[1]], np.int64)))
    assert tuple(int(word[0]) for word in found) == words


def test_counter_and_key_are_laid_out_as_documented() -> None:
    seed, position, token = 0x1234567_89ABCDEF, 77, 1022
    words = random.philox(
        (torch.tensor([token >> 2]), torch.tensor([position]), torch.tensor([0]), torch.tensor([0])),
        (torch.tensor([0x89ABCDEF]), torch.tensor([0x1234567])),
    )
    expected = random.gumbel(words[token & 3])
    rows = random.gumbel_rows(torch.tensor([seed]), torch.tensor([position]), 2000)
    assert rows.shape == (1, 2000)
    assert rows[0, token] == expected


def test_purposes_have_words_of_their_own() -> None:
    seeds, positions = np.array([7, -1, 7]), np.array([0, 12, 1])
    sampling = random.sampling_words(torch.from_numpy(seeds), torch.from_numpy(positions), torch.zeros(3).long())
    found = random.acceptance_words(seeds, positions)
    assert len({*found.tolist(), *sampling.flatten().tolist()}) == 3 + 12
    words = (np.array([word]) for word in (0, 12, random.ACCEPTANCE, 0))
    key = np.array([0xFFFFFFFF])
    assert found[1] == random.philox(tuple(words), (key, key))[0][0]  # type: ignore[arg-type]


@pytest.mark.parametrize("vocabulary", [1, 5, 4096, 40001])
def test_single_tokens_and_whole_rows_agree(vocabulary: int) -> None:
    seeds = torch.tensor([3, -(2**63), 2**63 - 1])
    positions = torch.tensor([0, 5, 1 << 20])
    rows = random.gumbel_rows(seeds, positions, vocabulary)
    at = torch.arange(vocabulary).expand(3, -1)
    singles = random.gumbel_at(
        seeds[:, None].expand_as(at).flatten(), positions[:, None].expand_as(at).flatten(), at.flatten()
    )
    assert torch.equal(rows.flatten(), singles)


def test_a_row_is_the_same_in_any_company() -> None:
    seeds, positions = torch.arange(100) * 12345, torch.arange(100) % 7
    together = random.gumbel_rows(seeds, positions, 997)
    for row in (0, 41, 99):
        assert torch.equal(random.gumbel_rows(seeds[row : row + 1], positions[row : row + 1], 997)[0], together[row])


def test_extreme_words_stay_finite_and_within_the_bounds() -> None:
    words = torch.tensor([0, 1, FULL - 1, FULL])
    uniform = random.uniform(words)
    assert (uniform > 0).all()
    assert (uniform < 1).all()
    noise = random.gumbel(words)
    assert noise.isfinite().all()
    assert 0 < random.GUMBEL_MAX - noise.max() < 0.01
    assert 0 < noise.min() - random.GUMBEL_MIN < 0.01


def test_uniform_words_over_tokens_positions_and_seeds() -> None:
    bins, draws = 256, 1 << 18
    for seeds, positions, tokens in (
        (torch.full((draws,), 9), torch.full((draws,), 4), torch.arange(draws)),
        (torch.full((draws,), 9), torch.arange(draws), torch.full((draws,), 4)),
        (torch.arange(draws), torch.full((draws,), 9), torch.full((draws,), 4)),
    ):
        noise = random.gumbel_at(seeds, positions, tokens).double()
        uniform = torch.exp(-torch.exp(-noise))
        counts = torch.histc(uniform, bins, 0, 1)
        chi_square = float(((counts - draws / bins) ** 2 / (draws / bins)).sum())
        assert chi_square < chi_square_limit(bins - 1)


def test_gumbel_moments() -> None:
    noise = random.gumbel_rows(torch.arange(64), torch.arange(64), 8192).double()
    assert abs(float(noise.mean()) - 0.5772156649) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02


def test_neighbouring_counters_are_uncorrelated() -> None:
    noise = random.gumbel_rows(torch.arange(256), torch.arange(256), 1024).double()
    noise = (noise - noise.mean()) / noise.std()
    for other in (noise.roll(1, 0), noise.roll(1, 1), noise.roll(4, 1)):
        assert abs(float((noise * other).mean())) < 0.01
