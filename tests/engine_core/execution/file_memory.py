"""A device's memory that several processes reach, as files that they map."""

from __future__ import annotations

import ctypes
import mmap
import secrets
from pathlib import Path

from penstock.engine_core.distributed.custom_all_reduce import HANDLE_BYTES


class FileMemory:
    """Stands for a driver: what fails is told by name, and how."""

    def __init__(self, folder: Path, failing: str = "") -> None:
        self.folder = folder
        self.failing = failing
        self.held: dict[int, tuple[mmap.mmap, Path]] = {}  # by address
        self.freed: list[str] = []

    def allocate(self, size: int) -> int:
        self._call("allocate")
        path = self.folder / secrets.token_hex(8)
        path.write_bytes(bytes(size))
        return self._map(path)

    def free(self, address: int) -> None:
        path = self.held.pop(address)[1]
        path.unlink()
        self.freed.append(path.name)

    def handle(self, address: int) -> bytes:
        self._call("handle")
        return self.held[address][1].name.encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        self._call("open")
        return self._map(self.folder / handle.rstrip(b"\0").decode())

    def close(self, address: int) -> None:
        del self.held[address]

    def write(self, address: int, content: bytes) -> None:
        if self.failing != "lost":
            ctypes.memmove(address, content, len(content))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def fill(self, address: int, word: int, words: int) -> None:
        self.write(address, word.to_bytes(4, "little") * words)

    def _map(self, path: Path) -> int:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.held[address] = mapped, path
        return address

    def _call(self, name: str) -> None:
        if self.failing == name:
            raise OSError(f"{name}: refused")
