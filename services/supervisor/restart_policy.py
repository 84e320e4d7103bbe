"""When a process that died is started again, and how the server learns of a crash loop.

The first restart is immediate, later ones wait longer and longer. A process that fails LIMIT times within WINDOW is in
a crash loop: a file of the run directory says so, which makes the server unready and fails the requests that wait for
the process. It is still started again now and then, in case the cause has been fixed.

Requests depend on that file, so its space is reserved at start: a crash loop can be recorded on a full disk.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

import msgspec

from penstock.protocol.errors import ConfigError
from penstock.protocol.links import Role
from penstock.services.supervisor.run_directory import private

WINDOW = 60.0  # seconds
LIMIT = 5  # failures within them
DELAYS = (0.0, 0.5, 1.0, 2.0)  # seconds before the first start after a failure, the second, and so on
CRASH_LOOP_DELAY = 30.0  # seconds between the restarts of a crash loop
FILE = "failures.json"
FILE_BYTES = 16 << 10  # reserved for it


class CrashLoop(msgspec.Struct, frozen=True):
    """A process that keeps failing, and the reason for clients and logs."""

    process: str
    role: str
    reason: str
    index: int = 0


CRASH_LOOPS = msgspec.json.Decoder(tuple[CrashLoop, ...])


class RestartPolicy:
    """The failures of one launcher's processes; times are monotonic seconds. A file that a killed launcher left is
    replaced."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE
        self._room = reserved(self._file, FILE_BYTES)
        self._times: dict[tuple[Role, int], deque[float]] = {}
        self._waiting: dict[tuple[Role, int], float] = {}
        self._crash_loops: dict[tuple[Role, int], CrashLoop] = {}

    @property
    def next(self) -> float:
        """When the next restart is due; infinity for none."""
        return min(self._waiting.values(), default=float("inf"))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def died(self, role: Role, index: int, ending: str, now: float) -> CrashLoop | None:
        """Note a death. Returns the crash loop that it begins, if any."""
        key = role, index
        times = self._times.setdefault(key, deque(maxlen=LIMIT))
        times.append(now)
        recent = sum(now - time < WINDOW for time in times)
        if key in self._crash_loops or recent >= LIMIT:
            self._waiting[key] = now + CRASH_LOOP_DELAY
            if key in self._crash_loops:
                return None
            reason = f"{role}-{index} failed {LIMIT} times within {WINDOW:.0f} seconds, the last time with {ending}"
            self._crash_loops[key] = CrashLoop(f"{role}-{index}", role.value, reason, index)
            self._write()
            return self._crash_loops[key]
        self._waiting[key] = now + DELAYS[min(recent, len(DELAYS)) - 1]
        return None

    def ended_with_group(self, role: Role, index: int, now: float) -> None:
        """A process ended because another one of its group did. That is no failure: it is needed again at once."""
        self._waiting[role, index] = now

    def due(self, now: float) -> list[tuple[Role, int]]:
        """The processes to start now."""
        found = [key for key, time in self._waiting.items() if time <= now]
        for key in found:
            del self._waiting[key]
        return found

    def recovered(self, role: Role, index: int) -> None:
        """The process is ready. Its failures still count: one that crashes at work is ready every time."""
        if self._crash_loops.pop((role, index), None) is not None:
            self._write()

    def give_up(self, roles: Iterable[Role]) -> None:
        """No process of these roles is started again: the server ends."""
        gone = set(roles)
        self._waiting = {key: time for key, time in self._waiting.items() if key[0] not in gone}

    def close(self) -> None:
        self._file.unlink(missing_ok=True)
        self._room.close()

    def _write(self) -> None:
        """Overwrite the reserved bytes, under a lock so that no reader sees half of them. If they cannot hold all crash
        loops, the first ones suffice to know that the server is incomplete."""
        found = tuple(self._crash_loops.values())
        data = msgspec.json.encode(found)
        while len(data) > FILE_BYTES:
            found = found[:-1]
            data = msgspec.json.encode(found)
        fcntl.flock(self._room, fcntl.LOCK_EX)
        os.pwrite(self._room.fileno(), data.ljust(FILE_BYTES), 0)
        fcntl.flock(self._room, fcntl.LOCK_UN)


def reserved(path: Path, size: int) -> FileIO:
    """A new file of `size` blanks, which later writes overwrite without a need for space.

    Raises ConfigError if the disk is full.
    """
    path.unlink(missing_ok=True)
    file = None
    try:
        file = FileIO(path, "x+", opener=private)
        os.posix_fallocate(file.fileno(), 0, size)
        os.pwrite(file.fileno(), b" " * size, 0)
    except OSError as error:
        if file is not None:
            file.close()
            path.unlink(missing_ok=True)
        why = f"{size >> 10} KiB of it must be free: {error.strerror}"
        raise ConfigError("--run-dir", str(path.parent), why) from error
    return file


def crash_loops(directory: Path) -> tuple[CrashLoop, ...]:
    """The crash loops among this run directory's processes; none without a launcher."""
    try:
        with (directory / FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return CRASH_LOOPS.decode(file.read())
    except (OSError, msgspec.DecodeError):
        return ()
