"""KV blocks in the host's memory of fake executors, which copy at any moment between the message and its answer.

They may read another replica's as well, which is written at any moment and knows nothing of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.step_columns import copy_table, move_table
from penstock.protocol.steps import OWN_MEMORY, BlocksCopied, CopyBlocks, copy_stamp
from penstock.protocol.storage_blocks import ForgetBlocks, MoveBlocks
from tests.sim.adapters import GROUP
from tests.sim.storage import Storage, StorageJobs

GARBAGE = -7
Cells = list[list[int]]  # by block


@dataclass(slots=True)
class Copies:
    """One message."""

    to_host: bool
    pairs: list[list[int]]
    missing: list[int]  # executors that have yet to answer
    made: bool = False
    source: HostMemory | None = None  # another replica's
    stamps: list[int] = field(default_factory=list)
    stamp: int = 0  # of what it writes
    stale: bool = False  # there is no such memory


class HostMemory:
    """Of all executors, which get the same messages. `touched`: blocks that steps in flight read or write."""

    def __init__(
        self,
        blocks: int,
        pages: Cells,
        draft_pages: Cells,
        touched: Callable[[], set[int]],
        storage: Storage | None = None,
    ) -> None:
        self.blocks: list[tuple[list[int], list[int]] | None] = [None] * blocks
        self.stamps = [0] * blocks
        self.others: dict[int, HostMemory] = {}  # of the replicas whose memory is mapped
        self.copies: dict[int, Copies] = {}
        self._pages, self._draft_pages, self._touched = pages, draft_pages, touched
        self._last = 0
        self.storage = StorageJobs(storage or Storage(), self.blocks)

    def take(self, scheduler: Scheduler, rng: random.Random) -> bool:
        """Everything that the scheduler has to say; whether there was anything."""
        messages = scheduler.copy_messages()
        for message in messages:
            if not isinstance(message, CopyBlocks):
                if not isinstance(message, ForgetBlocks):
                    assert message.number > self._last, "a number that was given before"
                    self._last = message.number
                if isinstance(message, MoveBlocks):
                    self._check_move(message)
                self.storage.take(message, scheduler.epoch)
                continue
            assert message.number > self._last, "a number that was given before"
            assert message.epoch == scheduler.epoch
            self._last = message.number
            pairs = copy_table(message.blocks).tolist()
            blocks, places = zip(*pairs, strict=True)
            assert len(set(blocks)) == len(set(places)) == len(pairs)
            assert message.to_host or not self._touched().intersection(blocks), "written while a step reads it"
            for other in self.copies.values():
                if message.replica != OWN_MEMORY or other.stamps:
                    continue
                theirs = {place for _, place in other.pairs}
                assert message.to_host == other.to_host or not theirs.intersection(places), "read while it is written"
                assert not (message.to_host and theirs.intersection(places)), "written twice"
            assert not self.storage.touched(to_storage=False).intersection(places), "read or written while it is loaded"
            assert not (message.to_host and self.storage.touched(to_storage=True).intersection(places)), (
                "while it is stored"
            )
            found = self.copies[message.number] = Copies(message.to_host, pairs, list(range(GROUP)))
            if message.replica != OWN_MEMORY:
                assert not message.to_host
                found.source = self.others.get(message.replica)
                found.stamps = np.frombuffer(message.stamps, np.int64).tolist()
                found.stale = found.source is None
            found.stamp = copy_stamp(message.epoch, message.number)
            for place in places if message.to_host else ():
                self.stamps[place] = -found.stamp
            self._overwrite(found)
            if rng.random() < 0.3:
                self._make(found)
        found_any = bool(messages)
        messages.clear()
        return found_any

    def _check_move(self, message: MoveBlocks) -> None:
        blocks = move_table(message.blocks)[:, 0].tolist()
        for other in self.copies.values():
            theirs = {place for _, place in other.pairs}
            writes = other.to_host or not message.to_storage
            assert not (writes and theirs.intersection(blocks)), "a block of the host's memory that is copied"

    def say(self, scheduler: Scheduler, now: float, rng: random.Random) -> bool:
        """One executor has made copies; whether any were to be made."""
        if self.storage.busy and (not self.copies or rng.random() < 0.5):
            return self.storage.say(scheduler, now, rng)
        if not self.copies:
            return False
        number = rng.choice(list(self.copies))
        copies = self.copies[number]
        if rng.random() < 0.3:
            self._make(copies)
        if copies.source is not None and not copies.made and not copies.stale:
            if rng.random() < 0.995:
                return True  # another replica is still to write them
            copies.stale = True  # that took too long
        executor = copies.missing.pop(rng.randrange(len(copies.missing)))
        if not copies.missing:
            self._make(copies)
            del self.copies[number]
        stale = copies.stale
        if copies.source is not None and copies.made:
            stamps = [copies.source.stamps[place] for _, place in copies.pairs]
            stale = stamps != copies.stamps
        scheduler.blocks_copied(BlocksCopied(number, rng.choice((0.0, 0.001, 0.3)), stale), executor, now)
        return True

    def _overwrite(self, copies: Copies) -> None:
        """What is written holds nothing good from here on."""
        for block, place in copies.pairs:
            if copies.to_host:
                self.blocks[place] = None
            else:
                self._pages[block][:] = [GARBAGE] * len(self._pages[block])
                self._draft_pages[block][:] = [GARBAGE] * len(self._draft_pages[block])

    def _make(self, copies: Copies) -> None:
        if copies.made or copies.stale:
            return
        if copies.source is not None:
            found = [copies.source.stamps[place] for _, place in copies.pairs]
            copies.stale = any(abs(stamp) > wanted for stamp, wanted in zip(found, copies.stamps, strict=True))
            if found != copies.stamps:
                return  # others are still to be written
        copies.made = True
        memory = self.blocks if copies.source is None else copies.source.blocks
        for block, place in copies.pairs:
            if copies.to_host:
                self.blocks[place] = [*self._pages[block]], [*self._draft_pages[block]]
                self.stamps[place] = copies.stamp
                continue
            held = memory[place]
            assert held is not None, "a block of the host's that nobody has written"
            self._pages[block][:], self._draft_pages[block][:] = held
