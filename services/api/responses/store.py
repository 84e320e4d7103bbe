"""The responses that are kept, for `previous_response_id` and for whoever retrieves them: the latest, within bounds.

One api process keeps its own in memory. Where several share a port a client reaches any of them, so each writes its own
into the run directory, which all of them read; the process that made a response counts it against its bounds. A
process that is started again goes on with what it finds there of its own.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections import OrderedDict
from pathlib import Path

import msgspec

from protocol.config import ApiConfig
from protocol.errors import NotFound
from services import journal
from services.rundir import RESPONSES

log = logging.getLogger(__name__)

ID = re.compile(r"resp_[0-9a-f]{4}[0-9a-f]{40}")


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """One response."""

    status: str
    answer: bytes  # JSON, as it is retrieved
    input: bytes  # JSON: its own input items, as they are listed
    messages: bytes  # JSON: the conversation until its end as chat messages, without its instructions


class StoreStatistics(msgspec.Struct, frozen=True):
    """What this process keeps, and what it has let go of."""

    responses: int
    bytes: int
    evicted: int


class ResponseStore:
    """Owned by the api process `index` of `processes`."""

    def __init__(self, run_dir: Path, index: int, processes: int, options: ApiConfig) -> None:
        self._most = options.max_stored_responses
        self._most_bytes = options.max_stored_bytes
        self._prefix = f"resp_{index:04x}"
        self._folder = run_dir / RESPONSES if processes > 1 else None
        self._kept: OrderedDict[str, int] = OrderedDict()  # bytes by id, the oldest first
        self._memory: dict[str, Stored] = {}
        self._decoder = msgspec.msgpack.Decoder(Stored)
        self._bytes = self._evicted = 0
        self.shared = processes > 1
        if self._folder is not None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._adopt(self._folder)

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._most > 0

    def new_id(self) -> str:
        return self._prefix + secrets.token_hex(20)

    def put(self, name: str, stored: Stored) -> None:
        """Keep a response of this process, or its new state, and let the oldest go where they are too many. One that
        the disk does not take is answered all the same and not kept, as the log says."""
        if not self.keeps:
            return
        if self._folder is not None and not self._write(self._folder, name, stored):
            return
        size = len(stored.answer) + len(stored.input) + len(stored.messages)
        self._bytes += size - self._kept.pop(name, 0)
        self._kept[name] = size
        if self._folder is None:
            self._memory[name] = stored
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))
            self._evicted += 1

    def get(self, name: str) -> Stored:
        """Raises NotFound for a response that no process of this server keeps."""
        found = self._memory.get(name) if self._folder is None else self._read(self._folder, name)
        if found is None:
            raise self.absent(name)
        return found

    def delete(self, name: str) -> None:
        """Raises NotFound as `get` does."""
        self.get(name)
        if name in self._kept:
            self._drop(name)
        elif self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)  # its own process counts it until it lets it go

    def absent(self, name: str) -> NotFound:
        kept = f"the latest {self._most:,} of each api process are (--max-stored-responses, --max-stored-bytes)"
        reason = f"{kept}, unless store was false or they were deleted" if self.keeps else "this server keeps none"
        return NotFound(f"no response {name[:64]!r} is kept; {reason}", code="response_not_found")

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(len(self._kept), self._bytes, self._evicted)

    def close(self) -> None:
        """The process ends in order, and with it what it keeps."""
        for name in list(self._kept):
            self._drop(name)

    def _adopt(self, folder: Path) -> None:
        """Count what an earlier life of this process has left."""
        own = [path for path in folder.glob(f"{self._prefix}*") if ID.fullmatch(path.name)]
        for path in sorted(own, key=lambda path: path.stat().st_mtime_ns):
            self._kept[path.name] = path.stat().st_size
            self._bytes += path.stat().st_size

    def _write(self, folder: Path, name: str, stored: Stored) -> bool:
        fresh = folder / f"{name}.new"
        try:
            fresh.write_bytes(msgspec.msgpack.encode(stored))
            fresh.replace(folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            journal.error(log, "response_not_kept", response=name, reason=error.strerror)
            return False
        return True

    def _read(self, folder: Path, name: str) -> Stored | None:
        if not ID.fullmatch(name):
            return None
        try:
            return self._decoder.decode((folder / name).read_bytes())
        except (OSError, msgspec.DecodeError):
            return None  # never was, is gone, or is of another release

    def _drop(self, name: str) -> None:
        self._bytes -= self._kept.pop(name)
        self._memory.pop(name, None)
        if self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)
