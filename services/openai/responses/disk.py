"""Where stored responses are kept on disk: a directory of their own, and threads that wait for it.

Without `--response-dir` it is a temporary one, known to the api processes of a server by its run directory's name, and
removed with the last of them; one whose run directory is gone is removed by whoever starts next. What is written here
is best effort: a full disk costs stored responses and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import msgspec

from penstock.protocol.errors import ConfigError
from penstock.services.supervisor.run_directory import private

PREFIX = "penstock-responses-"
CACHE = "CACHE_DIRECTORY"  # systemd.exec(5), CacheDirectory=
OWNER = "of"  # the file that names the run directory
READERS = 4
FRESH = ".new"
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
            write(folder / OWNER, os.fsencode(named))
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
        raise ConfigError("--response-dir", str(folder), error.strerror or "cannot be made") from None
    if not stat.S_ISDIR(state.st_mode):
        raise ConfigError("--response-dir", str(folder), "is no directory")
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError("--response-dir", str(folder), "must belong to this user alone (mode 0700)")
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
        write(path, data)
    except OSError as error:
        for each in (path.with_name(path.name + FRESH), path):
            removed(each)
        return error.strerror or "error"
    return ""


def write(path: Path, data: bytes) -> None:
    """Replace a file as a whole. Raises OSError."""
    fresh = path.with_name(path.name + FRESH)
    with open(fresh, "wb", opener=private) as file:
        file.write(data)
    fresh.replace(path)


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
