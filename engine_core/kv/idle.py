"""The queue of idle blocks, oldest first: a ring linked through two lists, so every move is O(1), without hashing."""

from __future__ import annotations

from collections.abc import Iterator

OUTSIDE = -1


class IdleQueue:
    """Blocks 1..total, each at most once. Block 0, which no one owns, is the ring's head."""

    def __init__(self, total: int) -> None:
        self._next = [0] + [OUTSIDE] * total
        self._previous = [0] + [OUTSIDE] * total
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return self._next[block] != OUTSIDE

    def __iter__(self) -> Iterator[int]:
        """From the oldest to the newest."""
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def put(self, block: int) -> None:
        """The block is the newest."""
        assert self._next[block] == OUTSIDE, "a block is idle once"
        last = self._previous[0]
        self._next[last] = self._previous[0] = block
        self._next[block], self._previous[block] = 0, last
        self._count += 1

    def remove(self, block: int) -> None:
        """Take the block out, wherever it stands."""
        after, before = self._next[block], self._previous[block]
        assert block > 0
        assert after != OUTSIDE
        self._next[before], self._previous[after] = after, before
        self._next[block] = self._previous[block] = OUTSIDE
        self._count -= 1

    def oldest(self) -> int:
        """Take out the block that has been idle longest."""
        block = self._next[0]
        self.remove(block)
        return block
