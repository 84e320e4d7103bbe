from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.kv.block_pool import IdleQueue


@given(st.lists(st.tuples(st.sampled_from("par"), st.integers(1, 6)), max_size=60))
def test_it_is_a_list_in_which_every_move_is_cheap(moves: list[tuple[str, int]]) -> None:
    queue, model = IdleQueue(6), []
    for move, block in moves:
        if move == "p" and block not in model:
            queue.put(block)
            model.append(block)
        elif move == "r" and block in model:
            queue.remove(block)
            model.remove(block)
        elif move == "a" and model:
            assert queue.oldest() == model.pop(0)
        assert list(queue) == model
        assert len(queue) == len(model)
        assert [block in queue for block in range(1, 7)] == [block in model for block in range(1, 7)]


@pytest.mark.skipif(not __debug__, reason="our own mistakes are told by assertions, which are off")
def test_what_is_not_there_cannot_be_taken() -> None:
    queue = IdleQueue(2)
    with pytest.raises(AssertionError):
        queue.remove(1)
    with pytest.raises(AssertionError):
        queue.oldest()
    queue.put(1)
    with pytest.raises(AssertionError):
        queue.put(1)
