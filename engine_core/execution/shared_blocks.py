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
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.execution.transfer import pin
from penstock.protocol.step_columns import Column

STAMP_BYTES = 8
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # a reader cannot lose pages under its hands


class Layout(msgspec.Struct, frozen=True):
    """What stands at the beginning: a reader must have the same."""

    label: str  # of the chip, types and layers
    run_bytes: int  # of a block
    blocks: int


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
            if (found.label, found.run_bytes) != (layout.label, layout.run_bytes):
                raise ValueError(f"its blocks are of {found.label}, {found.run_bytes} bytes each, and ours are not")
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

    def written(self, places: Column, stamps: NDArray[np.int64]) -> int | None:
        """How many of these blocks have been written as their stamps say, before the first that is not yet. None: one
        of them has other content since. # int32 [places], int64 [places]"""
        found = self.stamps[places]
        if (np.abs(found) > stamps).any():
            return None
        return len(found) if (found == stamps).all() else int((found != stamps).argmax())

    @property
    def path(self) -> str:
        """By which other processes of this user open it, as long as this one lives."""
        assert self.descriptor >= 0, "it is another process's"
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"


def first_block(layout: Layout) -> int:
    """Where the blocks begin, at a page: behind one for the layout, and the stamps."""
    return mmap.PAGESIZE + -(-layout.blocks * STAMP_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def total_bytes(layout: Layout) -> int:
    return first_block(layout) + layout.blocks * layout.run_bytes
