from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.scheduling.queue import Queue
from engine_core.scheduling.request import Choice, Rank, Request
from protocol.messages import Sampling, SubmitTokens

RANKS = st.tuples(st.integers(-2, 2), st.integers(1, 30), st.integers(0, 3))


def waiting(rank: Rank) -> Choice:
    message = SubmitTokens(id=1, token_ids=b"", sampling=Sampling())
    request = Request(message, 0, rank[1], 0, 1, None, frozenset())
    return Choice(request, rank[2], rank, array("i"), [])


@given(st.lists(RANKS, unique=True, max_size=30), st.data())
def test_order_is_that_of_ranks_whatever_came_and_went(ranks: list[Rank], data: st.DataObject) -> None:
    queue, choices = Queue(), [waiting(rank) for rank in ranks]
    for choice in choices:
        queue.put(choice)
    gone = data.draw(st.sets(st.sampled_from(choices))) if choices else set()
    for choice in gone:
        queue.remove(choice)
    left = sorted([choice for choice in choices if choice not in gone], key=lambda choice: choice.rank)
    assert [queue.at(index) for index in range(len(queue))] == left
    while left:
        index = data.draw(st.integers(0, len(left) - 1))
        queue.remove_at(index)
        del left[index]
        assert [queue.at(place) for place in range(len(queue))] == left


@pytest.mark.skipif(not __debug__, reason="our own mistakes are told by assertions, which are off")
def test_only_what_waits_can_be_removed() -> None:
    queue = Queue()
    queue.put(waiting((0, 1, 0)))
    with pytest.raises(AssertionError):
        queue.remove(waiting((0, 1, 0)))
