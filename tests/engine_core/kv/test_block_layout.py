"""What a sequence holds, against counting every block by hand."""

from __future__ import annotations

import random

from penstock.engine_core.kv.block_layout import BlockLayout, columns_of, first_column


def read_columns(first: int, positions: int, window: int, size: int) -> set[int]:
    """Columns that computing positions first .. positions - 1 reads or writes, by looking at every key."""
    found = set()
    for position in range(first, positions):
        lowest = max(0, position + 1 - window) if window else 0
        found |= {key // size for key in range(lowest, position + 1)}
    return found


def held(layout: BlockLayout, computed: int, positions: int) -> int:
    """Blocks held when the next position that may be computed is `computed`, and `positions` have room."""
    columns = columns_of(positions, layout.block_size)
    first = [first_column(computed, window, layout.block_size) for window in layout.windows]
    return sum(columns - min(columns, column) for column in first)


def test_the_first_column_is_the_first_that_is_read() -> None:
    for size in (1, 2, 4):
        for window in (0, 1, 2, 3, 5, 8):
            for position in range(24):
                wanted = min(read_columns(position, position + 9, window, size))
                assert first_column(position, window, size) == wanted, (size, window, position)


def test_what_is_held_is_what_may_be_read() -> None:
    for windows in ((0,), (3,), (0, 4), (0, 2, 5)):
        layout = BlockLayout(2, windows)
        for computed in range(20):
            for positions in range(computed + 1, computed + 7):
                wanted = sum(len(read_columns(computed, positions, window, 2)) for window in windows)
                assert held(layout, computed, positions) == wanted, (windows, computed, positions)


def test_no_sequence_ever_holds_more_than_the_most() -> None:
    """Chunks of any length, several in flight, then single tokens with drafts."""
    rng = random.Random(5)
    for _ in range(300):
        size, windows = rng.choice((1, 2, 4, 16)), rng.choice(((0,), (3,), (0, 7), (0, 4, 4, 9)))
        prompts, ahead, depth = rng.randint(1, 40), rng.randint(1, 6), rng.randint(1, 3)
        layout = BlockLayout(size, windows, ahead * depth, prompts * depth)
        prompt, computed = rng.randint(1, 200), 0
        while computed < prompt:
            planned = min(prompt, computed + rng.randint(1, prompts * depth))
            assert held(layout, computed, planned) <= layout.most(planned)
            computed = planned
        for position in range(prompt, prompt + 40):
            planned = position + rng.randint(1, ahead * depth)
            assert held(layout, position, planned) <= layout.steady(planned) <= layout.most(planned)


def test_the_most_is_reached() -> None:
    layout = BlockLayout(4, (0, 8), ahead=1, prompts=6)
    found = [held(layout, computed, computed + 6) - columns_of(computed + 6, 4) for computed in range(64)]
    assert max(found) == layout.prefilling[0]
    found = [held(layout, computed, computed + 1) - columns_of(computed + 1, 4) for computed in range(64)]
    assert max(found) == layout.running[0]


def test_one_group_holds_as_many_blocks_as_there_are_columns() -> None:
    layout = BlockLayout(16)
    assert [layout.most(count) for count in (1, 16, 17)] == [1, 1, 2]
    assert layout.kinds == ()
