"""Penstock's processes on this machine, as /proc has them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from penstock.protocol.links import Role
from penstock.services.supervisor import run_directory

PROC = Path("/proc")
APART = 60.0  # seconds by which two records of one start may differ, because clocks are adjusted
ENTRIES = ("penstock", "penstock/__main__.py")  # last parts of the path of a process's program
ROLES = frozenset(role.value for role in Role)


class Local(msgspec.Struct, frozen=True):
    """A process as /proc has it."""

    role: str  # with several models behind the name of its one
    index: str
    pid: int
    resident_bytes: int
    began: float  # unix seconds
    run_dir: str  # empty if unknown: its environment may be another user's


def companions(found: Iterable[Local], reported: Mapping[tuple[str, str, int], float]) -> tuple[Local, ...]:
    """The processes that share a run directory with a reported one, which includes the reported ones. `reported` has
    start times by role, index and pid."""
    found = tuple(found)
    run_dirs = {
        one.run_dir
        for one in found
        if one.run_dir and abs(reported.get((one.role, one.index, one.pid), -APART) - one.began) < APART
    }
    return tuple(one for one in found if one.run_dir in run_dirs)


def local_processes(proc: Path = PROC) -> tuple[Local, ...]:
    """Penstock's processes on this machine, in order of role, index and pid."""
    found = []
    now, up = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    for path in proc.glob("[0-9]*"):
        try:
            arguments = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            role = role_of(arguments)
            if not role:
                continue
            pages = int((path / "statm").read_text().split()[1])
            ticks = int((path / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        except (OSError, IndexError, ValueError):
            continue  # it has just ended
        began = now - up + ticks / os.sysconf("SC_CLK_TCK")
        if model := value_of("--for-model", arguments):
            role = f"{model}/{role}"
        index, memory = value_of("--index", arguments) or "0", pages * os.sysconf("SC_PAGE_SIZE")
        found.append(Local(role, index, int(path.name), memory, began, run_dir_of(path, arguments)))
    return tuple(sorted(found, key=lambda one: (one.role, one.index, one.pid)))


def run_dir_of(path: Path, arguments: list[str]) -> str:
    """The run directory of the process at `path`: its option, or the one made by systemd."""
    if given := value_of("--run-dir", arguments):
        return given
    try:
        environ = (path / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    own = dict(pair.split("=", 1) for pair in environ if "=" in pair)
    return own.get(run_directory.SYSTEMD, "").split(":")[0]


def value_of(flag: str, arguments: list[str]) -> str:
    """The value of a flag on a command line, after a space or a `=`."""
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else "".join(arguments[place + 1 : place + 2])
    return ""


def role_of(arguments: list[str]) -> str:
    """The role that a command line starts; empty for other programs."""
    for place, word in enumerate(arguments[:-1]):
        if any(f"/{word}".endswith(f"/{entry}") for entry in ENTRIES):
            return arguments[place + 1] if arguments[place + 1] in ROLES else ""
    return ""
