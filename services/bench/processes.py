"""What the processes of a server cost, by role. Source: proc(5)."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from penstock.protocol.links import Role

ROLES = frozenset(role.value.encode() for role in Role)


def cpu_seconds(launcher: int) -> dict[str, float]:
    """CPU seconds by role of the processes that a launcher started, and its own. Source: proc(5), utime and stime."""
    found: defaultdict[str, float] = defaultdict(float)
    tick = os.sysconf("SC_CLK_TCK")
    for pid in (launcher, *children(launcher)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        role = next((word.decode() for word in words if word in ROLES), "launcher")
        found[role] += (int(fields[11]) + int(fields[12])) / tick
    return dict(found)


def children(pid: int) -> list[int]:
    """Processes that a process started and that run."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
