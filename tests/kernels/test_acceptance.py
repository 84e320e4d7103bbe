"""What a step leaves in the slots, by acceptance.py and acceptance_triton.py, against a loop over its rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from kernels.acceptance import REJECTED, accept
from kernels.acceptance_triton import accept_rows
from protocol import steps
from tests.kernels.sampling_scene import Row, Scene, scene

VOCABULARY = 40


def plainly(tokens: list[int], given: Scene, rows: list[Row]) -> tuple[list[int], Scene]:
    """Row after row, entry after entry."""
    found, history = list(tokens), copy.deepcopy(given.history)
    for slot, row in enumerate(rows):
        right = True
        for at in range(int(given.entries.start[slot]), int(given.entries.start[slot + 1])):
            if not right:
                found[at] = REJECTED
                continue
            token, position = max(tokens[at], 0), int(history.known[slot])
            if position < history.tokens.shape[1]:
                history.tokens[slot, position] = token
            history.known[slot] += 1
            if row.penalised:
                history.counts[slot, token] += 2
            right = tokens[at] == int(given.entries.drafts[at])
    return found, Scene(given.sampling, history, given.entries, given.lasts, given.row_of)


def check(tokens: list[int], given: Scene, rows: list[Row], device: str) -> list[int]:
    expected, after = plainly(tokens, given, rows)
    count = int(given.entries.start[len(rows)])
    for take, place in ((accept, "cpu"), (accept_rows, device)):
        moved = given.on(place)
        found = torch.tensor(tokens, dtype=torch.int32, device=place)
        take(found, moved.entries, moved.sampling, moved.history)
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


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int, device: str) -> None:
    chance = np.random.default_rng(seed)
    rows = [
        Row(
            tokens=tuple(chance.integers(0, VOCABULARY, 3).tolist()),
            drafts=tuple(chance.integers(0, 3, chance.choice([0, 0, 1, 2, 5])).tolist()),
            presence=float(chance.choice([0.0, 1.0])),
        )
        for _ in range(9)
    ]
    given = scene(rows, VOCABULARY, padding=int(chance.integers(0, 4)))
    guesses = chance.integers(-1, 3, len(given.row_of))
    right = given.entries.drafts.numpy()
    tokens = np.where((chance.random(len(guesses)) < 0.7) & (right >= 0), right, guesses)
    check(tokens.tolist(), given, rows, device)
