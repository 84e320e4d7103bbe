"""The run directory of one server: made, locked, and cleared of leftovers. No other user can enter it."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from penstock.protocol.errors import ConfigError
from penstock.protocol.links import LINKS
from penstock.protocol.served_models import FOLDER

PREFIX = "penstock-"
TEMPORARY = "PENSTOCK_TEMPORARY_DIR"  # set for processes started in a directory that was made for this run alone
PARENT = "PENSTOCK_PARENT"  # process id of the launcher, set for its children
SYSTEMD = "RUNTIME_DIRECTORY"  # systemd.exec(5), RuntimeDirectory=
LOCK = "lock"
FRESH = ".new"  # suffix of a file that is about to replace another
SOCKET_PATH_BYTES = 107  # unix(7): sun_path less its final zero
LONGEST_NAME = max(len(f"{link.name}-999.sock") for link in LINKS)
# What one process of a server writes there and another one reads, as far as its writers remove it; of those that could
# not, the next server does. The lock and reports of crashes stay.
LEFTOVERS = (
    "*.sock",  # of links and of sd_notify
    "*.store",  # torch's FileStore of one generation of a group of executors
    "*.metrics",  # a snapshot of a process's metrics
    "*.starts",  # how often a process was started since it ended in order
    "*.starts.new",
    "*.kv",  # a link to a prefill replica's memory for KV blocks
    "*.kv.new",
    "adapters.json",  # LoRA adapters that were loaded and unloaded at run time
    "adapters.lock",  # held while that is replaced
    "failures.*",  # processes in a crash loop
)
LOCK_SECONDS = 10.0  # until a killed launcher has released its lock, on an overloaded machine
STALE_SECONDS = 60.0  # younger directories may belong to a launcher that has not locked yet


class RunDirectory:
    """A run directory held by a launcher: locked against a second one, removed at the end when it is temporary."""

    def __init__(self, path: Path, *, temporary: bool) -> None:
        self.path = path
        self.temporary = temporary
        self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not taken(self._lock):
            os.close(self._lock)
            raise ConfigError("--run-dir", str(path), "another `penstock serve` runs there")

    @classmethod
    def open(cls, given: str) -> RunDirectory:
        """The directory named by --run-dir, or a new temporary one. Raises ConfigError when it cannot be used."""
        if given:
            return cls(prepared(Path(given)), temporary=os.environ.get(TEMPORARY) == given)
        parent = temporary_parent()
        sweep(parent)
        return cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)), temporary=True)

    def environment(self) -> dict[str, str]:
        """Variables by which the children can remove the directory if the launcher cannot."""
        return {TEMPORARY: str(self.path)} if self.temporary else {}

    def close(self) -> None:
        """Remove the files, and the directory if it is temporary; release the lock."""
        clear(self.path, temporary=self.temporary)
        os.close(self._lock)


class SocketFile:
    """The file of a socket that this process has bound. A file that has replaced it belongs to another process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = identity(path)

    def remove(self) -> None:
        """Called before the socket is closed: while it is open, no other file can get the same inode number."""
        if self._found is not None and identity(self._path) == self._found:
            self._path.unlink(missing_ok=True)


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None without one."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def private(path: str, flags: int) -> int:
    """An `opener` for files that only their owner may read."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically; only its owner may read it. Raises OSError."""
    fresh = path.with_name(path.name + FRESH)
    with open(fresh, "wb", opener=private) as file:
        file.write(data)
    fresh.replace(path)


def taken(lock: int) -> bool:
    """Lock an open file; False if another process holds the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def prepared(path: Path) -> Path:
    """Make the directory if it is missing, with mode 0700, and return its absolute path.

    Raises ConfigError when its path is too long for socket files, it is no directory, or others may enter it.
    """
    path = Path(os.path.abspath(path))
    longest = len(os.fsencode(path)) + 1 + LONGEST_NAME
    if longest > SOCKET_PATH_BYTES:
        raise ConfigError(
            "--run-dir", str(path), f"its path must be {longest - SOCKET_PATH_BYTES} bytes shorter for socket files"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError("--run-dir", str(path), f"it cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError("--run-dir", str(path), "it must be a directory and no symbolic link")
    if found.st_uid != os.geteuid():
        raise ConfigError("--run-dir", str(path), "it must belong to the user that runs Penstock")
    if found.st_mode & 0o077:
        raise ConfigError("--run-dir", str(path), f"its mode must be 0700, not {stat.S_IMODE(found.st_mode):04o}")
    return path


def of_one_process(given: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The run directory of a process started by a supervisor: --run-dir, or the one that systemd made for it."""
    named = given or environ.get(SYSTEMD, "").split(":")[0]
    if not named:
        raise ConfigError("--run-dir", "", "a process started by itself needs the directory that all of them share")
    return prepared(Path(named))


def temporary_parent() -> Path:
    """The system's temporary directory, or /tmp where that one's path is too long for socket files."""
    parent = Path(tempfile.gettempdir())
    name = len(PREFIX) + 8 + 1 + LONGEST_NAME
    return parent if len(os.fsencode(parent)) + 1 + name <= SOCKET_PATH_BYTES else Path("/tmp")


def sweep(parent: Path) -> None:
    """Remove temporary run directories of this user whose launcher and api processes were all killed."""
    for path in parent.glob(PREFIX + "*"):
        try:
            found = path.lstat()
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < STALE_SECONDS:
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        if taken(lock):
            clear(path, temporary=True)
        os.close(lock)


def clear(path: Path, *, temporary: bool) -> None:
    """Remove a server's files from its run directory; safe to do twice and from several processes."""
    if temporary:
        shutil.rmtree(path, ignore_errors=True)
        return
    for pattern in LEFTOVERS:
        for name in (*path.glob(pattern), *path.glob(f"{FOLDER.format('*')}/{pattern}")):
            name.unlink(missing_ok=True)
    for folder in path.glob(FOLDER.format("*")):
        with suppress(OSError):  # it has reports of crashes, which are kept
            folder.rmdir()


def await_end(pid: int, seconds: float) -> None:
    """Wait until a process and all its threads have ended. Source: pidfd_open(2)."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([pidfd], [], [], seconds)
    os.close(pidfd)


def clear_orphan(path: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Clean up at the end of an api process whose launcher was killed, unless another launcher has taken over the
    directory. The lock of a launcher is free once its last thread has ended."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return  # it is gone already
    if PARENT in environ:
        await_end(int(environ[PARENT]), LOCK_SECONDS)
    if taken(lock):
        clear(path, temporary=environ.get(TEMPORARY) == str(path))
    os.close(lock)
