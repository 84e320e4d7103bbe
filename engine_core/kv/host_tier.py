"""KV blocks in the host's memory: which block holds what, and which one goes for the next.

All blocks have the same bytes and hold as many tokens, so what one saves per byte and second is how often it is
fetched. The one that goes is found by GreedyDual with frequencies (Cherkasova, 1998): the least of clock + uses, both
as of when it was last copied, wanted or fetched; among equals the one for which that is longest ago. The clock is what
went last had, so that many uses age too. Uses are counted up to MOST_USES, so that there are few different values: each
is a queue.

A block is free, being written, or findable. It is held while it is being written or read.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import msgspec

NO_BLOCK = -1
MOST_USES = 7


class HostTierStatistics(msgspec.Struct, frozen=True):
    """Counters as of now."""

    total: int = 0
    free: int = 0
    held: int = 0  # being written or read
    findable: int = 0
    copied: int = 0  # the rest are totals since start: blocks copied there
    lost: int = 0  # whose copies came too late, or found no room
    fetched: int = 0  # copied back
    evicted: int = 0  # forgotten for others
    fetches: int = 0  # times that a sequence waited for blocks from there


class StorageTierStatistics(msgspec.Struct, frozen=True):
    """Counters as of now. A shared store has other ones of what it holds and evicts."""

    total: int = 0
    findable: int = 0
    stored: int = 0  # the rest are totals since start: blocks written
    lost: int = 0  # that left the host's memory before they were written, or found no room
    loaded: int = 0  # read back
    evicted: int = 0  # forgotten for others
    failed: int = 0  # that could not be written or read, or were not what they should be
    loads: int = 0  # times that a sequence waited for blocks from there
    lookups: int = 0  # times that a sequence waited to be told what a shared store has
    failed_lookups: int = 0  # of those, the ones without an answer


class HostTier:
    """Owner of blocks 0..total-1 of the host's memory, or of another place that is named so."""

    def __init__(self, total: int, place: str = "the host's memory") -> None:
        self._place = place
        self.evicted = 0
        self.clear(total)

    def clear(self, total: int) -> None:
        """Every block is free: their content is gone."""
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # a stack: low numbers go out first
        self._blocks: dict[bytes, int] = {}  # findable
        self._keys: list[bytes | None] = [None] * total  # of those and of what is being written
        self._holds = array("i", bytes(4 * total))
        self._uses = array("i", bytes(4 * total))
        self._clock = 0
        self._value = array("q", bytes(8 * total))
        # Findable blocks that nobody holds, by their value: those of clock .. clock + MOST_USES, in a ring.
        self._queues: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(MOST_USES + 1)]

    def find(self, key: bytes) -> int | None:
        """The block that holds this."""
        return self._blocks.get(key)

    @property
    def findable(self) -> int:
        return len(self._blocks)

    def adopt(self, found: Mapping[int, bytes]) -> None:
        """These blocks hold something from before, the first of them for longest. All are free."""
        for block, key in found.items():
            if key not in self._blocks:
                self._keys[block], self._uses[block], self._blocks[key] = key, 1, block
                self._queue(block)
        self._free = [block for block in self._free if self._keys[block] is None]

    def reserve(self, key: bytes) -> int:
        """A block that is written from now on, to be found by this key; it is held until `publish` or `drop`. Another
        may be forgotten for it. NO_BLOCK if all others are held."""
        assert key not in self._blocks
        block = self._free.pop() if self._free else self._evict()
        if block != NO_BLOCK:
            self._keys[block], self._holds[block], self._uses[block] = key, 1, 1
        return block

    def _evict(self) -> int:
        for value in range(self._clock, self._clock + MOST_USES + 1):
            if queue := self._queues[value % len(self._queues)]:
                block, _ = queue.popitem(last=False)
                self._clock = value
                key = self._keys[block]
                assert key is not None
                del self._blocks[key]
                self.evicted += 1
                return block
        return NO_BLOCK

    def publish(self, block: int) -> bool:
        """The block has been written: it can be found, unless it was forgotten meanwhile or an equal one came before.
        Returns whether it can."""
        key = self._keys[block]
        if key is None or key in self._blocks:
            self.drop(block)
            return False
        self._blocks[key] = block
        self.release((block,))
        return True

    def drop(self, block: int) -> None:
        """What has been written to the block is worth nothing, whoever has been told of it."""
        assert self._holds[block]
        self._keys[block] = None
        self.release((block,))

    def touch(self, key: bytes) -> bool:
        """Whether this is there; if so it is wanted now, because its like on the device is about to go."""
        block = self._blocks.get(key)
        if block is not None and not self._holds[block]:
            self._unqueue(block)
            self._queue(block)
        return block is not None

    def hold(self, blocks: Iterable[int], *, used: bool = True) -> None:
        """The blocks, which are findable or will be, are read from now on, for a use of them or not."""
        for block in blocks:
            if not self._holds[block]:
                self._unqueue(block)
            self._holds[block] += 1
            self._uses[block] = min(self._uses[block] + used, MOST_USES)

    def release(self, blocks: Iterable[int]) -> None:
        """One hold less on each, in the order in which they are to go."""
        for block in blocks:
            self._holds[block] -= 1
            assert self._holds[block] >= 0, "a block is released as often as it was held"
            if self._holds[block]:
                continue
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._queue(block)

    def forget(self, keys: Iterable[bytes]) -> None:
        """What these find, or will find, cannot be trusted."""
        doubtful = set(keys)
        if not doubtful:
            return  # there may be millions of blocks
        for block in {found for key in doubtful if (found := self._blocks.pop(key, None)) is not None}:
            self._keys[block] = None
            if not self._holds[block]:
                self._unqueue(block)
                self._free.append(block)
        for block, key in enumerate(self._keys):
            if key in doubtful:  # it is being written
                self._keys[block] = None

    def _queue(self, block: int) -> None:
        self._value[block] = self._clock + self._uses[block]
        self._queues[self._value[block] % len(self._queues)][block] = None

    def _unqueue(self, block: int) -> None:
        del self._queues[self._value[block] % len(self._queues)][block]

    def check(self, holds: Iterable[int]) -> tuple[str, ...]:
        """What is wrong with the accounts, in words. holds: the blocks that are held, each as often as it is."""
        counted = [0] * self.total
        for block in holds:
            counted[block] += 1
        faults = []
        if counted != self._holds.tolist():
            faults.append(f"a block of {self._place} is held by others than it counts")
        if any(self._keys[block] != key for key, block in self._blocks.items()):
            faults.append(f"a block of {self._place} is found that holds something else")
        queued = [block for queue in self._queues for block in queue]
        everywhere = sorted([*self._free, *queued, *(block for block, count in enumerate(counted) if count)])
        if everywhere != list(range(self.total)):
            faults.append(f"blocks of {self._place} are not free, findable or held, or more than one of these")
        return tuple(faults)

    def statistics(self) -> HostTierStatistics:
        """Counters of the blocks; those of copies are the scheduler's."""
        held = self.total - len(self._free) - sum(map(len, self._queues))
        return HostTierStatistics(self.total, len(self._free), held, len(self._blocks), evicted=self.evicted)
