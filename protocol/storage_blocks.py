"""KV blocks in storage, on disk or in a store that other servers share: what a scheduler and its executors say of them.

Each executor has a file with numbered places, each of which holds its part of a block of the host's memory and the key
that the block is found by. The scheduler owns the places, as it owns the blocks of the host's memory, and holds a block
there while it is written to disk or read from it. An executor has the jobs of a link done in their order. A message of
another epoch than those before it ends these: nothing of the host's memory is touched for them any more.

In a shared store blocks are found by their keys alone, and others put them there, too. So a scheduler asks
(`FindBlocks`) before it has blocks read. Such questions do not wait for blocks that are being moved.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.protocol.message import Message

KEY_BYTES = 17  # of a block's identity, and of its KV group's number


class ListBlocks(Message, frozen=True):
    """scheduler → executors: say what there is on disk."""

    number: int
    epoch: int


class BlocksListed(Message, frozen=True, kw_only=True):
    """each executor → scheduler: places that hold something, those written first before others."""

    number: int
    places: bytes  # int32 [blocks]
    keys: bytes  # KEY_BYTES of each
    last: bool


class FindBlocks(Message, frozen=True):
    """scheduler → executors: say which of these a shared store lacks."""

    number: int
    epoch: int
    keys: bytes


class BlocksFound(Message, frozen=True):
    """each executor → scheduler: these are not there."""

    number: int
    missing: bytes = b""  # int32: numbers of keys
    failed: bool = False  # the store did not answer, so all are missing


class MoveBlocks(Message, frozen=True, kw_only=True):
    """scheduler → executors: write blocks of the host's memory to storage, or read them from there."""

    number: int
    epoch: int
    to_storage: bool
    blocks: bytes  # int32 [blocks, 2]: block of the host's memory, place in storage; none of them twice
    keys: bytes  # what they are found by


class BlocksMoved(Message, frozen=True):
    """each executor → scheduler: this is done, but for some of them."""

    number: int
    seconds: float = 0.0  # that it took
    failed: bytes = b""  # int32: rows of `blocks`, which hold nothing


class ForgetBlocks(Message, frozen=True):
    """scheduler → executors: what these places hold, and what has these keys, must not be found any more."""

    epoch: int
    places: bytes = b""  # int32
    keys: bytes = b""  # of a shared store alone
    everything: bool = False  # all places, and whatever is to be done for the messages before this one


StorageMessage = ListBlocks | FindBlocks | MoveBlocks | ForgetBlocks
StorageAnswer = BlocksListed | BlocksFound | BlocksMoved


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """A block's identity is 16 bytes; that of a group but the first has its number behind them."""
    return b"".join([key.ljust(KEY_BYTES, b"\0") for key in keys])


def unpack_keys(data: bytes) -> list[bytes]:
    """The reverse."""
    keys = [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
    return [key if key[-1] else key[:-1] for key in keys]
