"""KV blocks that an executor reads from the memory of another host's executor, which is as shared_blocks.py has it.

A thread reads them by NIXL into memory of this host, a chunk of blocks at a time, and their stamps before each chunk
and behind it: the rule of shared_blocks.py, by which the other executor waits for nobody and takes no part. The steps'
thread sees what has come, and copies it to the device.

Each of the two threads writes some fields of a `RemoteRead`, and reads the others.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.distributed.nixl import Agent, NixlError, runs
from penstock.engine_core.execution.shared_blocks import STAMP_BYTES, Layout, SharedBlocks, spans, written
from penstock.engine_core.execution.transfer import pinned_memory
from penstock.engine_core.models.memory_estimate import staging_blocks
from penstock.protocol.messages import BlocksAddress
from penstock.protocol.step_columns import Column

log = logging.getLogger(__name__)

CHUNKS = 4  # that the memory of this host has room for: some are read while others are copied to the device
LOOKS = 0.0003  # seconds between looks at what is being read
WAIT = 0.002  # seconds between looks at stamps of blocks that have not been written yet
GRACE = 1.0  # seconds that a read has to end in that nobody wants
NO_CHUNK = -1


@dataclass(frozen=True, eq=False)
class PublishedBlocks:
    """An executor's memory, which executors of other hosts read as long as this is there."""

    agent: Agent
    address: BlocksAddress

    @classmethod
    def make(cls, shared: SharedBlocks, agent: Agent) -> PublishedBlocks:
        """Raises NixlError."""
        layout, stamps, blocks = shared.layout, int(shared.stamps.ctypes.data), shared.blocks.data_ptr()
        agent.register(shared.memory.data_ptr(), shared.memory.nbytes)
        return cls(agent, BlocksAddress(agent.metadata, layout.label, layout.run_bytes, layout.blocks, stamps, blocks))


@dataclass(slots=True, eq=False)
class RemoteRead:
    """Blocks of one message, in the order of their stamps. See `BlockRead`."""

    replica: int  # whose
    address: BlocksAddress
    sources: Column  # int32 [blocks], in the other's memory
    wanted: NDArray[np.int64]  # [blocks], stamps
    memory: Tensor
    places: Column  # int32 [blocks], in `memory`: of those that have come
    # The steps' thread writes:
    taken: int = 0  # so many are on the device
    closed: float | None = None  # since when nobody wants more of it
    # The thread that reads:
    come: int = 0  # so many are here, and are what was asked for
    failed: bool = False  # the others will not come
    chunks: deque[tuple[int, int]] = field(default_factory=deque)  # ends of what they hold, and their numbers
    peer: str = ""  # name of the other's agent
    found: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [blocks], stamps as read last
    registered: Any = None  # its memory
    reading: int | None = None  # what is being read
    reads_chunk: bool = False  # that is `chunk`; else it is stamps
    chunk: int = NO_CHUNK  # for the blocks from `come` up to `end`
    end: int = 0
    right: int = 0  # so many had the right stamps when these were read last
    due: float = 0.0  # not before then are they read again

    def arrived(self, at: int) -> int | None:
        come = self.come  # before `failed`, which is said behind it
        return None if self.failed and come == at else come

    def copied(self, count: int) -> None:
        self.taken = count

    def unchanged(self, count: int) -> bool:
        return count <= self.come

    def close(self) -> None:
        self.closed = time.perf_counter()


