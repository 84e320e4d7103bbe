"""Reads LoRA adapters into host memory beside the steps, in a thread that has the lowest claim on the processor.

The main thread alone changes what steps read: it takes what has been read, and tells the scheduler. What an earlier
scheduler asked for is forgotten, also what is being read then.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from torch import Tensor

from penstock.engine_core.execution.adapter_slots import AdapterSlots
from penstock.engine_core.execution.transfer import PinnedPool
from penstock.engine_core.loading.adapters import read_adapter
from penstock.engine_core.models.adapter_folder import adapter_version
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.protocol.errors import ModelError
from penstock.protocol.steps import AdapterLoaded, DropAdapter, LoadAdapter
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

NICE = 15  # of the thread that reads
Found = tuple[LoadAdapter, Tensor | str]  # what was asked for, and the adapter or why there is none


class AdapterLoader:
    """The adapters in this executor's host memory."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._wanted: dict[int, LoadAdapter] = {}  # that nobody has dropped
        self._asked: SimpleQueue[LoadAdapter] = SimpleQueue()
        self._found: deque[Found] = deque()
        self._drops: deque[tuple[int, int]] = deque()  # plans after which a number is forgotten, and the number
        self.answers: deque[AdapterLoaded] = deque()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: Thread | None = None

    def fileno(self) -> int:
        """Readable when something has been read, until `collect`."""
        return self._woken

    def load(self, message: LoadAdapter) -> None:
        """Have a folder read. The thread begins with the first."""
        self._wanted[message.number] = message
        self._asked.put(message)
        if self._thread is None:
            self._thread = Thread(
                target=self._read, args=(self._slots.places, self._slots.memory), name="adapters", daemon=True
            )
            self._thread.start()

    def drop(self, message: DropAdapter, plans: int) -> None:
        """Forget an adapter once so many plans have begun: those that came before this may copy it."""
        self._drops.append((plans, message.number))

    def collect(self, plans: int) -> None:
        """Take what has been read and forget what was dropped. plans: that have begun."""
        if self._thread is not None:
            with suppress(BlockingIOError):  # nothing was read meanwhile
                os.eventfd_read(self._woken)
        while self._found:
            asked, found = self._found.popleft()
            if self._wanted.get(asked.number) is not asked:
                if isinstance(found, Tensor):
                    self._slots.memory.give(found, sent=False)
                continue
            if isinstance(found, Tensor):
                self._slots.loaded[asked.number] = found
            self.answers.append(AdapterLoaded(number=asked.number, error="" if isinstance(found, Tensor) else found))
        while self._drops and self._drops[0][0] <= plans:
            number = self._drops.popleft()[1]
            self._wanted.pop(number, None)
            if (held := self._slots.loaded.pop(number, None)) is not None:
                self._slots.memory.give(held)

    def forget(self) -> None:
        """Everything: a new scheduler has numbers of its own."""
        for held in self._slots.loaded.values():
            self._slots.memory.give(held)
        for kept in (self._wanted, self._drops, self.answers, self._slots.loaded):
            kept.clear()

    def _read(self, places: AdapterPlaces, memory: PinnedPool) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            asked = self._asked.get()
            if self._wanted.get(asked.number) is asked:
                self._found.append((asked, attempt(asked, places, memory)))
                os.eventfd_write(self._woken, 1)


def attempt(asked: LoadAdapter, places: AdapterPlaces, memory: PinnedPool) -> Tensor | str:
    """The adapter, or why there is none, without the path of its folder: clients are told. Raises nothing, so that the
    next one is read whatever is wrong with this."""
    folder, taken, why = Path(asked.path), None, ""
    try:
        taken = memory.take()
        read_adapter(folder, places, taken)
    except ModelError as error:
        why = str(error).replace(f"{folder}/", "").replace(f"{folder}: ", "")
    except Exception as error:  # guard: design 7, one adapter's requests end
        logs.exception(log, "adapter_failed", number=asked.number, path=asked.path)
        memory_lacks = isinstance(error, RuntimeError | MemoryError)  # pinned or at all
        why = f"this executor cannot {'hold' if memory_lacks else 'read'} it: {type(error).__name__}"
    if changed(asked):
        why = "its folder has changed since it was named: load it anew"
    if taken is not None and not why:
        logs.info(log, "adapter_loaded", number=asked.number, path=asked.path, bytes=taken.nbytes)
        return taken
    logs.warning(log, "adapter_refused", number=asked.number, path=asked.path, reason=why)
    if taken is not None:
        memory.give(taken, sent=False)
    return why


def changed(asked: LoadAdapter) -> bool:
    """Whether the folder holds something else than what was named. One that cannot be read does not say."""
    try:
        return asked.version not in ("", adapter_version(Path(asked.path)))
    except ModelError:
        return False
