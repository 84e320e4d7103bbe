"""What every proposer keeps: it says at most what it is asked for, of known tokens, and never changes them."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.speculation.drafter import Prediction, Proposer
from penstock.engine_core.speculation.ngram import PromptLookup

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)
MAKERS: tuple[Callable[[list[int]], Proposer], ...] = (
    lambda predicted: PromptLookup(200, 1, 3),
    lambda predicted: Prediction(array("i", predicted).tobytes(), 1),
)


@pytest.mark.parametrize("make", MAKERS)
@given(tokens=TOKENS, predicted=TOKENS, ahead=st.lists(st.integers(0, 3), max_size=4), most=st.integers(1, 9))
def test_proposals_are_short_and_leave_the_tokens_alone(
    make: Callable[[list[int]], Proposer], tokens: list[int], predicted: list[int], ahead: list[int], most: int
) -> None:
    proposer, known, line = make(predicted), {*tokens, *predicted, *ahead}, array("i", tokens[:1])
    for token in tokens[1:]:
        line.append(token)
        found = proposer.propose(line, ahead, most)
        assert len(found) <= most
        assert set(found) <= known
    assert line.tolist() == tokens


@pytest.mark.parametrize("make", MAKERS)
@given(tokens=TOKENS, steps=st.lists(st.integers(1, 30), min_size=1, max_size=20), predicted=TOKENS)
def test_how_many_tokens_come_at_once_makes_no_difference(
    make: Callable[[list[int]], Proposer], tokens: list[int], steps: list[int], predicted: list[int]
) -> None:
    """Looked at after every token or now and then: what is proposed at one place is the same where nothing is lost."""
    often, seldom = make(predicted), make(predicted)
    line, place = array("i", tokens[:1]), 1
    for step in steps:
        for token in tokens[place : place + step]:
            line.append(token)
            if isinstance(often, PromptLookup):
                often.propose(line, (), 3)
        place += step
        assert often.propose(line, (), 3) == seldom.propose(line, (), 3)
