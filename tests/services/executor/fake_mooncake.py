"""A store in files of the folder that FAKE_MOONCAKE names. Its file `fault` says what goes wrong: `die`, `hang`, or the
code that every call answers."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from pathlib import Path


class MooncakeDistributedStore:
    def __init__(self) -> None:
        self._folder = Path(os.environ["FAKE_MOONCAKE"])

    def _fault(self) -> int:
        try:
            fault = (self._folder / "fault").read_text()
        except FileNotFoundError:
            return 0
        if fault == "die":
            os._exit(9)
        if fault == "hang":
            threading.Event().wait()
        return int(fault)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "@")

    def setup(self, *given: object) -> int:
        return self._fault()

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def get_into(self, key: str, address: int, size: int) -> int:
        if fault := self._fault():
            return fault
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return -704
        if len(data) > size:
            return -600
        ctypes.memmove(address, data, len(data))
        return len(data)

    def put_from(self, key: str, address: int, size: int) -> int:
        if fault := self._fault():
            return fault
        if not self._path(key).exists():
            part = self._folder / f"part-{os.getpid()}-{threading.get_ident()}"
            part.write_bytes(ctypes.string_at(address, size))
            part.rename(self._path(key))
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        fault = self._fault()
        return [fault or int(self._path(key).exists()) for key in keys]

    def remove(self, key: str, force: bool = False) -> int:
        if fault := self._fault():
            return fault
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return -704
        return 0

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        if fault := self._fault():
            return fault
        found = [path for path in self._folder.iterdir() if re.search(pattern, path.name.replace("@", "/"))]
        for path in found:
            path.unlink()
        return len(found)
