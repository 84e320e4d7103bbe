"""Columns are what the protocol says they are."""

from __future__ import annotations

import pytest

from penstock.protocol.columns import pack, unpack, unpack_floats, unpack_token_ids
from penstock.protocol.errors import InvalidRequest


def test_columns_are_little_endian() -> None:
    assert pack("q", [1]) == b"\x01" + bytes(7)
    assert pack("i", [-2, 3]) == b"\xfe\xff\xff\xff\x03\x00\x00\x00"
    assert pack("H", [258]) == b"\x02\x01"
    assert pack("B", [4]) == b"\x04"


def test_they_come_back() -> None:
    for code in ("q", "i", "H", "B"):
        assert unpack(code, pack(code, [0, 1, 200])) == [0, 1, 200]
    assert unpack_floats(b"\x00\x00\x80\x3f") == [1.0]
    assert unpack("i", b"") == []


def test_half_a_token_id_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        unpack_token_ids(b"\x00\x00", "prompt")
    assert caught.value.param == "prompt"
