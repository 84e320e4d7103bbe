"""What comes out of drafts is the target's own: the same distribution at every position, and the very same tokens."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from penstock.kernels.records import REJECTED
from tests.kernels.acceptance_scene import (
    CASES,
    DEPTH,
    QUALITIES,
    Crowd,
    chance_of,
    chi_square,
    exact,
    model,
    position_statistics,
    uniform_distance,
)

pytestmark = pytest.mark.sweep

DRAWS = 100_000
SEED = 6
LEAST = 0.01  # a chance below this would tell drafts from the target


def chances(case: str, quality: str, draws: int, seed: int, device: str) -> list[float]:
    """That the target itself would look no better, for each position of the draft."""
    given = model(SEED)
    crowd = Crowd(given, CASES[case], draws, zlib.crc32(f"{case} {quality} {seed}".encode()), device)
    drafts = crowd.drafts(quality)
    tokens = crowd.step(drafts)
    return [chance_of(*one) for one in position_statistics(given, CASES[case], drafts, tokens)]


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("case", CASES)
def test_every_position_of_a_draft_has_the_targets_distribution(
    case: str, quality: str, device: str, one_thread: None
) -> None:
    found = chances(case, quality, DRAWS, SEED, device)
    assert len(found) == DEPTH + 1
    assert min(found) > LEAST, found


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_over_many_seeds_nothing_tells_drafts_from_the_target(case: str, device: str, one_thread: None) -> None:
    """Of one distribution chances are uniform: the smallest of so many may be small, but not too many of them."""
    seeds = range(100, 120)
    every = [chances(case, quality, DRAWS, seed, device) for quality in QUALITIES for seed in seeds]
    found = [chance for some in every for chance in some if chance < 1]  # 1: too few came so far to tell
    distance, limit = uniform_distance(found)
    assert distance < limit
    assert min(found) > LEAST / len(found)


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_of_a_seed_are_the_same_with_and_without_drafts(case: str, device: str, one_thread: None) -> None:
    """Step after step, with the slots as accepted drafts left them."""
    rows, length = 2000, 8
    given, nothing = model(SEED), torch.empty(rows, 0, dtype=torch.int32)
    alone = Crowd(given, CASES[case], rows, SEED, device)
    for _ in range(length):
        alone.step(nothing)
    expected = alone.sequences()[:, :length]
    for quality in QUALITIES:
        crowd = Crowd(given, CASES[case], rows, SEED, device)
        steps = accepted = 0
        while steps < length and int((crowd.said() < length).sum()):
            tokens = crowd.step(crowd.drafts(quality))
            accepted += int((tokens[:, 1:] != REJECTED).sum())
            steps += 1
        assert torch.equal(crowd.sequences()[:, :length], expected), quality
        assert accepted > rows / 10, "the drafts were good for nothing"


def test_drafts_that_share_the_noise_are_better() -> None:
    """The coupling: a near model that draws with the same noise mostly draws the same token."""
    rates = []
    for quality in QUALITIES:
        crowd = Crowd(model(SEED), CASES["temperature"], 5000, SEED)
        rates.append(float((crowd.step(crowd.drafts(quality))[:, 1] != REJECTED).double().mean()))
    assert rates[0] > 1.2 * rates[1]


def test_acceptance_that_looks_at_anything_else_is_found_out(one_thread: None) -> None:
    """Drafts kept in one of fifty cases whatever was drawn: the measure above tells it at every drafted position."""
    given = model(SEED)
    crowd = Crowd(given, CASES["temperature"], DRAWS, SEED)
    drafts = crowd.drafts("independent")
    tokens = crowd.step(drafts)
    kept = torch.from_numpy(np.random.default_rng(SEED).random(len(tokens)) < 0.02) & (drafts[:, 0] != 7)
    tokens[kept, 0] = drafts[kept, 0]
    assert chance_of(*position_statistics(given, CASES["temperature"], drafts, tokens)[0]) < 1e-6


def test_chi_square_of_known_numbers() -> None:
    statistic, freedom = chi_square(np.array([44, 56, 0]), np.array([50.0, 50.0, 0.0]))
    assert (statistic, freedom) == (pytest.approx(1.44), 1)
    assert chance_of(statistic, freedom) == pytest.approx(0.2301, abs=1e-4)
    assert chance_of(11.0705, 5) == pytest.approx(0.05, abs=1e-6)
    assert chi_square(np.array([2, 2, 16]), np.array([2.0, 3.0, 15.0]))[1] == 1  # the small ones are one bin
    with pytest.raises(AssertionError):
        chi_square(np.array([1, 9]), np.array([0.0, 10.0]))


def test_the_exact_distribution_is_one() -> None:
    given = model(SEED)
    for case in CASES.values():
        for prefix in ((), (2,), (2, 2), (4, 2, 4)):
            assert exact(given, case, prefix).sum() == pytest.approx(1.0, abs=1e-12)
