"""Copies of KV blocks between the host's memory and a store, in threads beside everything else: an executor's files, or
one that other servers use as well.

One thread has the messages done in their order; others move their blocks, each through a buffer of its own. A further
one asks the store for keys, since a sequence waits for the answer. Of the host's memory they touch a block under their
lock and only while the message counts. So the main thread takes the memory back at any moment, without waiting for the
store: a read that hangs may end in a buffer that nobody looks at.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from penstock.engine_core.execution.block_files import BadBlock, Bytes
from penstock.protocol.step_columns import integers, move_table
from penstock.protocol.storage_blocks import (
    BlocksFound,
    BlocksListed,
    BlocksMoved,
    FindBlocks,
    ForgetBlocks,
    ListBlocks,
    MoveBlocks,
    StorageAnswer,
    StorageMessage,
    pack_keys,
    unpack_keys,
)

log = logging.getLogger(__name__)

THREADS = 8  # that move blocks: an NVMe drive is at its best with as many requests
NICE = 15  # of these threads: steps come first
LISTED = 4096  # places that one message lists
OUTDATED = "the message counts no more"


class BlockStore(Protocol):
    """Where blocks are kept behind the host's memory. All may raise OSError. One thread calls what changes what is
    there; `read` and `write` are called by several. A block that is there already may stay as it is."""

    total: int  # places
    block_bytes: int
    identity: bytes  # of what is written: all that a block depends on beside its key

    def entries(self) -> list[tuple[int, bytes]]:
        """Places that hold something, with its keys; none of a store where blocks are found by keys alone."""

    def new_buffer(self) -> Bytes:
        """Memory for a block, for one of the threads that read and write."""

    def read(self, place: int, key: bytes, buffer: Bytes) -> None:
        """Raises BadBlock for another block than the one that was stored under this key."""

    def begin(self, places: Iterable[int]) -> None:
        """Blocks are about to be written there."""

    def write(self, place: int, key: bytes, buffer: Bytes) -> int:
        """Returns what `commit` is told of it, a checksum."""

    def commit(self, rows: Sequence[tuple[int, bytes, int]]) -> None:
        """These have been written: place, key, checksum."""

    def drop(self, places: Iterable[int], keys: Sequence[bytes]) -> None:
        """What these places hold, and what has these keys, is not found any more."""

    def wipe(self, identity: bytes) -> None:
        """Nothing that is there is found any more. What is written from now on is of this identity."""

    def close(self) -> None:
        """Nothing is read or written any more."""


@runtime_checkable
class SharedBlockStore(BlockStore, Protocol):
    """One that other servers use as well, which is asked what it has."""

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Numbers of those that are not there. A thread of its own calls it."""


class StorageStatistics(msgspec.Struct, frozen=True):
    """Totals since the start."""

    bytes_out: int = 0  # to storage
    bytes_in: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    failed: int = 0  # blocks


@dataclass(frozen=True, slots=True)
class Renew:
    """Weights have changed: what is written from now on is of this identity."""

    identity: bytes


@dataclass(frozen=True, slots=True)
class Task:
    """One block of a message."""

    generation: int
    to_storage: bool
    row: int
    block: int
    place: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    task: Task
    error: str = ""  # empty: it was moved
    checksum: int = 0


@dataclass(slots=True)
class Told:
    """Messages that count and their answers. The lock is held while either changes."""

    lock: Lock = field(default_factory=Lock)
    generation: int = 0  # of the messages that count
    epoch: int = 0
    answers: deque[StorageAnswer] = field(default_factory=deque)


