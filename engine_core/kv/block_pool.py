"""The block pool: blocks 1..total, their reference counts, and the order in which content is evicted.

A block is free (no content worth keeping), idle (unreferenced, content still findable), held (referenced), or
quarantined after a failed check. The oldest idle blocks are leaving once a copy of them has been made or begun in the
host's memory: they go first. Block 0 is the executor's scratch and never appears here.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine_core.kv.prefix_index import PrefixIndex

OUTSIDE = -1


class PoolStatistics(msgspec.Struct, frozen=True):
    total: int
    free: int
    idle: int
    held: int
    quarantined: int


class PoolReport(msgspec.Struct, frozen=True):
    """What a check found. `faults` is empty when free + idle + held + quarantined = total and every count is right."""

    faults: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()  # newly quarantined

    @property
    def ok(self) -> bool:
        return not self.faults


class BlockPool:
    """Owner of the reference counts. Eviction is queue order and nothing else: oldest released, first reused."""

    def __init__(self, total: int, prefix: PrefixIndex) -> None:
        assert total >= 0
        self.total = total
        self.prefix = prefix
        self._references = array("i", bytes(4 * (total + 1)))
        self._free = list(range(total, 0, -1))  # a stack: low numbers go out first
        self._idle = IdleQueue(total)
        self._leaving = IdleQueue(total)  # idle as well, and all older
        self._held = 0
        self._quarantined: set[int] = set()

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out now."""
        return len(self._free) + self._idle_count

    @property
    def free(self) -> int:
        """Blocks without any content."""
        return len(self._free)

    @property
    def ready(self) -> int:
        """Those whose content nobody would miss: they are free or leaving."""
        return len(self._free) + self._leaving.count

    @property
    def held(self) -> int:
        return self._held

    @property
    def capacity(self) -> int:
        """Blocks that can ever be handed out."""
        return self.total - len(self._quarantined)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each; their content is forgotten. The caller has checked `available`."""
        assert count <= self.available
        free, references = self._free, self._references
        if count <= len(free):
            blocks = free[len(free) - count :]
            del free[len(free) - count :]
            blocks.reverse()
        else:
            blocks = free[::-1]
            free.clear()
            while len(blocks) < count:
                block = (self._leaving if self._leaving.count else self._idle).oldest()
                self.prefix.forget(block)
                blocks.append(block)
        for block in blocks:
            references[block] = 1
        self._held += count
        return blocks

    def leave(self, count: int) -> list[int]:
        """The oldest idle blocks, at most `count`, which are leaving from now on. They stay findable."""
        blocks = [self._idle.oldest() for _ in range(min(count, self._idle.count))]
        for block in blocks:
            self._leaving.put(block)
        return blocks

    @property
    def _idle_count(self) -> int:
        """Idle blocks, those that are leaving included."""
        return self._leaving.count + self._idle.count

    def _unqueue(self, block: int) -> bool:
        """Take a block from the idle ones; whether it was one of them."""
        for queue in (self._leaving, self._idle):
            if block in queue:
                queue.remove(block)
                return True
        return False

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `share` would remove from `available`."""
        references = self._references
        return sum(references[block] == 0 for block in blocks)

    def lone_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks one `release` would return."""
        references = self._references
        return sum(references[block] == 1 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to blocks that the prefix index named."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                queued = self._unqueue(block)
                assert queued, "a block without references is idle"
                self._held += 1
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block of a table, last block first, so that a prefix outlives what follows it."""
        references, named = self._references, self.prefix.named
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, "a block is released as often as it was taken"
            references[block] = left
            if left == 0:
                self._held -= 1
                if block in self._quarantined:
                    self.prefix.forget(block)
                elif named(block):
                    self._idle.put(block)
                else:
                    self._free.append(block)

    def distrust(self, blocks: Iterable[int]) -> None:
        """Forget the content of blocks whose holder failed. Holders keep them; later matches do not find them."""
        for block in blocks:
            self.prefix.forget(block)
            if self._unqueue(block):
                self._free.append(block)

    def clear(self, total: int) -> None:
        """Every block is free and empty: the pages themselves are gone."""
        self.prefix.clear(total)
        self.total = total
        self._references = array("i", bytes(4 * (total + 1)))
        self._free = list(range(total, 0, -1))
        self._idle, self._leaving = IdleQueue(total), IdleQueue(total)
        self._held = 0
        self._quarantined.clear()

    def check(self, tables: Sequence[Sequence[int]], *, thorough: bool) -> PoolReport:
        """Compare the books with `tables`, every table that holds references (running and fenced).

        The sums are compared first; if one is wrong, or `thorough` is set, every block is (milliseconds at 60,000
        blocks). Blocks whose state is contradictory are quarantined: never handed out again in this epoch.
        """
        counted = np.frombuffer(self._references, np.int32)[1:]
        sums = (
            int(np.count_nonzero(counted > 0)) == self._held,
            int(counted.sum()) == sum(map(len, tables)),
            self.available + self._held + self._adrift() == self.total,
        )
        return self._check_blocks(tables) if thorough or not all(sums) else PoolReport()

    def _adrift(self) -> int:
        """Quarantined blocks that no table holds."""
        return sum(self._references[block] == 0 for block in self._quarantined)

    def _check_blocks(self, tables: Sequence[Sequence[int]]) -> PoolReport:
        flat = np.fromiter(itertools.chain.from_iterable(tables), np.int64)
        expected = np.bincount(flat, minlength=self.total + 1)
        counted = np.frombuffer(self._references, np.int32).astype(np.int64)
        queued = np.zeros(self.total + 1, np.int64)
        for queue in (self._free, self._idle, self._leaving):
            queued += np.bincount(np.fromiter(queue, np.int64, len(queue)), minlength=self.total + 1)
        away = np.zeros(self.total + 1, bool)
        away[list(self._quarantined)] = True
        faults, wrong = [], np.zeros(self.total + 1, bool)
        for text, mask in (
            ("reference count differs from the tables", (counted != expected) & ~away),
            ("held and queued at once", (counted > 0) & (queued > 0)),
            ("queued twice", queued > 1),
            ("neither held nor queued", (counted == 0) & (queued == 0) & ~away),
        ):
            mask[0] = False
            if mask.any():
                faults.append(f"{text}: {int(mask.sum())} blocks")
                wrong |= mask
        if self._held != int(np.count_nonzero(counted[1:] > 0)):
            faults.append(f"held is counted as {self._held}")
        blocks = tuple(int(block) for block in np.flatnonzero(wrong))
        if faults:
            self._quarantine(blocks, expected)
        return PoolReport(tuple(faults), blocks)

    def _quarantine(self, blocks: Sequence[int], expected: npt.NDArray[np.int64]) -> None:
        """Take the blocks out of circulation, with the reference counts that their tables will release."""
        self._quarantined.update(blocks)
        self._free = [block for block in self._free if block not in self._quarantined]
        for block in blocks:
            self._references[block] = int(expected[block])
            self._unqueue(block)
            self.prefix.forget(block)
        counted = np.frombuffer(self._references, np.int32)
        self._held = int(np.count_nonzero(counted[1:] > 0))

    def statistics(self) -> PoolStatistics:
        """`quarantined` leaves out blocks that a table still holds, so that the four always sum to the total."""
        return PoolStatistics(self.total, len(self._free), self._idle_count, self._held, self._adrift())


class IdleQueue:
    """Blocks 1..total, each at most once. Block 0, which no one owns, is the ring's head."""

    def __init__(self, total: int) -> None:
        self._next = [0] + [OUTSIDE] * total
        self._previous = [0] + [OUTSIDE] * total
        self.count = 0

    def __len__(self) -> int:
        return self.count

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
        self.count += 1

    def remove(self, block: int) -> None:
        """Take the block out of the queue."""
        after, before = self._next[block], self._previous[block]
        assert block > 0
        assert after != OUTSIDE
        self._next[before], self._previous[after] = after, before
        self._next[block] = self._previous[block] = OUTSIDE
        self.count -= 1

    def oldest(self) -> int:
        """Take out the block that has been idle longest."""
        block = self._next[0]
        self.remove(block)
        return block
