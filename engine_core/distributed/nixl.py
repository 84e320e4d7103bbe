"""What Penstock calls of NIXL, the library by which one process reads memory of another one, on another host: over
RDMA, or over what else UCX finds.

The library's own class, `nixl_agent`, has a progress thread that never sleeps: it takes a core of a host that does
nothing. So the bindings are called as that class calls them, with a thread that waits.

Source: NIXL's nixl_agent and ucx_backend.cpp (pthrDelay).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

MODULES = ("nixl_cu13", "nixl_cu12")  # of the wheels nixl-cu13 and nixl-cu12; memory of the host is the same to both
MISSING = "NIXL is not installed: pip install 'penstock[nixl]'"
# What ends a process that cannot do without it.
NEEDED = "with --scheduler-address KV blocks go between hosts by NIXL, and {}"
BACKEND = "UCX"
LOOKS = 5000  # microseconds between looks of the progress thread, which otherwise wakes when something comes


class NixlError(Exception):
    """The library cannot be used here, or something of another process cannot be read any more."""


class Agent:
    """An agent of this process, for one thread at a time. Other agents meet it by its metadata. Methods raise
    NixlError.

    served: others read memory of this process. Where the network has no RDMA, a thread of the library serves them.
    """

    def __init__(self, name: str, *, served: bool = False) -> None:
        self._bindings = bindings = load()
        self._errors = tuple(getattr(bindings, found) for found in dir(bindings) if found.endswith("Error"))
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.pthrDelay, config.useListenThread = served, LOOKS, False
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
        with self._failing():
            self._agent = bindings.nixlAgent(name, config)
            if BACKEND not in self._agent.getAvailPlugins():
                raise NixlError(f"its plugin {BACKEND} cannot be loaded")
            self._agent.createBackend(BACKEND, {})

    @property
    def metadata(self) -> bytes:
        """By which others meet this agent and find the memory that it has registered."""
        with self._failing():
            return bytes(self._agent.getLocalMD())

    def register(self, address: int, size: int) -> Any:
        """Have memory of this process read, or read into, until it is given to `deregister`."""
        memory = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, runs([address], [size]))
        with self._failing(f"{size} bytes of memory cannot be registered"):
            self._agent.registerMem(memory, [])
        return memory

    def deregister(self, memory: Any) -> None:
        with suppress(*self._errors):
            self._agent.deregisterMem(memory, [])

    def meet(self, metadata: bytes) -> str:
        """The name of another agent, from now on."""
        with self._failing():
            return bytes(self._agent.loadRemoteMD(metadata)).decode()

    def forget(self, name: str) -> None:
        """Another agent cannot be reached any more. It may be met again."""
        with suppress(*self._errors):
            self._agent.invalidateRemoteMD(name)

    def read(self, name: str, here: NDArray[np.uint64], there: NDArray[np.uint64]) -> int:
        """Begin to read an agent's memory, as `runs` of the same sizes here and there. What `ended` and `release`
        take."""
        kind, lists = self._bindings.DRAM_SEG, self._bindings.nixlXferDList
        with self._failing():
            read = int(
                self._agent.createXferReq(self._bindings.NIXL_READ, lists(kind, here), lists(kind, there), name, "", [])
            )
            try:
                self._agent.postXferReq(read)
            except self._errors:
                self.release(read)
                raise
        return read

    def ended(self, read: int) -> bool:
        """Whether everything is here."""
        with self._failing():
            return bool(self._agent.getXferStatus(read) == self._bindings.NIXL_SUCCESS)

    def release(self, read: int) -> None:
        """It has ended, or failed. The library keeps what it cannot release."""
        with suppress(*self._errors):
            self._agent.releaseXferReq(read)

    @contextmanager
    def _failing(self, what: str = "NIXL failed") -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise NixlError(f"{what}: {error}") from None


def installed() -> bool:
    return any(find_spec(name) is not None for name in MODULES)


def load() -> Any:
    """The bindings. Raises NixlError."""
    found = [name for name in MODULES if find_spec(name) is not None]
    if not found:
        raise NixlError(MISSING)
    try:
        return importlib.import_module(f"{found[0]}._bindings")
    except (ImportError, OSError) as error:
        raise NixlError(f"NIXL cannot be loaded: {error}") from None


def runs(addresses: Sequence[int], sizes: Sequence[int]) -> NDArray[np.uint64]:
    """Runs of memory. # uint64 [runs, 3]: address, bytes, number of a device"""
    return np.array([addresses, sizes, [0] * len(sizes)], np.uint64).T.copy()
