"""CPU seconds and memory of a server's processes, by role."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
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
    tick = os.sysconf("SC_CLK_TCK")
    return by_role(launcher, "stat", lambda text: sum(map(int, text.rpartition(")")[2].split()[11:13])) / tick)


def memory(launcher: int) -> dict[str, float]:
    """Bytes by role that are in memory, shared ones in each. Source: proc(5), statm."""
    return by_role(launcher, "statm", lambda text: float(text.split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def by_role(launcher: int, file: str, number: Callable[[str], float]) -> dict[str, float]:
    """The sum over a launcher and the processes that it started of what a file of /proc says, by role."""
    found: dict[str, float] = {}
    for pid in (launcher, *children(launcher)):
        try:
            said = number(Path(f"/proc/{pid}/{file}").read_text(errors="replace"))
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        role = next((word.decode() for word in words if word in ROLES), "launcher")
        found[role] = found.get(role, 0.0) + said
    return found


def children(pid: int) -> list[int]:
    """The running processes that a process started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
