"""The prefix index: identity → block. An entry outlives its holders until the pool gives the block to someone else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class PrefixStatistics(msgspec.Struct, frozen=True):
    entries: int  # blocks with an identity
    sealed: int  # totals since start
    duplicates: int
    evicted: int


class Prefix:
    """Owner of block identities. At most one block per identity: a later twin stays anonymous."""

    def __init__(self) -> None:
        self._block: dict[bytes, int] = {}
        self._identity: dict[int, bytes] = {}
        self._sealed = 0
        self._duplicates = 0
        self._evicted = 0

    def seal(self, identity: bytes, block: int) -> None:
        """Let later plans find the block. Its content must be written by a step that is planned already: steps run in
        order, so whoever is planned afterwards reads it complete."""
        if identity in self._block:
            self._duplicates += self._block[identity] != block
            return
        assert block not in self._identity, "a block is sealed once between two takes"
        self._block[identity] = block
        self._identity[block] = identity
        self._sealed += 1

    def match(self, chain: Sequence[bytes], most: int) -> list[int]:
        """Blocks of the longest known prefix of `chain`, at most `most` of them."""
        found: list[int] = []
        known = self._block
        for index in range(min(most, len(chain))):
            block = known.get(chain[index])
            if block is None:
                break
            found.append(block)
        return found

    def named(self, block: int) -> bool:
        return block in self._identity

    def forget(self, block: int) -> None:
        """The block's content is about to change, or is not to be trusted."""
        identity = self._identity.pop(block, None)
        if identity is not None:
            del self._block[identity]
            self._evicted += 1

    def clear(self) -> None:
        self._block.clear()
        self._identity.clear()

    def statistics(self) -> PrefixStatistics:
        return PrefixStatistics(len(self._block), self._sealed, self._duplicates, self._evicted)
