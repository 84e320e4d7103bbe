"""What every process sets up before its own work: its log, its tie to the launcher, its signals.

A process that the launcher started follows it: when the launcher dies, however it dies, the kernel signals the child.
Processes under systemd or supervisord have no launcher and no such tie.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from penstock.protocol.config import RunConfig
from penstock.protocol.links import Role
from penstock.services.supervisor import logs, run_directory
from penstock.services.supervisor.run_directory import PARENT as PARENT

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # prctl(2)

# An api process ends in order and removes the run directory; the others hold nothing that outlives them, and a hung
# one must not keep a GPU.
DEATH_SIGNAL: Mapping[Role, signal.Signals] = {
    Role.API: signal.SIGTERM,
    Role.TOKENIZER: signal.SIGKILL,
    Role.SCHEDULER: signal.SIGKILL,
    Role.EXECUTOR: signal.SIGKILL,
}


class ExitCode(enum.IntEnum):
    """What a process's exit tells its supervisor. 2 to 5 are the operator's to fix: starting again does not help."""

    ORDERLY = 0
    FAILED = 1
    CONFIG = 2
    MODEL = 3
    ADDRESS = 4  # the port is taken or cannot be bound
    LINK = 5  # a peer refused the handshake
    DEVICE = 6  # the accelerator reported an error that stays until the process ends
    HUNG = 7  # a step did not end in its time
    GROUP = 8  # another executor of its group has ended; that is no failure of this one


class Stop:
    """SIGTERM and SIGINT as a descriptor that a loop polls and a count that it reads. Owned by the main thread.

    With `once` a second signal has its default action: it ends the process at once, whatever the loop does.
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
        """Readable from a signal on until `drain`."""
        return self._reader

    def drain(self) -> None:
        """Take the bytes that signals left, of every signal that Python handles."""
        try:
            while os.read(self._reader, 512):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Back to what the signals did before."""
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


def enter(role: Role, index: int, options: RunConfig) -> None:
    """The first thing a role's process does."""
    logs.setup(f"{role}-{index}", options.log_level, options.log_format)
    follow_parent(DEATH_SIGNAL[role])
    if options.run_dir:
        os.environ[run_directory.SHARED] = options.run_dir
        count_start(starts_file(Path(options.run_dir), role, index))


def leave(role: Role, index: int, options: RunConfig) -> None:
    """The last thing a role's process does that was told to end."""
    starts_file(Path(options.run_dir), role, index).unlink(missing_ok=True)


def follow_parent(number: int, environ: Mapping[str, str] = os.environ) -> None:
    """Have the kernel send signal `number` when the launcher ends; ends here when it has ended already.

    Does nothing without a launcher. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if PARENT not in environ:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        logs.warning(log, "no_parent_death_signal", errno=ctypes.get_errno())
    if orphaned(environ):
        raise SystemExit(ExitCode.FAILED)


def parent(environ: Mapping[str, str] = os.environ) -> int | None:
    """A descriptor that turns readable when the launcher, or the program that started an engine, ends; None without.

    Unlike the kernel's signal it does not depend on the thread that started this process. Ends here when the parent
    has ended already. Source: pidfd_open(2).
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
    """Whether this process had a launcher that is gone."""
    return PARENT in environ and str(os.getppid()) != environ[PARENT]


def starts_file(run_dir: Path, role: str, index: int) -> Path:
    """Where it stands how often a process was started since it last ended in order, whoever starts it. One life at a
    time writes."""
    return run_dir / f"{role}-{index}.starts"


def count_start(file: Path) -> None:
    """One start more."""
    fresh = file.with_suffix(".starts.new")
    try:
        fresh.write_bytes(str(starts(file) + 1).encode())
        fresh.replace(file)
    except OSError as error:  # a full directory costs a metric, not the process
        logs.warning(log, "start_not_counted", file=str(file), reason=error.strerror)


def starts(file: Path) -> int:
    """How often it was started; 0 where nobody counted."""
    try:
        return int(file.read_bytes())
    except (OSError, ValueError):
        return 0


def age() -> float:
    """Seconds since this process was started, its interpreter's own start included. Source: proc(5), starttime."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
