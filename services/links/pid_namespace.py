"""Which processes can be seen from here: those whose pid means the same to us.

A pid is a name within one namespace of one running kernel. What another container or another host calls by that number
is somebody else here, whose end would say nothing.
"""

from __future__ import annotations

import os
import select
import zlib
from pathlib import Path

NAMESPACE = Path("/proc/self/ns/pid")
BOOT = Path("/proc/sys/kernel/random/boot_id")


def place() -> int:
    """A number for this kernel, since it was booted, and the namespace that this process's pid belongs to; 0 where that
    cannot be known. Sources: namespaces(7), random(4)."""
    try:
        return zlib.crc32(f"{BOOT.read_text().strip()} {os.readlink(NAMESPACE)}".encode())
    except OSError:
        return 0


def open_pidfd(pid: int, where: int) -> int | None:
    """A descriptor that turns readable when the process ends; None for one that says its place is elsewhere, and for
    one that has ended. The caller's to close."""
    if where != place():
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def ended(pidfd: int) -> bool:
    """Whether its process has. Not by select(2), which knows 1,024 descriptors: an api process has ten thousand."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
