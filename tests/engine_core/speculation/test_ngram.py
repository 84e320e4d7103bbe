"""Prompt lookup against a scan of the whole sequence."""

from __future__ import annotations

import time
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.speculation.ngram import BULK, PromptLookup, copied


def scanned(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The same by looking everywhere."""
    for length in range(min(longest, len(tokens)), shortest - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                line = list(tokens)
                for source in range(place, place + most):
                    line.append(line[source])
                return line[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=120),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 8),
    st.lists(st.integers(1, 3 * BULK), min_size=1, max_size=30),
)
def test_it_finds_what_a_scan_finds(tokens: list[int], shortest: int, more: int, most: int, steps: list[int]) -> None:
    lookup = PromptLookup(1 << 20, shortest, shortest + more)  # large tables: no run is forgotten for another
    line, place, proposed = array("i"), 0, [-1] * most
    for step in steps:
        new = tokens[place : place + step]
        line.extend(new)
        place += step
        found = lookup.propose(line, (), most)
        if new and not (proposed and new == proposed[: len(new)]) and len(new) < most:  # no copy that goes on
            assert found == scanned(line.tolist(), shortest, shortest + more, most)
        proposed = found


def test_a_copy_that_holds_is_gone_on_with() -> None:
    line = array("i", [1, 2, 3, 4, 9, 2, 3, 7, 1, 2])
    lookup = PromptLookup(64, 2, 4)
    assert lookup.propose(line, (), 2) == [3, 4]
    line.append(3)
    assert lookup.propose(line, (), 2) == [4, 9], "2, 3 stands elsewhere, and later"
    line.append(7)
    assert lookup.propose(line, (), 2) == [1, 2]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=400), st.integers(1, 8))
def test_small_tables_forget_and_never_lie(tokens: list[int], most: int) -> None:
    """What is found follows an earlier place of the same run, whichever one."""
    lookup, line = PromptLookup(8, 1, 2), array("i")
    for token in tokens:
        line.append(token)
        found = lookup.propose(line, (), most)
        if found:
            assert any(line[place - 1] == token and line[place] == found[0] for place in range(1, len(line)))


def test_the_longest_run_wins_then_the_latest_place() -> None:
    line = array("i", [1, 2, 3, 7, 9, 3, 8, 9, 3, 6, 5, 2, 3])
    assert PromptLookup(64, 1, 3).propose(line, (), 2) == [7, 9]  # after 2, 3
    assert PromptLookup(64, 1, 1).propose(line, (), 2) == [6, 5]  # after the latest 3
    assert PromptLookup(64, 3, 3).propose(line, (), 2) == []


def test_what_is_known_to_come_is_part_of_the_run() -> None:
    line = array("i", [1, 2, 3, 4, 5, 1])
    assert PromptLookup(64, 2, 3).propose(line, (), 2) == []
    assert PromptLookup(64, 2, 3).propose(line, [2, 3], 2) == [4, 5]


def test_a_copy_goes_on_with_itself() -> None:
    line = array("i", [7, 1, 2, 1, 2])
    assert PromptLookup(64, 2, 2).propose(line, (), 7) == [1, 2, 1, 2, 1, 2, 1]
    assert copied(array("i", [5, 6]), [9], 1, 5) == [6, 9, 6, 9, 6]


@pytest.mark.parametrize("bulk", [True, False])
def test_a_step_costs_no_scan(bulk: bool) -> None:
    """The processor's own time; far above what it takes, far below a scan."""
    tokens = np.random.default_rng(0).integers(0, 100_000, 60_000, dtype=np.int32)
    lookup, line = PromptLookup(100_000, 2, 4), array("i", tokens.tobytes())
    began = time.thread_time()
    lookup.propose(line, (), 4)
    assert time.thread_time() - began < 1.0
    steps = 1000
    began = time.thread_time()
    for token in tokens[:steps].tolist():
        line.extend([token] * (2 * BULK) if bulk else [token])
        lookup.propose(line, (), 4)
    assert (time.thread_time() - began) / steps < 1e-3
