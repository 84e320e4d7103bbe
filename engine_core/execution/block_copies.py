"""Copies of KV blocks between the device and the host's memory, beside the steps.

A block is one run of bytes in the host's memory, whose layers lie apart on the device. So a copy goes through staging
memory of the device: one launch gathers or scatters many blocks' lines, and the device's copy engines take runs to the
host or back, which costs steps next to nothing. Each direction has a stream and staging memory of its own.

What is copied was written by steps whose results the scheduler has seen, and what is written is read by no step before
the answer (`CopyBlocks`). So copies wait for no step in flight. Only drafting is not over when a step's result is seen,
so they wait for that of the last such step.

Blocks may come from the host's memory of another process as well, by the same way, and are fetched while that one still
writes others of them: from memory that is mapped here (shared_blocks.py), or from that of another host
(remote_blocks.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.execution.remote_blocks import PublishedBlocks, RemoteBlocks
from penstock.engine_core.execution.shared_blocks import BlockRead, Layout, MappedRead, SharedBlocks, spans
from penstock.engine_core.execution.storage_copies import StorageCopier, StorageStatistics
from penstock.engine_core.execution.transfer import Upload, pinned_memory
from penstock.engine_core.models.memory_estimate import staging_blocks
from penstock.kernels.block_copies import block_lines, gather_blocks, scatter_blocks
from penstock.protocol.messages import BlocksAddress
from penstock.protocol.step_columns import Column, copy_table
from penstock.protocol.steps import OWN_MEMORY, BlocksCopied, CopyBlocks, copy_stamp
from penstock.protocol.storage_blocks import StorageAnswer, StorageMessage

PATIENCE = 2.0  # seconds that copies wait for another process to write what they read
MOST_BYTES = 4 << 20  # of one copy: those of steps, which share the copy engines, wait for no more


class CopyStatistics(msgspec.Struct, frozen=True):
    """Totals since the start."""

    bytes_out: int  # to the host's memory
    bytes_in: int
    seconds_out: float
    seconds_in: float
    storage: StorageStatistics | None = None  # None: there is none


@dataclass(slots=True)
class Lane:
    """One direction."""

    staging: Tensor  # uint8 [blocks, run bytes]
    upload: Upload
    stream: torch.cuda.Stream | None
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Part:
    """Copies that are enqueued together."""

    end: int  # of the message's
    began: torch.cuda.Event | None
    ended: torch.cuda.Event | None
    seconds: float = 0.0  # that a CPU computed

    @property
    def finished(self) -> bool:
        return self.ended is None or bool(self.ended.query())  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Copies:
    """Those of one message. What other processes read or write of them have stamps, and come in the order of these."""

    message: CopyBlocks
    lane: Lane
    table: Column  # [blocks, 2], as in the message, but neighbours in the host's memory together
    stamps: NDArray[np.int64]  # [blocks]
    blocks: Tensor  # int32 [blocks], on the device
    since: float  # when the last ones were enqueued, or it was asked for
    read: BlockRead | None  # of another process's memory
    at: int = 0  # those before it are enqueued
    done: int = 0  # those before it have been copied
    parts: deque[Part] = field(default_factory=deque)  # that have not ended
    seconds: float = 0.0  # of those that have
    stale: bool = False


class BlockCopier:
    """An executor's blocks in the host's memory. memory: of the device's blocks, [blocks, ...] each, contiguous.

    label: of what the blocks are, where other processes read them as they are. shared: they read those of this one.
    Raises MemoryError if the host's memory cannot be had.
    """

    def __init__(
        self, memory: Sequence[Tensor], blocks: int, device: torch.device, *, label: str = "", shared: bool = False
    ) -> None:
        self._lines = block_lines(memory)
        self.device = device
        self.layout = Layout(f"{label} {self._lines.word} {self._lines.widths}", self._lines.run_bytes, blocks)
        self.shared = SharedBlocks.make(self.layout, device) if shared else None
        self.others: dict[int, SharedBlocks] = {}  # by replica; another thread maps them, and lets them go
        self.member = 0  # of its group: it reads the memory of others by the same number
        self.remote: RemoteBlocks | None = None  # reads what is not mapped; None: nothing does
        self.published: PublishedBlocks | None = None  # where other hosts read this one's
        if self.shared is None:
            self.host = pinned_memory((blocks, self._lines.run_bytes), torch.uint8, device)
        else:
            self.host = self.shared.blocks
        self._out, self._in = self._lane(), self._lane()
        self._epoch = 0  # of what was asked last
        self._asked: list[CopyBlocks] = []  # and not begun
        self._begun: list[Copies] = []
        self.storage: StorageCopier | None = None  # required where blocks are asked for that are there
        self.answers: deque[BlocksCopied | StorageAnswer] = deque()
        self._warm_up()

    def _lane(self) -> Lane:
        rows, run_bytes = min(staging_blocks(self._lines.run_bytes), len(self.host)), self._lines.run_bytes
        staging = torch.zeros(rows, run_bytes, dtype=torch.uint8, device=self.device)
        stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            steps = torch.cuda.current_stream(self.device)  # which makes the memory
            # A launch here takes some microseconds. It would wait for as long as steps of prompts leave no room.
            stream = torch.cuda.Stream(self.device, priority=steps.priority - 1)  # type: ignore[no-untyped-call]
            stream.wait_stream(steps)
        return Lane(staging, Upload(self.device), stream)

    def _warm_up(self) -> None:
        """Compile the kernels, by copies of the scratch block."""
        for to_host in (True, False):
            table = np.zeros((1, 2), np.int32).tobytes()
            self.ask(CopyBlocks(number=0, epoch=0, to_host=to_host, blocks=table))
            self.iterate()
        self.forget()
        self._out.bytes = self._in.bytes = 0
        self._out.seconds = self._in.seconds = 0.0

    @property
    def address(self) -> BlocksAddress | None:
        """Where other hosts read this one's blocks."""
        return None if self.published is None else self.published.address

    @property
    def busy(self) -> bool:
        """Whether copies are to be made, are on their way, or are to be answered."""
        asked = self._asked or self._begun or self.answers
        return bool(asked or (self.storage is not None and self.storage.answered))

    def ask(self, message: CopyBlocks | StorageMessage) -> None:
        """A new epoch forgets what was asked in the one before."""
        if not isinstance(message, CopyBlocks):
            assert self.storage is not None, "ready said that there is room"
            self.storage.ask(message)
            return
        if message.epoch != self._epoch:
            self._forget_copies()
            self._epoch = message.epoch
        self._asked.append(message)

    def iterate(self, drafting: torch.cuda.Event | None = None) -> None:
        """Enqueue what is asked for, and see what has ended. drafting: its end behind the last step whose result the
        scheduler may have seen."""
        for message in self._asked:
            self._begin(message, drafting)
        self._asked.clear()
        left = []
        for one in self._begun:
            self._go_on(one)
            if one.parts or one.at < len(one.table):
                left.append(one)
            else:
                self._answer(one)
        self._begun = left
        if self.storage is not None:
            self.answers += self.storage.collect()

    def forget(self) -> None:
        """Everything, once nothing is written any more: the blocks are given away anew."""
        if self.storage is not None:
            self.storage.forget()
        self._forget_copies()
        self.answers.clear()

    def _forget_copies(self) -> None:
        for lane in (self._out, self._in):
            if lane.stream is not None:
                lane.stream.synchronize()
        for one in self._begun:
            if one.read is not None:
                one.read.close()
        self._asked.clear()
        self._begun.clear()
        self.answers = deque(answer for answer in self.answers if not isinstance(answer, BlocksCopied))

    def statistics(self) -> CopyStatistics:
        storage = None if self.storage is None else self.storage.statistics()
        return CopyStatistics(self._out.bytes, self._in.bytes, self._out.seconds, self._in.seconds, storage)

    @torch.inference_mode()
    def _begin(self, message: CopyBlocks, drafting: torch.cuda.Event | None) -> None:
        lane, table = self._out if message.to_host else self._in, copy_table(message.blocks)
        stamps, read = np.full(len(table), copy_stamp(message.epoch, message.number)), None
        if message.replica != OWN_MEMORY:
            stamps = np.frombuffer(message.stamps, np.int64)
        elif message.to_host and self.shared is not None:
            self.shared.stamps[table[:, 1]] = -stamps
        order = np.lexsort((table[:, 1], stamps))
        table, stamps = table[order], stamps[order]
        if message.replica != OWN_MEMORY and (read := self._read(message, table[:, 1], stamps)) is None:
            self.answers.append(BlocksCopied(message.number, stale=True))
            return
        if lane.stream is not None and drafting is not None:
            lane.stream.wait_event(drafting)
        with torch.cuda.stream(lane.stream):  # of None: nothing happens
            (blocks,) = lane.upload.send((table[:, 0].copy(),))
        self._begun.append(Copies(message, lane, table, stamps, blocks, time.perf_counter(), read))

    def _read(self, message: CopyBlocks, places: Column, stamps: NDArray[np.int64]) -> BlockRead | None:
        """These blocks of another process's memory, which is mapped, or else of another host; None: it is neither."""
        shared = self.others.get(message.replica)
        if shared is not None:
            return MappedRead(shared, places, stamps, message.replica, self.others)
        address = message.addresses[self.member] if message.addresses else None
        if self.remote is None or address is None:
            return None
        return self.remote.read(message.replica, address, places, stamps)

    def _go_on(self, one: Copies) -> None:
        """Enqueue copies as far as what they read is there, and see which have ended."""
        if one.at < len(one.table):
            end = len(one.table) if one.read is None else self._arrived(one, one.read)
            if end > one.at:
                self._enqueue(one, end)
        while one.parts and one.parts[0].finished:
            part = one.parts.popleft()
            if one.message.to_host and self.shared is not None:
                self.shared.stamps[one.table[one.done : part.end, 1]] = one.stamps[one.done : part.end]
            if one.read is not None:
                one.read.copied(part.end)
            one.done = part.end
            if part.began is not None and part.ended is not None:
                part.seconds = float(part.began.elapsed_time(part.ended)) / 1000
            one.seconds += part.seconds

    def _arrived(self, one: Copies, read: BlockRead) -> int:
        """The end of what can be read of another process's blocks. If others will never come, they are given up."""
        end = read.arrived(one.at)
        if end is None or (end == one.at and time.perf_counter() - one.since > PATIENCE):
            one.stale, one.table = True, one.table[: one.at]
        return one.at if end is None else end

    @torch.inference_mode()
    def _enqueue(self, one: Copies, end: int) -> None:
        """Copies of the blocks up to `end`, in parts that the staging memory has room for."""
        lane, to_host = one.lane, one.message.to_host
        memory, places = (self.host, one.table[:, 1]) if one.read is None else (one.read.memory, one.read.places)
        with torch.cuda.stream(lane.stream):
            for first in range(one.at, end, len(lane.staging)):
                started, began, last = time.thread_time(), self._mark(lane), min(first + len(lane.staging), end)
                self._copy(lane, memory, one.blocks[first:last], places[first:last], to_host=to_host)
                one.parts.append(Part(last, began, self._mark(lane), time.thread_time() - started))
        lane.bytes += (end - one.at) * self._lines.run_bytes
        one.at, one.since = end, time.perf_counter()

    def _copy(self, lane: Lane, memory: Tensor, blocks: Tensor, places: Column, *, to_host: bool) -> None:
        """As many blocks as the staging memory has room for. places: neighbours together."""
        most = max(1, MOST_BYTES // self._lines.run_bytes)
        if to_host:
            gather_blocks(blocks, self._lines, lane.staging)
        for first, end in spans(places, most):
            staged = lane.staging[first:end]
            held = memory[places[first] : places[first] + end - first]
            if to_host:
                held.copy_(staged, non_blocking=True)
            else:
                staged.copy_(held, non_blocking=True)
        if not to_host:
            scatter_blocks(blocks, self._lines, lane.staging)

    def _answer(self, one: Copies) -> None:
        one.lane.seconds += one.seconds
        if one.read is not None:  # they may have been written again meanwhile
            one.stale |= not one.read.unchanged(one.at)
            one.read.close()
        self.answers.append(BlocksCopied(one.message.number, one.seconds, one.stale))

    def _mark(self, lane: Lane) -> torch.cuda.Event | None:
        if lane.stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(lane.stream)
        return event
