"""A block's identity is a function of everything before it and of the extras, and of nothing else."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.kv.prefix_index import IDENTITY_BYTES, extend, root

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=0, max_size=60)


def chain(tokens: list[int], size: int, start: bytes) -> list[bytes]:
    found: list[bytes] = []
    extend(found, start, array("i", tokens), len(tokens) // size, size)
    return found


@given(TOKENS, st.integers(1, 8), st.data())
def test_any_way_of_extending_gives_the_same_chain(tokens: list[int], size: int, data: st.DataObject) -> None:
    whole, pieces = chain(tokens, size, root("")), []
    for blocks in sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4))):
        extend(pieces, root(""), array("i", tokens[: blocks * size]), blocks, size)
    extend(pieces, root(""), array("i", tokens), len(whole), size)
    assert pieces == whole
    assert all(len(identity) == IDENTITY_BYTES for identity in whole)


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_equal_identities_mean_equal_prefixes(one: list[int], other: list[int], size: int) -> None:
    for index, (a, b) in enumerate(zip(chain(one, size, root("")), chain(other, size, root("")), strict=False)):
        end = (index + 1) * size
        assert (a == b) == (one[:end] == other[:end])


def test_extras_change_every_identity() -> None:
    roots = [root(""), root("a"), root("", "a"), root("a", "b"), root("ab"), root("", "", 0), root("", "", 7)]
    assert len(set(roots)) == len(roots)
    tokens = list(range(8))
    for index in range(2):
        assert len({chain(tokens, 4, start)[index] for start in roots}) == len(roots)


@pytest.mark.parametrize("salt", ["\ud800", "\x00", "é" * 300])
def test_no_salt_can_raise(salt: str) -> None:
    assert len(root(salt)) == IDENTITY_BYTES