class StorageCopier:
    """An executor's blocks in files, or in a shared store. host: blocks of its host's memory. # uint8 [blocks, block
    bytes]"""

    def __init__(self, store: BlockStore, host: Bytes, threads: int = THREADS) -> None:
        self.store = store
        self._host = host
        self._told = Told()
        self._jobs: SimpleQueue[tuple[int, StorageMessage | Renew] | None] = SimpleQueue()
        self._questions: SimpleQueue[tuple[int, FindBlocks] | None] = SimpleQueue()
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._locks = [Lock() for _ in range(threads)]  # of each thread that moves blocks, while it touches the memory
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._counted = StorageStatistics()
        for lock in self._locks:
            Thread(target=self._move, args=(lock,), name="storage-block", daemon=True).start()
        Thread(target=self._run, name="storage", daemon=True).start()
        if isinstance(store, SharedBlockStore):
            Thread(target=self._find, args=(store,), name="storage-keys", daemon=True).start()

    def fileno(self) -> int:
        """Readable when there are answers, until `collect`."""
        return self._woken

    @property
    def answered(self) -> bool:
        return bool(self._told.answers)

    def ask(self, message: StorageMessage) -> None:
        """Another epoch, and word that everything is to be forgotten, end what was asked before."""
        if message.epoch != self._told.epoch or (isinstance(message, ForgetBlocks) and message.everything):
            self.forget()
            self._told.epoch = message.epoch
        if isinstance(message, FindBlocks):
            self._questions.put((self._told.generation, message))
        else:
            self._jobs.put((self._told.generation, message))

    def renew(self) -> None:
        """Weights have changed: nothing that was computed with the others is found any more, and nothing that will be
        computed with these in another life."""
        self.forget()
        self._jobs.put((self._told.generation, Renew(os.urandom(32))))

    def forget(self) -> None:
        """No message so far counts: from here on the host's memory is touched for none of them, and none is
        answered."""
        with self._told.lock:
            self._told.generation += 1
            self._told.answers.clear()
        for lock in self._locks:
            with lock:
                pass  # what it is copying began before

    def collect(self) -> list[StorageAnswer]:
        with suppress(BlockingIOError):  # nothing was done meanwhile
            os.eventfd_read(self._woken)
        found = []
        while self._told.answers:
            found.append(self._told.answers.popleft())
        return found

    def statistics(self) -> StorageStatistics:
        return self._counted

    def close(self) -> None:
        """Once everything that was asked for has been done, no thread runs and the files are closed."""
        self._jobs.put(None)
        self._questions.put(None)

    def _find(self, store: SharedBlockStore) -> None:
        while (job := self._questions.get()) is not None:
            generation, message = job
            keys, failed = unpack_keys(message.keys), False
            try:
                missing = store.missing(keys)
            except OSError as error:
                warn("store_not_asked", keys=len(keys), error=str(error))
                missing, failed = list(range(len(keys))), True
            self._answer(generation, BlocksFound(message.number, np.array(missing, np.int32).tobytes(), failed))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            generation, message = job
            match message:
                case ListBlocks(number):
                    for part in list_parts(number, self.store.entries()):
                        self._answer(generation, part)
                case MoveBlocks():
                    self._answer(generation, self._move_all(generation, message))
                case ForgetBlocks():
                    self._forget_blocks(message)
                case Renew(identity):
                    self._wipe(identity)
        for _ in self._locks:
            self._tasks.put(None)
        self.store.close()

    def _answer(self, generation: int, answer: StorageAnswer) -> None:
        with self._told.lock:
            if generation == self._told.generation:
                self._told.answers.append(answer)
        os.eventfd_write(self._woken, 1)

    def _forget_blocks(self, message: ForgetBlocks) -> None:
        if message.everything:
            self._wipe(self.store.identity)
            return
        try:
            self.store.drop(integers(message.places).tolist(), unpack_keys(message.keys))
        except OSError as error:
            warn("storage_not_forgotten", error=str(error))
            self._wipe(self.store.identity)

    def _wipe(self, identity: bytes) -> None:
        """What cannot be removed from the index is found in another life, if its identity is that of then."""
        try:
            self.store.wipe(identity)
        except OSError as error:
            warn("storage_not_emptied", error=str(error))

    def _move_all(self, generation: int, message: MoveBlocks) -> BlocksMoved:
        table = move_table(message.blocks).tolist()
        began = time.perf_counter()
        try:
            if message.to_storage:
                self.store.begin([place for _, place in table])
        except OSError as error:
            self._count(message, 0, 0.0, dict.fromkeys(range(len(table)), str(error)))
            return BlocksMoved(message.number, 0.0, np.arange(len(table), dtype=np.int32).tobytes())
        for row, ((block, place), key) in enumerate(zip(table, unpack_keys(message.keys), strict=True)):
            self._tasks.put(Task(generation, message.to_storage, row, block, place, key))
        outcomes = sorted([self._outcomes.get() for _ in table], key=lambda one: one.task.row)
        good = [one for one in outcomes if not one.error]
        errors = {one.task.row: one.error for one in outcomes if one.error and one.error != OUTDATED}
        if message.to_storage and good:
            try:
                self.store.commit([(one.task.place, one.task.key, one.checksum) for one in good])
            except OSError as error:
                errors.update((one.task.row, str(error)) for one in good)
                good = []
        seconds = time.perf_counter() - began
        self._count(message, len(good), seconds, errors)
        return BlocksMoved(message.number, seconds, np.array(sorted(errors), np.int32).tobytes())

    def _count(self, message: MoveBlocks, moved: int, seconds: float, errors: dict[int, str]) -> None:
        found, way = self._counted, "out" if message.to_storage else "in"
        count, time_name = f"bytes_{way}", f"seconds_{way}"
        self._counted = msgspec.structs.replace(found, **{
            count: getattr(found, count) + moved * self.store.block_bytes,
            time_name: getattr(found, time_name) + seconds, "failed": found.failed + len(errors),
        })  # fmt: skip
        if errors:
            warn("storage_failed", direction=way, blocks=len(errors), error=next(iter(errors.values())))

    def _move(self, lock: Lock) -> None:
        """A thread that moves blocks."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        buffer = self.store.new_buffer()
        while (task := self._tasks.get()) is not None:
            try:
                outcome = self._store(task, buffer, lock) if task.to_storage else self._load(task, buffer, lock)
            except (OSError, BadBlock) as error:
                outcome = Outcome(task, str(error))
            self._outcomes.put(outcome)

    def _store(self, task: Task, buffer: Bytes, lock: Lock) -> Outcome:
        with lock:
            if task.generation != self._told.generation:
                return Outcome(task, OUTDATED)
            np.copyto(buffer[: self.store.block_bytes], self._host[task.block])
        return Outcome(task, checksum=self.store.write(task.place, task.key, buffer))

    def _load(self, task: Task, buffer: Bytes, lock: Lock) -> Outcome:
        self.store.read(task.place, task.key, buffer)
        with lock:
            if task.generation != self._told.generation:
                return Outcome(task, OUTDATED)
            np.copyto(self._host[task.block], buffer[: self.store.block_bytes])
        return Outcome(task)


def list_parts(number: int, entries: list[tuple[int, bytes]]) -> Iterator[BlocksListed]:
    """One message at least."""
    for first in range(0, max(len(entries), 1), LISTED):
        part = entries[first : first + LISTED]
        yield BlocksListed(
            number=number, places=np.array([place for place, _ in part], np.int32).tobytes(),
            keys=pack_keys([key for _, key in part]), last=first + LISTED >= len(entries),
        )  # fmt: skip


def warn(event: str, **fields: object) -> None:
    log.warning(event, extra={"fields": fields})
