"""Numbers of requests: who made one can be told from it."""

from __future__ import annotations

COUNTER_MASK = 0xFFFFFFFF


def request_id(api_index: int, incarnation: int, counter: int) -> int:
    """A 63-bit id: 7 bits of api index, 24 of its incarnation, 32 of a counter."""
    assert 0 <= api_index < 128
    return (api_index << 56) | ((incarnation & 0xFFFFFF) << 32) | (counter & COUNTER_MASK)
