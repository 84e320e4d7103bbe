"""How deep JSON is nested, whatever its pieces and whatever stands in its strings."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.text.rendering import deeper
from penstock.protocol import limits
from penstock.services.http.request_context import Nesting

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('[]{}"\\,:a', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}"\\', max_size=4), inner, max_size=3),
    max_leaves=12,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def measured(*pieces: bytes) -> int:
    nesting = Nesting()
    for piece in pieces:
        nesting.push(piece)
    return nesting.deepest


@settings(max_examples=400, deadline=None)
@given(VALUES, st.booleans(), st.lists(st.integers(0, 200), max_size=4))
def test_depth_is_that_of_the_value_however_it_is_cut(value: Any, spaced: bool, cuts: list[int]) -> None:
    text = json.dumps(value, indent=1 if spaced else None).encode()
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert measured(*pieces) == depth_of(value) == measured(text) == measured(*(bytes([byte]) for byte in text))
    assert depth_of(value) <= text.count(b"[") + text.count(b"{")


def test_depth_agrees_with_that_of_decoded_values() -> None:
    """The tokenizer measures what it renders once more: the Python API has no body."""
    inner: Any = 1
    for _ in range(limits.MAX_JSON_DEPTH):
        inner = {"a": inner}
    assert not deeper(inner, limits.MAX_JSON_DEPTH)
    assert deeper(inner, limits.MAX_JSON_DEPTH - 1)
    assert measured(json.dumps(inner).encode()) == limits.MAX_JSON_DEPTH


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=30) | st.text('[]{}",\\\\a', max_size=30).map(str.encode), max_size=4))
def test_what_is_no_json_has_some_depth_too(pieces: list[bytes]) -> None:
    assert measured(*pieces) >= 0


@pytest.mark.parametrize(
    "piece",
    [b"[" * 65536, b"[]" * 32768, b'"\\\\' * 16384, b"\\\\" * 32768, b'["a\\\\n"]' * 8192, b'"' + b"a" * 65536],
    ids=["open", "pairs", "escapes", "backslashes", "strings", "endless"],
)  # fmt: skip
def test_a_piece_holds_up_nobody(piece: bytes) -> None:
    """A megabyte of the worst, as it comes off a socket."""
    nesting = Nesting()
    took = []
    for _ in range(16):
        began = time.thread_time()
        nesting.push(piece)
        took.append(time.thread_time() - began)
    assert max(took) < 0.25
