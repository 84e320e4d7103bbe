from __future__ import annotations

import random

from penstock.engine_core.kv.block_layout import BlockLayout, first_column
from penstock.engine_core.kv.prefix_index import PrefixIndex


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def test_the_longest_known_prefix_is_found_up_to_the_limit() -> None:
    prefix = PrefixIndex(9)
    prefix.cache(names("abc"), [1, 2, 3])
    assert prefix.match(names("abcd"), 4) == [1, 2, 3]
    assert prefix.match(names("abcd"), 2) == [1, 2]
    assert prefix.match(names("abxc"), 4) == [1, 2]
    assert prefix.match(names("xabc"), 4) == []
    assert prefix.match([], 4) == []


def test_a_forgotten_block_ends_the_match() -> None:
    prefix = PrefixIndex(9)
    prefix.cache(names("abc"), [1, 2, 3])
    prefix.forget(2)
    prefix.forget(9)
    assert prefix.match(names("abc"), 3) == [1]
    assert not prefix.named(2)
    assert prefix.evicted == 1


def test_a_twin_stays_anonymous() -> None:
    prefix = PrefixIndex(9)
    prefix.cache([b"a"], [1])
    prefix.cache(names("ab"), [2, 3])
    assert prefix.match(names("ab"), 2) == [1, 3]
    assert not prefix.named(2)
    assert sum(map(len, prefix._blocks)) == 2


def test_clear_forgets_everything() -> None:
    prefix = PrefixIndex(9)
    prefix.cache([b"a"], [1])
    prefix.clear(9)
    assert prefix.match(names("a"), 1) == []
    prefix.cache([b"b"], [1])
    assert prefix.match(names("b"), 1) == [1]


def test_a_flood_of_salts_names_no_more_blocks_than_there_are() -> None:
    """Every salt makes other identities of one prompt. A block has one name: the pool forgets it with the content."""
    prefix, total = PrefixIndex(8), 8
    for salt in range(1000):
        block = salt % total + 1
        prefix.forget(block)  # as the pool does that gives the block away
        prefix.cache([salt.to_bytes(16, "little")], [block])
        assert sum(map(len, prefix._blocks)) <= total
    assert sum(map(len, prefix._blocks)) == total


def longest(present: dict[tuple[int, int], int], most: int, layout: BlockLayout) -> list[int]:
    """The longest prefix that every group has, by trying each length. present: (column, group) to block."""
    for length in range(most, -1, -1):
        first = [first_column(length * layout.block_size, window, layout.block_size) for window in layout.windows]
        table = [
            present.get((column, group), -1) if column >= first[group] else 0
            for column in range(length)
            for group in range(layout.groups)
        ]
        if -1 not in table:
            return table
    return []


def test_the_longest_prefix_that_every_group_has() -> None:
    rng = random.Random(2)
    chain = [bytes([65 + column]) for column in range(10)]
    lengths = set()
    for _ in range(400):
        layout = BlockLayout(4, rng.choice(((0, 6), (9,), (0, 5, 9), (0, 0, 4), (4, 13))))
        prefix, present = PrefixIndex(60), {}
        share = rng.choice((0.5, 0.8, 0.95))
        for column in range(10):
            for group in range(layout.groups):
                if rng.random() < share:
                    present[column, group] = block = len(present) + 1
                    prefix.cache([chain[column]], [block], group)
        most = rng.randint(0, 10)
        assert prefix.match_groups(chain, most, layout) == longest(present, most, layout)
        lengths.add(len(longest(present, most, layout)))
    assert len(lengths) > 8
