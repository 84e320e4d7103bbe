"""The weights that stay in the host's memory while an executor sleeps (--keep-weights): when they are copied, when they
come back, and when they are let go. How they lie there is `engine_core.loading.kept_weights`.

The copy is made as the executor first falls asleep, and lasts until its process ends, or other weights are written, or
the operator wants the memory. Its memory is reserved before, while steps run: the kernel takes longer to give out and
clear pages than the copy takes to fill them. Whatever is wrong with it, the weights are read from files.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from mmap import PAGESIZE
from typing import TYPE_CHECKING

from penstock.services.executor.device import available_memory
from penstock.services.supervisor import logs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from penstock.engine_core.loading.kept_weights import Parts, Table

log = logging.getLogger(__name__)

NOT_KEPT = -1  # in place of a descriptor
SPARE = 1 << 28  # bytes of the host's memory that are left to others
PIECE = 64 << 20  # bytes that are reserved at a time; so few numbers, one of each page, are written by one thread
NICE = 15  # of the thread that reserves: steps come first


class ReservedMemory:
    """A file whose pages a thread has the kernel give out, as far as there is memory for them."""

    def __init__(self, file: int, size: int) -> None:
        from penstock.engine_core.loading.kept_weights import mapped

        self.file = file
        os.ftruncate(file, size)
        self._memory = mapped(file, size)
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._reserve, name="kept weights", daemon=True)
        self._thread.start()

    def stop(self) -> Tensor:
        """Wait for the piece that is being reserved; the memory of the file, which has the other pages once they are
        written to."""
        self.stopped.set()
        self._thread.join()
        return self._memory

    def _reserve(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        for first in range(0, len(self._memory), PIECE):
            if self.stopped.is_set():
                return
            missing, room = len(self._memory) - taken(self.file), available_memory() - SPARE
            if missing > room:
                reason = f"{missing} bytes are missing, and {room} of the host's memory are free"
                logs.warning(log, "weights_not_reserved", reason=reason, instead="the next sleep takes longer")
                os.ftruncate(self.file, 0)  # give back what there is
                return
            self._memory[first : first + PIECE : PAGESIZE].zero_()  # without Python's lock


class KeptWeights:
    """One executor's copy, through all images of its process."""

    def __init__(self, file: int = NOT_KEPT) -> None:
        self.file = file
        self._reserved: ReservedMemory | None = None  # for the next copy

    @property
    def nbytes(self) -> int:
        """Of the host's memory."""
        return 0 if self.file == NOT_KEPT else os.fstat(self.file).st_size

    def reserve(self, parts: Parts) -> None:
        """Begin to reserve memory for a copy of these parts' weights, unless there is one."""
        from penstock.engine_core.loading.kept_weights import size_of

        if self.file == NOT_KEPT:
            self._reserved = ReservedMemory(new_file(), size_of(parts))

    def outdate(self) -> None:
        """These weights are not to come again: keep the memory for the next ones."""
        if self.file != NOT_KEPT:
            self._reserved, self.file = ReservedMemory(self.file, self.nbytes), NOT_KEPT

    def drop(self) -> None:
        """Give its memory back: these weights are not to come again."""
        if self._reserved is not None:
            self._take()
        if self.file != NOT_KEPT:
            os.close(self.file)
            self.file = NOT_KEPT

    def restore(self, parts: Parts, key: str, device: torch.device) -> Table | None:
        """Fill these parts; None: there is no copy that fits, and they must be read from files."""
        if self.file == NOT_KEPT:
            return None
        from penstock.engine_core.loading.kept_weights import KeptWeightsError, restore

        try:
            table = restore(self.file, parts, key, device)
        except KeptWeightsError as error:
            logs.warning(log, "kept_weights_unusable", reason=str(error), instead="weights are read from files")
            self.drop()
            return None
        logs.info(log, "weights_restored", bytes=self.nbytes, path=table.path, version=table.version)
        return table

    def keep(self, parts: Parts, key: str, path: str, version: str) -> None:
        """Copy the weights of these parts, unless that has been done."""
        if self.file != NOT_KEPT:
            return
        from penstock.engine_core.loading.kept_weights import write

        began = time.monotonic()
        memory = self._take() if self._reserved is not None else None
        if self.file == NOT_KEPT:
            self.file = new_file()
        try:
            room = max(0, available_memory() - SPARE) + taken(self.file)
            write(self.file, parts, key, path, version, room, memory)
        except (OSError, MemoryError) as error:
            logs.warning(log, "weights_not_kept", reason=str(error))
            self.drop()
            return
        seconds = round(time.monotonic() - began, 3)
        logs.info(log, "weights_kept", bytes=self.nbytes, version=version, seconds=seconds)

    def _take(self) -> Tensor:
        """The memory that is reserved, whose file is to have the copy."""
        assert self._reserved is not None
        reserved, self._reserved = self._reserved, None
        self.file = reserved.file
        return reserved.stop()


def new_file() -> int:
    return os.memfd_create("penstock-weights", os.MFD_CLOEXEC)


def taken(file: int) -> int:
    """Bytes of the host's memory that it has."""
    return os.fstat(file).st_blocks * 512  # stat(2)
