"""When a process that died is started again, and what the server says of one that keeps dying.

The first time it is started at once, then after ever longer waits. One that fails LIMIT times in a WINDOW is beyond
hope: a file of the run directory tells of it, which makes the server unready and ends what waits for it. It is tried
again now and then, in case somebody has mended what was wrong.

Requests depend on that file, so its space is reserved at start: a directory that is full later can still tell.
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
LONGEST = 30.0  # seconds between the tries of a process that is beyond hope
FILE = "failures.json"
FILE_BYTES = 16 << 10  # reserved for it


class Failure(msgspec.Struct, frozen=True):
    """A process that is beyond hope, and why, in words for everybody."""

    process: str
    role: str
    reason: str
    index: int = 0


FAILURES = msgspec.json.Decoder(tuple[Failure, ...])


class RestartStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what stands now."""

    deaths: int
    hopeless: int  # now
    waiting: int  # now: to be started


class Restarts:
    """Owner of the processes' failures. One launcher's; times are monotonic seconds. What one that was killed has left
    is of processes that are gone."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE
        self._room = reserved(self._file, FILE_BYTES)
        self._times: dict[tuple[Role, int], deque[float]] = {}
        self._waiting: dict[tuple[Role, int], float] = {}
        self._hopeless: dict[tuple[Role, int], Failure] = {}
        self._deaths = 0

    @property
    def next(self) -> float:
        """When somebody is due; infinity for nobody."""
        return min(self._waiting.values(), default=float("inf"))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def died(self, role: Role, index: int, ending: str, now: float) -> Failure | None:
        """Note a death. Something is returned for a process that has just turned out to be beyond hope."""
        key = role, index
        self._deaths += 1
        times = self._times.setdefault(key, deque(maxlen=LIMIT))
        times.append(now)
        recent = sum(now - time < WINDOW for time in times)
        if key in self._hopeless or recent >= LIMIT:
            self._waiting[key] = now + LONGEST
            if key in self._hopeless:
                return None
            reason = f"{role}-{index} failed {LIMIT} times within {WINDOW:.0f} seconds, the last time with {ending}"
            self._hopeless[key] = Failure(f"{role}-{index}", role.value, reason, index)
            self._tell()
            return self._hopeless[key]
        self._waiting[key] = now + DELAYS[min(recent, len(DELAYS)) - 1]
        return None

    def left(self, role: Role, index: int, now: float) -> None:
        """A process ended because another one did, which is no failure: it is needed again at once."""
        self._waiting[role, index] = now

    def due(self, now: float) -> list[tuple[Role, int]]:
        """Whom to start now."""
        found = [key for key, time in self._waiting.items() if time <= now]
        for key in found:
            del self._waiting[key]
        return found

    def recovered(self, role: Role, index: int) -> None:
        """The process is ready. Its failures still count: one that dies of what it does is ready every time."""
        if self._hopeless.pop((role, index), None) is not None:
            self._tell()

    def give_up(self, roles: Iterable[Role]) -> None:
        """Nobody of these roles is started again: the server ends."""
        gone = set(roles)
        self._waiting = {key: time for key, time in self._waiting.items() if key[0] not in gone}

    def close(self) -> None:
        self._file.unlink(missing_ok=True)
        self._room.close()

    def statistics(self) -> RestartStatistics:
        return RestartStatistics(self._deaths, len(self._hopeless), len(self._waiting))

    def _tell(self) -> None:
        """Overwrite the reserved bytes, locked so that nobody reads half of them. Of more processes than they hold the
        first are told of, which is enough to know that the server is not whole."""
        found = tuple(self._hopeless.values())
        data = msgspec.json.encode(found)
        while len(data) > FILE_BYTES:
            found = found[:-1]
            data = msgspec.json.encode(found)
        fcntl.flock(self._room, fcntl.LOCK_EX)
        os.pwrite(self._room.fileno(), data.ljust(FILE_BYTES), 0)
        fcntl.flock(self._room, fcntl.LOCK_UN)


def reserved(path: Path, size: int) -> FileIO:
    """A new file with so many blank bytes, which later writes overwrite without asking for space.

    Raises ConfigError where the directory has no room for it.
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


def failures(directory: Path) -> tuple[Failure, ...]:
    """The processes of this run directory's server that are beyond hope. Nobody is, where no launcher says so."""
    try:
        with (directory / FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return FAILURES.decode(file.read())
    except (OSError, msgspec.DecodeError):
        return ()
