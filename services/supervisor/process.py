"""The common setup of every process: its log, its signals, its end with the launcher, its exit codes, the phases of its
start, its background tasks.

When the launcher dies, however it dies, the kernel kills its children, and an api process sees it through a pidfd. A
process under systemd or supervisord has no launcher.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from penstock.protocol.config import RunConfig
from penstock.protocol.links import Role
from penstock.services.supervisor import logs, run_directory
from penstock.services.supervisor.run_directory import PARENT as PARENT
from penstock.services.supervisor.sd_notify import progress

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # prctl(2)
IMPORTS = "importing"  # the first phase of a start, from the creation of the process


class ExitCode(enum.IntEnum):
    """How a process ended. 2 to 5 are for the operator to fix: a restart does not help."""

    ORDERLY = 0
    FAILED = 1
    CONFIG = 2
    MODEL = 3
    ADDRESS = 4  # the port is taken or cannot be bound
    LINK = 5  # a peer refused the handshake
    DEVICE = 6  # the accelerator reported an error that stays until the process ends
    HUNG = 7  # a step took too long
    GROUP = 8  # another executor of its group has ended; not a failure of this one


class Stop:
    """SIGTERM and SIGINT as a descriptor to poll and a count to read. Owned by the main thread.

    With `once`, a second signal has its default action: it ends the process at once, whatever the loop does.
    """

    def __init__(self, *, once: bool = True, numbers: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self.count = 0
        self._once = once
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._arrived) for number in numbers}

    @property
    def asked(self) -> bool:
        return self.count > 0

    def fileno(self) -> int:
        """Readable from a signal until `drain`."""
        return self._reader

    def drain(self) -> None:
        """Discard the bytes that signals wrote; every signal that Python handles writes one."""
        try:
            while os.read(self._reader, 512):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        signal.set_wakeup_fd(-1)
        for number, action in self._before.items():
            signal.signal(number, action)
        os.close(self._reader)
        os.close(self._writer)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1
        if self._once:
            for ours in self._before:
                signal.signal(ours, signal.SIG_DFL)


def name_of(role: Role, index: int, model: str = "") -> str:
    """The name of a process in logs and messages; `model` is the one that it is for, of several."""
    return f"{model}/{role}-{index}" if model else f"{role}-{index}"


def enter(role: Role, index: int, options: RunConfig) -> None:
    """Called first by the process of a role."""
    logs.setup(name_of(role, index, options.for_model), options.log_level, options.log_format)
    if role is not Role.API:  # which ends in order, and removes the run directory
        follow_parent()
    if options.run_dir:
        count_start(starts_file(Path(options.run_dir), role, index))


def leave(role: Role, index: int, options: RunConfig) -> None:
    """Called last by the process of a role that ends in order."""
    starts_file(Path(options.run_dir), role, index).unlink(missing_ok=True)


def follow_parent(environ: Mapping[str, str] = os.environ) -> None:
    """Have the kernel kill this process when the launcher ends; exits if it has ended already.

    No milder signal would do. A launcher with several threads that is killed may send it twice, and the first time it
    still counts as the parent. Does nothing without a launcher. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if PARENT not in environ:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logs.warning(log, "no_parent_death_signal", errno=ctypes.get_errno())
    if orphaned(environ):
        raise SystemExit(ExitCode.FAILED)


def parent(environ: Mapping[str, str] = os.environ) -> int | None:
    """A descriptor that is readable once the launcher, or the program that started an engine, has ended; None without
    a parent. Unlike the kernel's signal, it does not depend on the thread that started this process.

    Exits if the parent has ended already. Source: pidfd_open(2).
    """
    if PARENT not in environ:
        return None
    try:
        found = os.pidfd_open(int(environ[PARENT]))
    except ProcessLookupError:
        raise SystemExit(ExitCode.FAILED) from None
    if orphaned(environ):
        os.close(found)
        raise SystemExit(ExitCode.FAILED)
    return found


def orphaned(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process had a launcher that has ended."""
    return PARENT in environ and str(os.getppid()) != environ[PARENT]


def starts_file(run_dir: Path, role: str, index: int) -> Path:
    """The file that counts a process's starts since it last ended in order, under any supervisor. Only the running
    process writes it."""
    return run_dir / f"{role}-{index}.starts"


def count_start(file: Path) -> None:
    try:
        run_directory.replace_file(file, str(starts(file) + 1).encode())
    except OSError as error:  # a full directory costs a metric, not the process
        logs.warning(log, "start_not_counted", file=str(file), reason=error.strerror)


def starts(file: Path) -> int:
    """The count in a starts file; 0 without one."""
    try:
        return int(file.read_bytes())
    except (OSError, ValueError):
        return 0


def age() -> float:
    """Seconds since this process was created, the start of its interpreter included. Source: proc(5), starttime."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class StartupPhase(msgspec.Struct, frozen=True):
    """One phase of a start, which ends where the next one begins."""

    name: str
    began: float  # monotonic seconds


class StartupPhases:
    """The phases of this process's start so far."""

    def __init__(self, began: float | None = None) -> None:
        """`began`: monotonic seconds; None: when the process was created."""
        self.all = [StartupPhase(IMPORTS, time.monotonic() - age() if began is None else began)]

    def begin(self, name: str) -> None:
        """A phase that may take long; it is reported to the supervisor."""
        progress(name)
        self.note(name)

    def note(self, name: str) -> None:
        """A phase that is not reported."""
        self.all.append(StartupPhase(name, time.monotonic()))

    def durations(self, now: float) -> str:
        """How long each phase took, the last one until `now`, as text for the log."""
        ends = [*(phase.began for phase in self.all[1:]), now]
        return ", ".join(f"{phase.name} {end - phase.began:.2f} s" for phase, end in zip(self.all, ends, strict=True))


def background_task(work: Coroutine[None, None, None], failed: Callable[[Exception], None]) -> asyncio.Task[None]:
    """Start `work` as a task, which the caller cancels. `failed` gets the error that ends it, if any: without its
    background tasks a process only looks alive."""
    import asyncio  # the command line imports this module and needs no event loop

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            failed(error)

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    return task
