"""Mooncake's client, in a process of its own beside each executor that uses a shared store.

While the master does not answer, the library keeps the interpreter from running anything else: 90 s in `setup`, 9 s in
`close` (0.3.13). It brings some thirty threads and a Go runtime with signal handlers, and a call after `close` ends the
process. None of that may happen where steps are run. This process may hang or die at any moment; the executor computes
meanwhile and starts another one (kv_store.py).

Blocks are in memory that both have mapped. Each connection has a thread here, which does one call after the other. On
the first connection the process says that it is ready, and it ends when that closes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.protocol.kv_store import MooncakeSettings

PR_SET_PDEATHSIG = 1  # prctl(2)
CONNECT_SECONDS = 10.0
LENGTH = struct.Struct("<I")  # in front of each message
MISSING = -704  # Mooncake's code for a key that is not there


class Call(msgspec.Struct, frozen=True):
    """What an executor has done. The answer is a list of numbers, Mooncake's own for each key."""

    method: str  # of CALLS
    keys: list[str]
    at: int = 0  # of the block in the memory
    size: int = 0


class Channel:
    """Messages over a socket, each behind its length, for one thread at either end.

    limit: seconds that sending, or waiting for more, may take; then it raises TimeoutError.
    """

    def __init__(self, end: socket.socket, limit: float | None = None) -> None:
        end.settimeout(limit)
        self._end = end
        weakref.finalize(self, end.close)  # another thread may be using it when its process is given up

    def send(self, message: bytes) -> None:
        self._end.sendall(LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Raises EOFError at the end."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._read(length)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not (piece := self._end.recv(size - len(data))):
                raise EOFError
            data += piece
        return bytes(data)


# By method: of the store, what was called, and the memory's address.
CALLS: Mapping[str, Callable[[Any, Call, int], list[int]]] = {
    "get": lambda store, call, memory: [store.get_into(call.keys[0], memory + call.at, call.size)],
    "put": lambda store, call, memory: [store.put_from(call.keys[0], memory + call.at, call.size)],
    "exist": lambda store, call, _: list(store.batch_is_exist(call.keys)),
    "remove": lambda store, call, _: remove(store, call.keys),
    "remove_matching": lambda store, call, _: [store.remove_by_regex(call.keys[0], True)],
}


def main(settings: str, memory: str, *links: str) -> None:
    """Raises EOFError once the executor is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor's matter
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    first, *others = [Channel(socket.socket(fileno=int(number))) for number in links]
    try:
        blocks = np.frombuffer(mmap.mmap(int(memory), 0), np.uint8)
        store = set_up(msgspec.json.decode(settings, type=MooncakeSettings), blocks)
    except (ImportError, OSError) as error:
        first.send(str(error).encode())
        return
    threading.excepthook = die
    for link in others:
        threading.Thread(target=serve, args=(store, link, blocks.ctypes.data), daemon=True).start()
    first.send(b"")
    first.receive()


def set_up(settings: MooncakeSettings, blocks: NDArray[np.uint8]) -> Any:
    """A client of the store that may read and write these blocks. Raises ImportError and OSError."""
    from mooncake.store import MooncakeDistributedStore

    host = own_address(settings.master_server_address)
    store = MooncakeDistributedStore()
    code = store.setup(
        settings.local_hostname or host, settings.metadata_server,
        settings.segment_bytes, settings.buffer_bytes, settings.protocol, settings.device_name,
        settings.master_server_address,
    )  # fmt: skip
    if code:
        raise OSError(f"it cannot be set up (code {code})")
    if code := store.register_buffer(blocks.ctypes.data, blocks.nbytes):
        raise OSError(f"memory cannot be registered (code {code})")
    return store


def remove(store: Any, keys: list[str]) -> list[int]:
    """Up to the first one that cannot be removed: each may take as long as the master is waited for."""
    found: list[int] = []
    while len(found) < len(keys) and not (found and found[-1] not in (0, MISSING)):
        found.append(store.remove(keys[len(found)], True))
    return found


def own_address(master: str) -> str:
    """The address by which this host reaches the master. Raises OSError at once where nobody listens: the library would
    try for 90 s."""
    host, _, port = master.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as probe:
        return str(probe.getsockname()[0])


def serve(store: Any, link: Channel, address: int) -> None:
    """Do the calls of one connection."""
    while True:
        call = msgspec.msgpack.decode(link.receive(), type=Call)
        link.send(msgspec.msgpack.encode(CALLS[call.method](store, call, address)))


def die(failed: threading.ExceptHookArgs) -> None:
    """A thread that ends leaves a connection without one: the executor starts another process."""
    os._exit(0 if isinstance(failed.exc_value, EOFError) else 1)


if __name__ == "__main__":
    with suppress(EOFError):
        main(*sys.argv[1:])
    os._exit(0)  # the library's threads may not end
