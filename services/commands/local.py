"""Processes of Penstock servers that this machine knows of, and which of them are one server's.

A server's processes share a run directory, so whoever knows one of them knows the others: also those that load, or
hang, and tell nothing of themselves. A pid alone is a name that containers and hosts each give to processes of their
own; role, number and the time of its start go with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.protocol.links import Role
from penstock.services.supervisor import run_directory

PROC = Path("/proc")
APART = 60.0  # seconds by which two accounts of one start may differ: clocks are set now and then
ENTRIES = ("penstock", "penstock/__main__.py")  # ends of the path that a process was started by
ROLES = frozenset(role.value for role in Role)


class Local(msgspec.Struct, frozen=True):
    """One process of a role, as /proc has it."""

    role: str
    index: str
    pid: int
    resident_bytes: int
    began: float  # unix seconds
    run_dir: str  # empty where it cannot be known: its environment is another user's


class Known(msgspec.Struct, frozen=True):
    """A process as its server tells of it."""

    role: str
    index: str
    pid: int
    began: float  # unix seconds


def companions(found: Iterable[Local], known: Iterable[Known]) -> tuple[Local, ...]:
    """Processes with the run directory of one that is known: those of the same server, the known ones among them."""
    found = tuple(found)
    by_name = {(one.role, one.index, one.pid): one.began for one in known}
    homes = {
        one.run_dir
        for one in found
        if one.run_dir and abs(by_name.get((one.role, one.index, one.pid), -APART) - one.began) < APART
    }
    return tuple(one for one in found if one.run_dir in homes)


def local_processes(proc: Path = PROC) -> tuple[Local, ...]:
    """All that may be seen, in order of role, index and pid."""
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
            continue  # it has ended meanwhile
        began = now - up + ticks / os.sysconf("SC_CLK_TCK")
        index, memory = value_of("--index", arguments) or "0", pages * os.sysconf("SC_PAGE_SIZE")
        found.append(Local(role, index, int(path.name), memory, began, run_dir_of(path, arguments)))
    return tuple(sorted(found, key=lambda one: (one.role, one.index, one.pid)))


def run_dir_of(path: Path, arguments: list[str]) -> str:
    """The run directory of the process at `path`: its option, or the one that systemd made for it."""
    if given := value_of("--run-dir", arguments):
        return given
    try:
        environ = (path / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    own = dict(pair.split("=", 1) for pair in environ if "=" in pair)
    return own.get(run_directory.SYSTEMD, "").split(":")[0]


def value_of(flag: str, arguments: list[str]) -> str:
    """What stands behind a flag on a command line, with a space or a `=` between."""
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else "".join(arguments[place + 1 : place + 2])
    return ""


def role_of(arguments: list[str]) -> str:
    """The role that a command line starts, or nothing."""
    for place, word in enumerate(arguments[:-1]):
        if any(f"/{word}".endswith(f"/{entry}") for entry in ENTRIES):
            return arguments[place + 1] if arguments[place + 1] in ROLES else ""
    return ""
