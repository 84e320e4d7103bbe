"""A block's identity is a function of everything before it and of the extras, and of nothing else."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.engine_core.kv.prefix_index import IDENTITY_BYTES, extend, root
from penstock.protocol.images import Image
from tests.sim.images import Illustrated, picture, tokens_of

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=0, max_size=60)


Images = tuple[Image, ...]


def chain(tokens: list[int], size: int, start: bytes, images: Images = ()) -> list[bytes]:
    found: list[bytes] = []
    extend(found, start, array("i", tokens), len(tokens) // size, size, images)
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


def illustrated(numbers: list[int], rows: list[int], gaps: list[int]) -> Illustrated:
    """Text of so many tokens before each image."""
    found = Illustrated([], ())
    for number, length, gap in zip(numbers, rows, gaps, strict=True):
        found = Illustrated(found.tokens + [5] * gap, found.images).with_picture(number, length, lines=False)
    return Illustrated(found.tokens + [5] * 9, found.images)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=4), st.integers(1, 8), st.data())
def test_blocks_are_shared_up_to_the_first_other_picture(
    spans: list[tuple[int, int]], size: int, data: st.DataObject
) -> None:
    rows, gaps = [rows for rows, _ in spans], [gap for _, gap in spans]
    pictures = st.lists(st.integers(0, 1), min_size=len(spans), max_size=len(spans))
    one, other = (illustrated(data.draw(pictures), rows, gaps) for _ in range(2))
    assert one.tokens == other.tokens
    pairs = zip(one.images, other.images, strict=True)
    differs = next((a.position for a, b in pairs if a != b), len(one.tokens))
    first, second = (chain(found.tokens, size, root(""), found.images) for found in (one, other))
    assert [a == b for a, b in zip(first, second, strict=True)] == [
        (block + 1) * size <= differs for block in range(len(first))
    ]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=4), st.integers(1, 8), st.data())
def test_any_way_of_extending_over_images_gives_the_same_chain(
    spans: list[tuple[int, int]], size: int, data: st.DataObject
) -> None:
    found = illustrated([1] * len(spans), [rows for rows, _ in spans], [gap for _, gap in spans])
    whole, pieces = chain(found.tokens, size, root(""), found.images), []
    for blocks in sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4))):
        extend(pieces, root(""), array("i", found.tokens), blocks, size, found.images)
    extend(pieces, root(""), array("i", found.tokens), len(whole), size, found.images)
    assert pieces == whole


def test_a_text_in_front_of_images_has_the_identities_that_it_has_alone() -> None:
    found = illustrated([1], [8], [8])
    alone = chain([5] * 8, 4, root(""))
    assert chain(found.tokens, 4, root(""), found.images)[:2] == alone


def test_placeholders_without_a_picture_are_no_picture() -> None:
    tokens = tokens_of(4)
    assert chain(tokens, 4, root("")) != chain(tokens, 4, root(""), (picture(1, 4),))


def test_one_long_picture_is_not_two_short_ones() -> None:
    """The same picture twice, and its middle: tokens and digests agree."""
    tokens, short = tokens_of(8), picture(1, 4)
    twice = (short, replace(short, position=4))
    middle = (replace(short, length=8),)
    assert chain(tokens, 4, root(""), twice)[0] == chain(tokens, 4, root(""), middle)[0]
    assert chain(tokens, 4, root(""), twice)[1] != chain(tokens, 4, root(""), middle)[1]
