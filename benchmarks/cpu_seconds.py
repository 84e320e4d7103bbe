"""CPU seconds of a server's processes, by role."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from penstock.protocol.links import Role

ROLES = frozenset(role.value.encode() for role in Role)


def engine_seconds() -> dict[str, float]:
    """CPU seconds so far of the engine that this program started."""
    found: Counter[str] = Counter()
    for launcher in children(os.getpid()):
        found.update(cpu_seconds(launcher))
    return dict(found)


def cpu_seconds(launcher: int) -> dict[str, float]:
    """CPU seconds by role of a launcher and the processes that it started. Source: proc(5), utime and stime."""
    found: dict[str, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for pid in (launcher, *children(launcher)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        role = next((word.decode() for word in words if word in ROLES), "launcher")
        found[role] = found.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return found


def children(pid: int) -> list[int]:
    """The running processes that a process started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
