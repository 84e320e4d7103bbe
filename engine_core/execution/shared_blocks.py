"""Memory of the host for KV blocks that one process writes and others read: a prefill replica's executor, and those of
the replicas that decode.

It is a memfd: it has no name that could outlive the processes that map it, and what a dead one has written stays as it
is for those that read it. Each block has a stamp, larger than all before: negative while the block is written. Who
reads some looks at their stamps before and afterwards. So nothing is read that is not what it should be, and a writer
waits for nobody.

Source: memfd_create(2), fcntl(2) on seals, proc_pid_fd(5).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.execution.transfer import pin
from penstock.protocol.step_columns import Column

STAMP_BYTES = 8
Span = tuple[int, int]  # first, end
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # a reader cannot lose pages under its hands


class Layout(msgspec.Struct, frozen=True):
    """What stands at the beginning: a reader must have the same."""

    label: str  # of the chip, types and layers
    run_bytes: int  # of a block
    blocks: int

    def check_alike(self, label: str, run_bytes: int) -> None:
        """Raise ValueError for blocks that are not like these, whatever their number is."""
        if (label, run_bytes) != (self.label, self.run_bytes):
            raise ValueError(f"its blocks are of {label}, {run_bytes} bytes each, and ours are not")


@dataclass(frozen=True, eq=False)
class SharedBlocks:
    """The memory, mapped and, for a GPU, pinned."""

    layout: Layout
    memory: Tensor  # uint8 [bytes], of all: it is pinned as long as this object is there
    stamps: NDArray[np.int64]  # [blocks]
    blocks: Tensor  # uint8 [blocks, run bytes]
    descriptor: int  # of the process that made it; -1 in others

    @classmethod
    def make(cls, layout: Layout, device: torch.device) -> SharedBlocks:
        """Raises MemoryError if the memory cannot be had."""
        descriptor = os.memfd_create("penstock-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, total_bytes(layout))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            os.pwrite(descriptor, msgspec.json.encode(layout), 0)
            return cls._map(layout, descriptor, device, owner=True)
        except OSError as error:
            os.close(descriptor)
            raise MemoryError(f"{total_bytes(layout)} bytes cannot be shared: {error.strerror}") from None

    @classmethod
    def open(cls, path: str, layout: Layout, device: torch.device) -> SharedBlocks:
        """That of another process, by a path of its descriptor. Its number of blocks need not be that of `layout`.
        Raises OSError if it is not there, MemoryError if it cannot be pinned, ValueError if it is something else."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != SEALS:
                raise ValueError("it is not what an executor shares")
            found = msgspec.json.decode(os.pread(descriptor, mmap.PAGESIZE, 0).rstrip(b"\0"), type=Layout)
            layout.check_alike(found.label, found.run_bytes)
            if os.fstat(descriptor).st_size != total_bytes(found):
                raise ValueError("it is not as large as it says")
            return cls._map(found, descriptor, device, owner=False)
        finally:
            os.close(descriptor)

    @classmethod
    def _map(cls, layout: Layout, descriptor: int, device: torch.device, *, owner: bool) -> SharedBlocks:
        memory = torch.frombuffer(mmap.mmap(descriptor, total_bytes(layout)), dtype=torch.uint8)
        pin(memory, device)
        first = mmap.PAGESIZE
        stamps = memory[first : first + layout.blocks * STAMP_BYTES].numpy().view(np.int64)
        blocks = memory[first_block(layout) :].view(layout.blocks, layout.run_bytes)
        return cls(layout, memory, stamps, blocks, descriptor if owner else -1)

    @property
    def path(self) -> str:
        """By which other processes of this user open it, as long as this one lives."""
        assert self.descriptor >= 0, "it is another process's"
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"


class BlockRead(Protocol):
    """Blocks of another executor's memory that are copied to a device, in the order of their stamps."""

    @property
    def memory(self) -> Tensor:
        """Where those are that have arrived. # uint8 [blocks, run bytes]"""

    @property
    def places(self) -> Column:
        """Which blocks of that memory they are. # int32 [blocks]"""

    def arrived(self, at: int) -> int | None:
        """The end of those that can be copied behind the first `at`, which have been; None: no others will come."""

    def copied(self, count: int) -> None:
        """The first `count` need not be kept any more."""

    def unchanged(self, count: int) -> bool:
        """Whether the first `count`, which have been copied, were what was asked for until now."""

    def close(self) -> None:
        """Nothing of it is wanted any more."""


@dataclass(frozen=True, eq=False)
class MappedRead:
    """Blocks of memory that is mapped here. See `BlockRead`."""

    shared: SharedBlocks
    places: Column
    wanted: NDArray[np.int64]  # [blocks], stamps
    replica: int
    mapped: Mapping[int, SharedBlocks]  # as of now, by replica

    @property
    def memory(self) -> Tensor:
        return self.shared.blocks

    def arrived(self, at: int) -> int | None:
        count = self._written(at, len(self.wanted))
        gone = self.mapped.get(self.replica) is not self.shared
        return None if count is None or (count == 0 and gone) else at + count

    def copied(self, count: int) -> None:
        pass  # what is mapped stays

    def unchanged(self, count: int) -> bool:
        return self._written(0, count) == count

    def close(self) -> None:
        pass

    def _written(self, first: int, end: int) -> int | None:
        return written(self.shared.stamps[self.places[first:end]], self.wanted[first:end])


def written(found: NDArray[np.int64], wanted: NDArray[np.int64]) -> int | None:
    """How many blocks have been written as their stamps say, before the first that is not yet. None: one of them has
    other content since. # int64 [blocks] each"""
    if (np.abs(found) > wanted).any():
        return None
    return len(found) if (found == wanted).all() else int((found != wanted).argmax())


def spans(places: Column, most: int) -> Iterator[Span]:
    """Runs of at most `most` of these numbers that follow one another, by their indices."""
    first = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or at - first == most or places[at] != places[at - 1] + 1:
            yield first, at
            first = at


def first_block(layout: Layout) -> int:
    """Where the blocks begin, at a page: behind one for the layout, and the stamps."""
    return mmap.PAGESIZE + -(-layout.blocks * STAMP_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def total_bytes(layout: Layout) -> int:
    return first_block(layout) + layout.blocks * layout.run_bytes
