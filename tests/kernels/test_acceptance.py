"""What a step leaves in the slots, by acceptance.py and acceptance_triton.py, against a loop over its rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from penstock.kernels.random import ACCEPTANCE, philox
from penstock.kernels.records import NO_DRAFT, OWN_DRAFT, REJECTED
from penstock.kernels.sampling import accept, marked_entries
from penstock.kernels.sampling_triton import accept_rows
from penstock.protocol import steps
from tests.kernels.sampling_scene import Row, Scene, chi_square, scene

VOCABULARY = 40


def coin(seed: int, position: int) -> float:
    """In [0, 1), of a row's seed and a token's position."""
    words = (torch.tensor([word]) for word in (0, position, ACCEPTANCE, 0))
    key = torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([(seed >> 32) & 0xFFFFFFFF])
    return int(philox(tuple(words), key)[0]) / 2**32  # type: ignore[arg-type]


def plainly(tokens: list[int], given: Scene, rows: list[Row], rate: float | None = None) -> tuple[list[int], Scene]:
    """Row after row, entry after entry."""
    found, history = list(tokens), copy.deepcopy(given.history)
    for slot, row in enumerate(rows):
        right = True
        for at in range(int(given.entries.start[slot]), int(given.entries.start[slot + 1])):
            if not right:
                found[at] = REJECTED
                continue
            draft, position = int(given.entries.drafts[at]), int(history.known[slot])
            right = tokens[at] == draft
            if rate is not None:
                right = tokens[at] >= 0 and draft != NO_DRAFT and coin(row.seed, position) < rate
                found[at] = draft if right else tokens[at]
            token = max(found[at], 0)
            if position < history.tokens.shape[1]:
                history.tokens[slot, position] = token
            history.known[slot] += 1
            if row.penalised:
                history.counts[slot, token] += 2
    return found, Scene(given.sampling, history, given.entries, given.lasts, given.row_of)


def check(tokens: list[int], given: Scene, rows: list[Row], device: str, rate: float | None = None) -> list[int]:
    expected, after = plainly(tokens, given, rows, rate)
    count = int(given.entries.start[len(rows)])
    for take, place in ((accept, "cpu"), (accept_rows, device)):
        moved = given.on(place)
        found = torch.tensor(tokens, dtype=torch.int32, device=place)
        take(found, moved.entries, moved.sampling, moved.history, rate)
        assert found.tolist()[:count] == expected[:count]
        for name in ("tokens", "known", "counts"):
            assert torch.equal(getattr(moved.history, name).cpu(), getattr(after.history, name)), name
    return expected


def test_the_mark_is_the_protocols() -> None:
    assert REJECTED == steps.REJECTED


def test_plain_rows_take_their_tokens(device: str) -> None:
    rows = [Row(tokens=(1, 2)), Row(tokens=(4, 5, 6), presence=1.0), Row(tokens=(7,))]
    assert check([9, 8, -1], scene(rows, VOCABULARY, padding=2), rows, device) == [9, 8, -1]


@pytest.mark.parametrize(
    ("drawn", "kept"),
    [
        ([5, 6, 7], [5, 6, 7]),
        ([5, 9, 7], [5, 9, REJECTED]),
        ([9, 6, 7], [9, REJECTED, REJECTED]),
        ([-1, 6, 7], [-1, REJECTED, REJECTED]),
        ([5, -1, 7], [5, -1, REJECTED]),
        ([5, 6, -1], [5, 6, -1]),
    ],
)
def test_entries_count_up_to_the_first_wrong_draft(drawn: list[int], kept: list[int], device: str) -> None:
    rows = [Row(drafts=(5, 6), frequency=0.5), Row(tokens=(1,))]
    assert check([*drawn, 3], scene(rows, VOCABULARY), rows, device) == [*kept, 3]


def test_the_same_token_twice_counts_twice(device: str) -> None:
    rows = [Row(tokens=(5,), drafts=(5, 5), presence=0.5)]
    check([5, 5, 5], scene(rows, VOCABULARY), rows, device)


def test_nothing_is_written_past_the_end_of_a_slots_tokens(device: str) -> None:
    rows = [Row(tokens=(1, 2, 3)), Row(tokens=(1,), drafts=(2, 2, 2, 2))]
    given = scene(rows, VOCABULARY)
    given.history.known[:2] = given.history.tokens.shape[1] - torch.tensor([0, 2])
    check([8, 2, 2, 2, 2, 9], given, rows, device)


def random_step(seed: int) -> tuple[list[int], Scene, list[Row]]:
    """Rows with and without drafts, and what was drawn for them, which is mostly the draft."""
    chance = np.random.default_rng(seed)
    rows = [
        Row(
            tokens=tuple(chance.integers(0, VOCABULARY, 3).tolist()),
            drafts=tuple(chance.integers(0, 3, chance.choice([0, 0, 1, 2, 5])).tolist()),
            presence=float(chance.choice([0.0, 1.0])),
            seed=int(chance.integers(-(2**63), 2**63)),
        )
        for _ in range(9)
    ]
    given = scene(rows, VOCABULARY, padding=int(chance.integers(0, 4)))
    guesses = chance.integers(-1, 3, len(given.row_of))
    right = given.entries.drafts.numpy()
    tokens = np.where((chance.random(len(guesses)) < 0.7) & (right >= 0), right, guesses)
    return tokens.tolist(), given, rows


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int, device: str) -> None:
    tokens, given, rows = random_step(seed)
    check(tokens, given, rows, device)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_at_a_rate(seed: int, rate: float, device: str) -> None:
    tokens, given, rows = random_step(seed)
    check(tokens, given, rows, device, rate)


@pytest.mark.parametrize("rate", [None, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_marked_tokens_are_taken_elsewhere_as_they_were_here(seed: int, rate: float | None, device: str) -> None:
    """Without the drafts, and without the rate at which they were kept."""
    tokens, given, rows = random_step(seed)
    marked = check(tokens, given, rows, device, rate)
    _, after = plainly(tokens, given, rows, rate)
    for take, place in ((accept, "cpu"), (accept_rows, device)):
        moved = given.on(place)
        moved.entries.drafts.fill_(OWN_DRAFT)
        found = torch.tensor(marked, dtype=torch.int32, device=place)
        take(found, marked_entries(found, moved.entries), moved.sampling, moved.history)
        assert found.tolist() == marked
        for name in ("tokens", "known", "counts"):
            assert torch.equal(getattr(moved.history, name).cpu(), getattr(after.history, name)), name


def test_at_rate_one_every_draft_is_kept_whatever_was_drawn(device: str) -> None:
    rows = [Row(drafts=(5, 6)), Row(drafts=(7,))]
    assert check([1, 2, 3, 7, 9], scene(rows, VOCABULARY), rows, device, 1.0) == [5, 6, 3, 7, 9]


def test_at_rate_zero_no_draft_is_kept_though_it_was_drawn(device: str) -> None:
    rows = [Row(drafts=(5, 6)), Row(drafts=(7,)), Row()]
    found = check([5, 6, 3, 7, 9, 4], scene(rows, VOCABULARY), rows, device, 0.0)
    assert found == [5, REJECTED, REJECTED, 7, REJECTED, 4]


def test_at_any_rate_an_entry_without_a_token_fails(device: str) -> None:
    rows = [Row(drafts=(5, 6))]
    assert check([1, -1, 3], scene(rows, VOCABULARY), rows, device, 1.0) == [5, -1, REJECTED]


def test_drafts_are_kept_at_the_rate_independently_of_one_another() -> None:
    """4,000 rows of four drafts: the lengths of what is kept are geometric."""
    rate, count = 0.8, 4000
    rows = [Row(drafts=(1, 2, 3, 4), seed=seed) for seed in range(count)]
    given = scene(rows, VOCABULARY)
    tokens = torch.full((5 * count,), 9, dtype=torch.int32)
    accept(tokens, given.entries, given.sampling, given.history, rate)
    lengths = (tokens.view(count, 5) != REJECTED).sum(1) - 1
    due = np.array([*(rate**kept * (1 - rate) for kept in range(4)), rate**4]) * count
    statistic, limit = chi_square(np.bincount(lengths, minlength=5), due)
    assert statistic < limit
