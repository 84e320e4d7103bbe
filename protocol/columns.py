"""Columns of messages: lists of numbers as raw little-endian bytes and back.

For the batches of one step (hundreds of numbers) this is faster than numpy and imports nothing.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import Literal

from penstock.protocol.errors import InvalidRequest

IntCode = Literal["q", "i", "H", "B"]  # int64, int32, uint16, uint8
SIZES: Mapping[str, int] = {"q": 8, "i": 4, "H": 2, "B": 1, "f": 4}

assert all(array(code).itemsize == size for code, size in SIZES.items())
assert sys.byteorder == "little"


def pack(code: IntCode, values: Iterable[int]) -> bytes:
    """Bytes of a column."""
    return array(code, values).tobytes()


def unpack(code: IntCode, column: bytes) -> list[int]:
    """The integers of a column."""
    return memoryview(column).cast(code).tolist()


def unpack_floats(column: bytes) -> list[float]:
    """The numbers of a float32 column."""
    return list(memoryview(column).cast("f"))


def unpack_token_ids(column: bytes, param: str) -> list[int]:
    """Token ids that a client sent. Raises InvalidRequest when the bytes are no int32 column."""
    if len(column) % SIZES["i"]:
        raise InvalidRequest("token ids must be 32-bit integers", param=param)
    return unpack("i", column)
