"""As many drafts as give the most tokens per second, against every other choice of lengths."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.speculation.step_cost import KNOWN, StepCost, draft_lengths

CHANCES = st.lists(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3).map(lambda row: np.cumprod(row).tolist()), max_size=4
)


def measured(rows: int, fixed: float, each: float) -> StepCost:
    cost = StepCost()
    for positions in (rows, 4 * rows + 16):
        for _ in range(KNOWN):
            cost.observe(rows, positions, fixed + each * positions)
    return cost


def rate(rows: int, chances: list[list[float]], lengths: tuple[int, ...], fixed: float, each: float) -> float:
    tokens = rows + sum(sum(row[:length]) for row, length in zip(chances, lengths, strict=True))
    return tokens / (fixed + each * (rows + sum(lengths)))


@given(CHANCES, st.integers(0, 4), st.floats(0.0, 1.0), st.floats(0.001, 1.0))
def test_no_other_lengths_give_more(chances: list[list[float]], others: int, fixed: float, each: float) -> None:
    rows = len(chances) + others
    lengths = draft_lengths(rows, chances, measured(rows, fixed, each), 1000) if rows else []
    best = (
        max(
            (rate(rows, chances, found, fixed, each) for found in product(*[range(len(row) + 1) for row in chances])),
            default=0.0,
        )
        if rows
        else 0.0
    )
    assert not rows or rate(rows, chances, tuple(lengths), fixed, each) >= best * (1 - 1e-9)


@given(CHANCES, st.integers(0, 9))
def test_never_more_than_allowed(chances: list[list[float]], most: int) -> None:
    lengths = draft_lengths(max(1, len(chances)), chances, StepCost(), most)
    assert sum(lengths) == min(most, sum(map(len, chances)))
    assert all(length <= len(row) for length, row in zip(lengths, chances, strict=True))


def test_where_arithmetic_is_full_nothing_is_drafted() -> None:
    chances = [[0.8, 0.64]] * 64
    assert draft_lengths(64, chances, measured(64, 0.0, 0.001), 1000) == [0] * 64
    assert draft_lengths(64, chances, measured(64, 0.01, 1e-7), 1000) == [2] * 64


def test_what_nothing_is_known_of_is_tried() -> None:
    assert draft_lengths(3, [[0.5, 0.25]], StepCost(), 100) == [2]


def test_a_hopeless_row_gets_none_beside_a_good_one() -> None:
    assert draft_lengths(2, [[0.01, 0.001], [0.9, 0.8]], measured(2, 0.01, 0.0005), 100) == [0, 2]


def test_drafts_are_worth_the_time_of_the_host() -> None:
    """A token more is worth a row's share of the step: 25 us among 64 rows, all of it for one."""
    cost = measured(64, 1.6e-3, 0.0)
    assert draft_lengths(64, [[1.0, 1.0]], cost, 100, 6e-5) == [0]
    assert draft_lengths(64, [[1.0, 1.0], [1.0]], cost, 100, 6e-5) == [2, 1]
    assert draft_lengths(1, [[1.0]], measured(1, 1e-3, 0.0), 100, 6e-5) == [1]
    dear = measured(1, 0.7e-3, 0.3e-3)  # where further positions take time, too
    assert draft_lengths(1, [[0.5]], dear, 100) == [1]
    assert draft_lengths(1, [[0.5]], dear, 100, 3e-4) == [0]
