"""The disks of fake executors, which outlive them: slow, full, broken and forgetful, as the dice say."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.engine_core.scheduling.storage_tier import MOST_LOADS, MOST_LOOKUPS, MOST_STORES
from penstock.protocol.step_columns import integers, move_table
from penstock.protocol.storage_blocks import (
    BlocksFound,
    BlocksListed,
    BlocksMoved,
    FindBlocks,
    ForgetBlocks,
    ListBlocks,
    MoveBlocks,
    StorageMessage,
    pack_keys,
    unpack_keys,
)
from tests.sim.adapters import GROUP

Block = tuple[list[int], list[int]]


@dataclass(slots=True)
class Record:
    """What one executor has at a place."""

    key: bytes
    content: Block
    good: bool = True


@dataclass(slots=True)
class Job:
    """A message, as one executor is to do it."""

    message: StorageMessage
    executor: int


@dataclass(slots=True)
class Storage:
    """Of all executors. trouble: how often a block cannot be written, is spoilt, or cannot be read. shared: it finds
    blocks by their keys, and evicts as it likes."""

    trouble: float = 0.0
    shared: bool = False
    records: list[dict[int | bytes, Record]] = field(default_factory=lambda: [{} for _ in range(GROUP)])
    spoilt: int = 0  # blocks that were read and were no good
    stored: int = 0


class StorageJobs:
    """What a group of executors is to do with its disks. blocks: of the host's memory."""

    def __init__(self, storage: Storage, blocks: list[Block | None]) -> None:
        self.jobs: list[Job] = []
        self._storage, self._blocks = storage, blocks
        self._failed: dict[int, set[int]] = {}  # rows of a load, by its number

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    def touched(self, *, to_storage: bool) -> set[int]:
        """Blocks of the host's memory that jobs read or write."""
        moves = [job.message for job in self.jobs if isinstance(job.message, MoveBlocks)]
        return {int(row[0]) for move in moves if move.to_storage == to_storage for row in move_table(move.blocks)}

    def take(self, message: StorageMessage, epoch: int) -> None:
        assert message.epoch == epoch
        match message:
            case ForgetBlocks():
                if message.everything:
                    self.jobs.clear()
            case MoveBlocks():
                table = move_table(message.blocks)
                keys = unpack_keys(message.keys)
                assert len(set(table[:, 0].tolist())) == len(set(table[:, 1].tolist())) == len(set(keys)) == len(table)
                written = self.touched(to_storage=False)
                assert not written.intersection(table[:, 0].tolist()), "written by two, or read while it is written"
                if message.to_storage:
                    for block in table[:, 0].tolist():
                        assert self._blocks[block] is not None, "a block that nobody has written"
                else:
                    assert not self.touched(to_storage=True).intersection(table[:, 0].tolist()), (
                        "written while it is read"
                    )
                    for block in table[:, 0].tolist():
                        self._blocks[block] = None
        self.jobs += [Job(message, executor) for executor in range(GROUP)]
        moves = {job.message.number: job.message for job in self.jobs if isinstance(job.message, MoveBlocks)}
        assert sum(move.to_storage for move in moves.values()) <= MOST_STORES
        assert sum(not move.to_storage for move in moves.values()) <= MOST_LOADS
        finds = {job.message.number for job in self.jobs if isinstance(job.message, FindBlocks)}
        assert len(finds) <= MOST_LOOKUPS

    def say(self, scheduler: Scheduler, now: float, rng: random.Random) -> bool:
        """One executor has done the oldest of its jobs, or has looked for keys meanwhile; whether there was one."""
        if not self.jobs:
            return False
        executor = rng.choice(self.jobs).executor
        own = [job for job in self.jobs if job.executor == executor]
        finds = [job for job in own if isinstance(job.message, FindBlocks)]
        job = rng.choice([own[0], *finds])
        self.jobs.remove(job)
        if isinstance(job.message, ListBlocks):
            for answer in self._list(job.message, executor, rng):
                scheduler.blocks_copied(answer, executor, now)
        elif isinstance(job.message, FindBlocks):
            scheduler.blocks_copied(self._find(job.message, executor, rng), executor, now)
        elif isinstance(job.message, ForgetBlocks):
            records = self._storage.records[executor]
            some = unpack_keys(job.message.keys) if self._storage.shared else integers(job.message.places).tolist()
            for at in list(records) if job.message.everything else some:
                records.pop(at, None)
        else:
            scheduler.blocks_copied(self._move(job.message, executor, rng), executor, now)
        return True

    def _find(self, message: FindBlocks, executor: int, rng: random.Random) -> BlocksFound:
        assert self._storage.shared
        records, keys = self._storage.records[executor], unpack_keys(message.keys)
        failed = rng.random() < self._storage.trouble
        missing = [number for number, key in enumerate(keys) if failed or key not in records]
        for at in [at for at in records if rng.random() < self._storage.trouble]:
            del records[at]  # between the answer and the read
        return BlocksFound(message.number, np.array(missing, np.int32).tobytes(), failed)

    def _list(self, message: ListBlocks, executor: int, rng: random.Random) -> list[BlocksListed]:
        records = {} if self._storage.shared else self._storage.records[executor]
        for place in [place for place in records if rng.random() < self._storage.trouble]:
            del records[place]
        places, half = list(records), len(records) // 2
        return [
            BlocksListed(
                number=message.number, places=np.array(part, np.int32).tobytes(),
                keys=pack_keys([records[place].key for place in part]), last=last,
            )
            for part, last in ((places[:half], False), (places[half:], True))
        ]  # fmt: skip

    def _move(self, message: MoveBlocks, executor: int, rng: random.Random) -> BlocksMoved:
        records, failed = self._storage.records[executor], set()
        rows = zip(move_table(message.blocks).tolist(), unpack_keys(message.keys), strict=True)
        for row, ((block, place), key) in enumerate(rows):
            at = key if self._storage.shared else place
            if message.to_storage:
                if not self._storage.shared:
                    records.pop(at, None)
                content = self._blocks[block]
                assert content is not None, "a block that was given away while it was written to disk"
                if rng.random() < self._storage.trouble:
                    failed.add(row)
                    continue
                made = Record(key, (list(content[0]), list(content[1])), rng.random() >= self._storage.trouble)
                if self._storage.shared:
                    records.setdefault(at, made)
                else:
                    records[at] = made
                self._storage.stored += 1
                continue
            record = records.get(at)
            if record is None or record.key != key or not record.good or rng.random() < self._storage.trouble:
                self._storage.spoilt += 1
                failed.add(row)
                records.pop(at, None)
                self._failed.setdefault(message.number, set()).add(row)
            elif row not in self._failed.get(message.number, ()):
                self._blocks[block] = list(record.content[0]), list(record.content[1])
        if not any(job.message is message for job in self.jobs):
            for row in self._failed.pop(message.number, ()):
                self._blocks[move_table(message.blocks)[row, 0]] = None
        seconds = rng.choice((0.0, 0.01, 3.0))
        return BlocksMoved(message.number, seconds, np.array(sorted(failed), np.int32).tobytes())
