"""Keys of blocks as messages have them."""

from __future__ import annotations

from penstock.protocol.storage_blocks import KEY_BYTES, pack_keys, unpack_keys


def test_keys_are_of_one_size_and_come_back() -> None:
    keys = [bytes(16), bytes([7]) * 16, bytes([7]) * 16 + b"\1", bytes(16) + b"\xff"]
    packed = pack_keys(keys)
    assert len(packed) == KEY_BYTES * len(keys)
    assert unpack_keys(packed) == keys
    assert unpack_keys(b"") == []
