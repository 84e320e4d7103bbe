"""What every message between processes is made from."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Root of every message: a frozen tagged array."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Root of what messages hold."""