class RemoteBlocks:
    """What an executor reads of other hosts' memory. layout: of its own, whose blocks are alike."""

    def __init__(self, agent: Agent, layout: Layout, device: torch.device) -> None:
        """Raises MemoryError, and NixlError."""
        self._agent, self._layout = agent, layout
        self._rows = max(1, staging_blocks(layout.run_bytes) // CHUNKS)  # blocks of a chunk
        self._memory = pinned_memory((CHUNKS * self._rows, layout.run_bytes), torch.uint8, device)
        agent.register(self._memory.data_ptr(), self._memory.nbytes)
        self._free = deque(range(CHUNKS))
        self._asked: SimpleQueue[RemoteRead] = SimpleQueue()
        self._peers: dict[int, tuple[bytes, str]] = {}  # by replica: metadata and name of its agent
        self._warned: dict[int, bytes] = {}  # by replica: metadata of the agent whose failure was told of
        Thread(target=self._run, name="remote blocks", daemon=True).start()

    def read(self, replica: int, address: BlocksAddress, sources: Column, stamps: NDArray[np.int64]) -> RemoteRead:
        """Read these blocks as they are written. # int32 [blocks], int64 [blocks], ascending"""
        places = np.zeros(len(sources), np.int32)
        found = RemoteRead(replica, address, sources, stamps, self._memory, places)
        self._asked.put(found)
        return found

    def _run(self) -> None:
        reads: list[RemoteRead] = []
        while True:
            if (one := self._next(reads)) is not None:
                self._begin(one)
                reads.append(one)
            for one in reads:
                self._go_on(one)
            reads = [one for one in reads if not self._over(one)]

    def _next(self, reads: list[RemoteRead]) -> RemoteRead | None:
        """What is asked for next: wait for it until it is time to look at `reads`."""
        pause = LOOKS if any(one.reading is not None for one in reads) else WAIT
        try:
            return self._asked.get(timeout=pause if reads else None)
        except Empty:
            return None

    def _begin(self, one: RemoteRead) -> None:
        try:
            one.peer = self._meet(one.replica, one.address)
            one.found = np.zeros(len(one.wanted), np.int64)
            one.registered = self._agent.register(int(one.found.ctypes.data), one.found.nbytes)
        except (NixlError, ValueError) as error:
            self._fail(one, error)

    def _meet(self, replica: int, address: BlocksAddress) -> str:
        """The name of the agent of a replica's executor, which may be another one than before. Raises ValueError for
        blocks of another kind."""
        self._layout.check_alike(address.label, address.run_bytes)
        metadata, name = self._peers.get(replica, (b"", ""))
        if metadata != address.metadata:
            if name:
                self._agent.forget(name)
            name = self._agent.meet(address.metadata)
            self._peers[replica] = address.metadata, name
            told = {"replica": replica, "agent": name, "blocks": address.blocks}
            log.info("prefill_memory", extra={"fields": told})
        return name

    def _go_on(self, one: RemoteRead) -> None:
        """See what has been read, and read what follows: stamps, a chunk of blocks that have the right ones, stamps."""
        if one.failed:
            return
        try:
            if one.reading is not None:
                if not self._agent.ended(one.reading):
                    return
                self._agent.release(one.reading)
                one.reading = None
                if one.reads_chunk:
                    self._read_stamps(one)
                    return
                self._compare(one)
            ended = one.failed or one.closed is not None or one.come == len(one.wanted)
            if ended or time.perf_counter() < one.due:
                return
            if one.right == one.come:
                self._read_stamps(one)
            elif self._free:
                self._read_chunk(one)
        except NixlError as error:
            self._fail(one, error)

    def _compare(self, one: RemoteRead) -> None:
        """Stamps have been read again. A chunk that was read before is good if its blocks have the right ones still."""
        count = written(one.found[one.come :], one.wanted[one.come :])
        if count is None or (one.chunk != NO_CHUNK and one.come + count < one.end):
            one.failed = True
            return
        one.right = one.come + count
        if one.chunk != NO_CHUNK:
            one.chunks.append((one.end, one.chunk))
            one.chunk, one.come = NO_CHUNK, one.end
        if one.right == one.come:
            one.due = time.perf_counter() + WAIT

    def _read_stamps(self, one: RemoteRead) -> None:
        """Of all blocks that have not come."""
        self._read(one, one.come, len(one.wanted), int(one.found[one.come :].ctypes.data), one.address.stamps_at,
                   STAMP_BYTES)  # fmt: skip
        one.reads_chunk = False

    def _read_chunk(self, one: RemoteRead) -> None:
        """Of blocks whose stamps were right."""
        one.chunk, one.end = self._free.popleft(), min(one.come + self._rows, one.right)
        first = one.chunk * self._rows
        one.places[one.come : one.end] = np.arange(first, first + one.end - one.come)
        self._read(one, one.come, one.end, self._memory[first].data_ptr(), one.address.blocks_at, one.address.run_bytes)
        one.reads_chunk = True

    def _read(self, one: RemoteRead, first: int, end: int, here: int, there: int, size: int) -> None:
        """So many bytes for each of these blocks, side by side from `here` on, and from `there` on by their numbers."""
        found = [(first + at, stop - at) for at, stop in spans(one.sources[first:end], end - first)]
        sizes = [size * count for _, count in found]
        ours = [here + size * (at - first) for at, _ in found]
        theirs = [there + size * int(one.sources[at]) for at, _ in found]
        one.reading = self._agent.read(one.peer, runs(ours, sizes), runs(theirs, sizes))

    def _fail(self, one: RemoteRead, error: Exception) -> None:
        """What is left of it will not come. The next read meets its executor anew, if that lives."""
        if one.reading is not None:
            self._agent.release(one.reading)
            one.reading = None
        one.failed = True
        self._leave(one)
        if self._warned.get(one.replica) != one.address.metadata:
            self._warned[one.replica] = one.address.metadata
            told = {"replica": one.replica, "agent": one.peer, "reason": str(error)}
            log.warning("prefill_memory_failed", extra={"fields": told})

    def _leave(self, one: RemoteRead) -> None:
        """Break off all that is being read of its executor, unless that has been done."""
        if one.peer and self._peers.get(one.replica) == (one.address.metadata, one.peer):
            del self._peers[one.replica]
            self._agent.forget(one.peer)

    def _over(self, one: RemoteRead) -> bool:
        """Give back chunks that are on the device, and everything once nobody wants it and nothing is being read. What
        is read may still be written to its chunk, until it ends or is broken off."""
        while one.chunks and (one.closed is not None or one.chunks[0][0] <= one.taken):
            self._free.append(one.chunks.popleft()[1])
        if one.closed is None:
            return False
        if one.reading is not None:
            if time.perf_counter() - one.closed >= GRACE:
                self._leave(one)
            return False
        if one.chunk != NO_CHUNK:
            self._free.append(one.chunk)
        if one.registered is not None:
            self._agent.deregister(one.registered)
        return True
