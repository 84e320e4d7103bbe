"""Responses that are kept, for `previous_response_id` and for clients that retrieve them: the latest, within bounds.

One api process keeps its own in memory. Where several share a port a client reaches any of them, so each writes its own
to a directory that all of them read; with --response-dir one process does so too, and what is there outlives it. The
process that made a response counts it against its bounds. A process that is started again goes on with what it finds.

Files are read and written by threads: the event loop waits for no disk. What waits to be written is bounded as what is
kept is, and is found meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import msgspec

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import ConfigError, NotFound
from penstock.services.supervisor import logs
from penstock.services.supervisor.run_directory import FRESH, replace_file

log = logging.getLogger(__name__)

ID = re.compile(r"resp_([0-9a-f]{4})[0-9a-f]{40}")
RUNNING = ("in_progress", "queued")
KEEPS_NONE = "this server keeps none (--max-stored-responses is 0)"


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
    waiting_bytes: int  # that are still to be written
    evicted: int
    lost: int  # that the disk did not take


class ResponseStore:
    """Owned by the api process `index` of `processes`."""

    def __init__(self, run_dir: Path, index: int, processes: int, options: ApiConfig) -> None:
        """Raises ConfigError for a directory that cannot be used."""
        self._most = options.max_stored_responses
        self._most_bytes = options.max_stored_bytes
        self._prefix = f"resp_{index:04x}"
        self._kept: OrderedDict[str, int] = OrderedDict()  # bytes by id, the oldest first
        self._memory: dict[str, Stored] = {}
        self._waiting: dict[str, Stored] = {}  # the latest state of each that is still to be written
        self._decoder = msgspec.msgpack.Decoder(Stored)
        self._bytes = self._waiting_bytes = self._evicted = self._lost = 0
        self.shared = processes > 1
        on_disk = self.keeps and (processes > 1 or bool(options.response_dir))
        self._disk = Disk.open(options.response_dir, run_dir) if on_disk else None
        if self._disk is not None:
            self._adopt(self._disk.folder, index, processes)

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._most > 0

    def new_id(self) -> str:
        return self._prefix + secrets.token_hex(20)

    def put(self, name: str, stored: Stored) -> asyncio.Future[str] | None:
        """Keep a response of this process, or its new state, and let the oldest go where they are too many. One that
        the disk does not take is answered all the same and not kept, as the log says. None: nothing to wait for."""
        if not self.keeps:
            return None
        size = len(stored.answer) + len(stored.input) + len(stored.messages)
        if self._disk is None:
            self._memory[name] = stored
            self._count(name, size)
            return None
        if self._waiting_bytes + size > self._most_bytes:
            self._waiting.pop(name, None)
            self._disk.remove(name)
            self._lose(name, "too much waits to be written")
            return None
        self._waiting[name] = stored
        self._waiting_bytes += size
        writing = self._disk.write(name, msgspec.msgpack.encode(stored))
        writing.add_done_callback(functools.partial(self._written, name, stored, size))
        return writing

    async def get(self, name: str) -> Stored:
        """Raises NotFound for a response that no process of this server keeps."""
        found = self._memory.get(name) or self._waiting.get(name)
        gone = name.startswith(self._prefix) and name not in self._kept  # its file may still wait to be removed
        if found is None and self._disk is not None and not gone and ID.fullmatch(name):
            data = await self._disk.read(name)
            try:
                found = None if data is None else self._decoder.decode(data)
            except msgspec.DecodeError:
                found = None  # of another release
        if found is None:
            raise self.absent(name)
        return found

    async def delete(self, name: str) -> None:
        """Raises NotFound as `get` does."""
        await self.get(name)
        if self._disk is not None:
            await self._disk.remove(name)  # behind what waits; where it is another process's, that one counts it on
        self._waiting.pop(name, None)
        self._forget(name)

    def absent(self, name: str) -> NotFound:
        kept = f"the latest {self._most:,} of each api process are (--max-stored-responses, --max-stored-bytes)"
        reason = f"{kept}, unless store was false or they were deleted" if self.keeps else KEEPS_NONE
        return NotFound(f"no response {name[:64]!r} is kept; {reason}", code="response_not_found")

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(len(self._kept), self._bytes, self._waiting_bytes, self._evicted, self._lost)

    def close(self) -> None:
        """The process ends in order, and with it what it keeps, unless that is in --response-dir."""
        own, self._kept, self._memory, self._bytes = list(self._kept), OrderedDict(), {}, 0
        if self._disk is not None:
            self._disk.close(own)

    def _written(self, name: str, stored: Stored, size: int, writing: asyncio.Future[str]) -> None:
        self._waiting_bytes -= size
        if self._waiting.get(name) is stored:
            del self._waiting[name]
        reason = "cancelled" if writing.cancelled() else writing.result()
        if reason:
            self._lose(name, reason)
        else:
            self._count(name, size)

    def _lose(self, name: str, reason: str) -> None:
        self._lost += 1
        self._forget(name)
        logs.error(log, "response_not_kept", response=name, reason=reason)

    def _count(self, name: str, size: int) -> None:
        """It is kept, and the oldest are not where they are too many."""
        self._bytes += size - self._kept.pop(name, 0)
        self._kept[name] = size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            oldest = next(iter(self._kept))
            self._forget(oldest)
            self._evicted += 1
            if self._disk is not None:
                self._disk.remove(oldest)

    def _forget(self, name: str) -> None:
        self._bytes -= self._kept.pop(name, 0)
        self._memory.pop(name, None)

    def _adopt(self, folder: Path, index: int, processes: int) -> None:
        """Count what an earlier life of this process has left; the first one also takes those of processes that are no
        more. The oldest go first. What was being made ends here."""
        found = []
        for path in folder.iterdir():
            match = ID.fullmatch(path.name)
            if match is None or (int(match[1], 16) != index and (index or int(match[1], 16) < processes)):
                continue
            state = path.stat()
            found.append((state.st_mtime_ns, path, state.st_size))
        for _, path, size in sorted(found):
            self._kept[path.name] = size
            self._bytes += size
            with path.open("rb") as file:
                if interrupted(file.read(32), RUNNING):
                    self._end(path)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            oldest = next(iter(self._kept))
            self._forget(oldest)
            (folder / oldest).unlink(missing_ok=True)

    def _end(self, path: Path) -> None:
        """A response that was being made when its process ended has failed."""
        stored = self._decoder.decode(path.read_bytes())
        error = {"code": "server_error", "message": "the server ended before the response did"}
        answer = msgspec.json.decode(stored.answer) | {"status": "failed", "error": error}
        ended = msgspec.structs.replace(stored, status="failed", answer=msgspec.json.encode(answer))
        path.write_bytes(msgspec.msgpack.encode(ended))


PREFIX = "penstock-responses-"
CACHE = "CACHE_DIRECTORY"  # systemd.exec(5), CacheDirectory=
OWNER = "of"  # the file that names the run directory
READERS = 4
STALE = 60.0  # seconds; a younger directory may not have its owner's name yet


class Disk:
    """Files of one directory by name. Writes and removals happen in the order in which they were asked for."""

    def __init__(self, folder: Path, *, temporary: bool) -> None:
        self.folder = folder
        self._temporary = temporary
        self._writer = ThreadPoolExecutor(1, "responses-write")
        self._readers = ThreadPoolExecutor(READERS, "responses-read")

    @classmethod
    def open(cls, given: str, run_dir: Path) -> Disk:
        """The directory that is given, or the server's temporary one. Raises ConfigError for one that others own."""
        if given:
            return cls(owned(Path(given)), temporary=False)
        # systemd gives units a cache that they share, and a /tmp that they do not.
        parent = Path(os.environ.get(CACHE, "").partition(":")[0] or tempfile.gettempdir())
        sweep(parent, time.time())
        named = run_dir.absolute()
        folder = owned(parent / f"{PREFIX}{blake2b(os.fsencode(named), digest_size=8).hexdigest()}")
        with contextlib.suppress(OSError):
            replace_file(folder / OWNER, os.fsencode(named))
        return cls(folder, temporary=True)

    def write(self, name: str, data: bytes) -> asyncio.Future[str]:
        """Done with why it was not written, or nothing. What could not be replaced is removed: it is out of date."""
        return asyncio.get_running_loop().run_in_executor(self._writer, written, self.folder / name, data)

    async def read(self, name: str) -> bytes | None:
        """None: there is none."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, found, self.folder / name)

    def remove(self, name: str) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._writer, removed, self.folder / name)

    def close(self, own: list[str]) -> None:
        """What was asked for is done; of a temporary directory this process's `own` files go, and itself if empty."""
        self._readers.shutdown()
        self._writer.shutdown()
        if not self._temporary:
            return
        for name in own:
            removed(self.folder / name)
        if not any(path.name != OWNER for path in self.folder.glob("*")):
            shutil.rmtree(self.folder, ignore_errors=True)


