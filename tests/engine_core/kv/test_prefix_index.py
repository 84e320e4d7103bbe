from __future__ import annotations

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
    assert prefix.statistics().evicted == 1


def test_a_twin_stays_anonymous() -> None:
    prefix = PrefixIndex(9)
    prefix.cache([b"a"], [1])
    prefix.cache(names("ab"), [2, 3])
    assert prefix.match(names("ab"), 2) == [1, 3]
    assert not prefix.named(2)
    stand = prefix.statistics()
    assert (stand.entries, stand.cached, stand.duplicates) == (2, 2, 1)


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
        assert prefix.statistics().entries <= total
    assert sum(map(len, prefix._blocks)) == total
