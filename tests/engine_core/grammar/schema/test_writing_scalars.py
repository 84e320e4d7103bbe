"""Patterns of numerals between two bounds against arithmetic."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.grammar.schema.writing_scalars import numerals

BOUND = st.one_of(st.none(), st.integers(-120, 120), st.integers(-(10**20), 10**20))


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.sampled_from(("integer", "number", "fraction")), BOUND, BOUND, st.booleans(), st.booleans(), st.data())
def test_a_numeral_matches_where_its_number_is_between_the_bounds(
    kind: str, low: int | None, high: int | None, low_open: bool, high_open: bool, data: st.DataObject
) -> None:
    if kind != "number":
        low_open = high_open = False
    pattern = numerals(kind, low, high, low_open=low_open, high_open=high_open)
    near = [bound + off for bound in (low, high) if bound is not None for off in (-1, 0, 1)]
    for value in (*near, data.draw(st.integers(-150, 150)), data.draw(st.integers(-(10**21), 10**21))):
        for behind in ("", ".0", ".5", ".01"):
            text = f"{value}{behind}"
            number = Fraction(text)
            wanted = (low is None or number >= low) and (high is None or number <= high)
            wanted &= not (low_open and number == low) and not (high_open and number == high)
            if kind != "number":
                wanted &= (behind == "") if kind == "integer" else (behind in (".5", ".01"))
            assert (pattern is not None and re.fullmatch(pattern, text) is not None) is wanted, (text, pattern)


@pytest.mark.parametrize("text", ["01", "-0", "-", "", "00", "-01"])
def test_no_other_spelling_of_an_integer(text: str) -> None:
    pattern = numerals("integer", None, None)
    assert pattern is not None
    assert not re.fullmatch(pattern, text)
