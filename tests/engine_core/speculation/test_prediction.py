"""A prediction is followed, left where the output leaves it, and taken up again behind the difference."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.speculation.drafter import SHORTEST, Prediction, aligned

PROMPT = [900, 901]
TEXT = list(range(10, 40))


def made(predicted: list[int]) -> Prediction:
    return Prediction(array("i", predicted).tobytes(), len(PROMPT))


def after(predicted: list[int], output: list[int], most: int = 3, ahead: tuple[int, ...] = ()) -> list[int]:
    """What is proposed when the output came token by token."""
    prediction, line = made(predicted), array("i", PROMPT)
    found = prediction.propose(line, ahead, most)
    for token in output:
        line.append(token)
        found = prediction.propose(line, ahead, most)
    return found


def test_the_beginning_is_proposed_before_anything_came() -> None:
    assert after(TEXT, []) == TEXT[:3]


def test_it_is_followed_to_its_end() -> None:
    for place in range(len(TEXT)):
        assert after(TEXT, TEXT[:place]) == TEXT[place : place + 3]
    assert after(TEXT, TEXT) == []
    assert after(TEXT, [*TEXT, 1, 2, 3]) == []


@pytest.mark.parametrize(
    "output",
    [
        [*TEXT[:5], 1, *TEXT[6:9]],  # one token replaced
        [*TEXT[:5], *TEXT[8:10]],  # some left out
        [*TEXT[:5], 1, 2, 3, *TEXT[5:7]],  # some put in
        [*TEXT[:9], 1, *TEXT[2:5]],  # back again
    ],
)
def test_behind_a_difference_it_is_taken_up_again(output: list[int]) -> None:
    place = TEXT.index(output[-1]) + 1
    assert after(TEXT, output) == TEXT[place : place + 3]


def test_one_token_alone_says_too_little() -> None:
    assert SHORTEST == 2
    assert after(TEXT, [*TEXT[:5], 1, TEXT[9]]) == []


def test_the_longest_run_says_where_and_a_later_place_is_better() -> None:
    text = [1, 2, 3, 50, 1, 2, 3, 60, 9, 2, 3, 70, 1, 2, 3, 80]
    assert after(text, [1, 2, 3, 50, 8, 9, 2, 3]) == [70, 1, 2]
    assert after(text, [1, 2, 3, 50, 8, 1, 2, 3]) == [60, 9, 2]
    assert after(text, [1, 2, 3, 50, 1, 2, 3, 60, 9, 2, 3, 70, 1, 2, 3, 80, 1, 2]) == [3, 50, 1]


def test_what_must_come_first_moves_the_place() -> None:
    assert after(TEXT, TEXT[:4], ahead=(TEXT[4], TEXT[5])) == TEXT[6:9]
    assert after(TEXT, TEXT[:4], ahead=(TEXT[7], TEXT[8])) == TEXT[9:12]
    assert after(TEXT, TEXT[:4], ahead=(1, 2)) == []


def test_the_prompt_is_no_output() -> None:
    prediction = made([5, *PROMPT, 6])
    line = array("i", PROMPT)
    assert prediction.propose(line, (), 2) == [5, PROMPT[0]]
    line.append(7)
    assert prediction.propose(line, (), 2) == []


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_what_is_proposed_stands_in_the_prediction(predicted: list[int], output: list[int], most: int) -> None:
    found = after(predicted, output, most)
    assert not found or any(
        predicted[place : place + len(found)] == found and (len(found) == most or place + len(found) == len(predicted))
        for place in range(len(predicted))
    )


def test_places_are_whole_tokens() -> None:
    data = array("i", [256, 1, 65536, 1]).tobytes()
    assert aligned(data, array("i", [1]).tobytes(), 0, len(data)) == 4
    assert aligned(data, array("i", [1]).tobytes(), 8, len(data)) == 12
    assert aligned(data, b"\x01\x00\x00\x01", 0, len(data)) == -1