def owned(folder: Path) -> Path:
    """The directory, made for this user alone where it is missing. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()  # of what a link leads to: in a directory of everybody's anybody may have put it there
    except OSError as error:
        raise ConfigError("--response-dir", str(folder), f"it cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(state.st_mode):
        raise ConfigError("--response-dir", str(folder), "it is no directory")
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError("--response-dir", str(folder), "it must belong to this user alone (mode 0700)")
    return folder


def sweep(parent: Path, now: float) -> None:
    """Remove temporary directories of this user whose run directory is gone."""
    for folder in parent.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            state = folder.lstat()
            if state.st_uid != os.geteuid() or not stat.S_ISDIR(state.st_mode) or now - state.st_mtime < STALE:
                continue
            owner = found(folder / OWNER)
            if owner is None or not os.path.exists(os.fsdecode(owner)):
                shutil.rmtree(folder, ignore_errors=True)


def written(path: Path, data: bytes) -> str:
    """Why the file was not written; empty if it was."""
    try:
        replace_file(path, data)
    except OSError as error:
        for each in (path.with_name(path.name + FRESH), path):
            removed(each)
        return error.strerror or "error"
    return ""


def found(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def removed(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def interrupted(data: bytes, statuses: tuple[str, ...]) -> bool:
    """Whether a stored response begins with one of these states; looks at its first bytes alone."""
    return any(data[1:].startswith(msgspec.msgpack.encode(status)) for status in statuses)
