"""The handshake of a link: the first message of each end, and why one end may refuse the other.

Each end also names the pid namespace of its pid. Only a peer in the same namespace can watch the process: the same
number in another container or on another host is another process.
"""

from __future__ import annotations

import os
import select
import zlib
from pathlib import Path
from typing import Any

import msgspec

from penstock.protocol.links import PROTOCOL_VERSION, Hello, LinkSpec, Role, Welcome

NAMESPACE = Path("/proc/self/ns/pid")
BOOT = Path("/proc/sys/kernel/random/boot_id")


def pid_namespace() -> int:
    """A number for the pid namespace of this process on this boot of this kernel; 0 if it cannot be known. Sources:
    namespaces(7), random(4)."""
    try:
        return zlib.crc32(f"{BOOT.read_text().strip()} {os.readlink(NAMESPACE)}".encode())
    except OSError:
        return 0


class Identity(msgspec.Struct, frozen=True):
    """A process's part of every handshake. `shared` is the hash of the options that both ends share."""

    role: Role
    index: int
    incarnation: int
    shared: int
    pid_namespace: int = msgspec.field(default_factory=pid_namespace)


def hello(me: Identity, epoch: int, session: int) -> Hello:
    """A connector's first message."""
    return Hello(config=me.shared, **common(me, epoch, session))


def welcome(me: Identity, answered: Hello, epoch: int, number: int) -> Welcome:
    """A binder's answer; `number` is the number of its session."""
    return Welcome(number=number, **common(me, epoch, answered.session))


def common(me: Identity, epoch: int, session: int) -> dict[str, Any]:
    """The fields of both."""
    return {
        "version": PROTOCOL_VERSION, "role": me.role, "index": me.index, "incarnation": me.incarnation,
        "pid": os.getpid(), "epoch": epoch, "session": session, "pid_namespace": me.pid_namespace,
    }  # fmt: skip


def refusal(spec: LinkSpec, me: Identity, hello: Hello) -> str:
    """Why this hello is refused, with the side to fix; empty if it is accepted."""
    who = f"{hello.role}-{hello.index} (pid {hello.pid})"
    if hello.role != spec.connector:
        return f"{who} connected to the link {spec.name!r}, which is for role {spec.connector.value!r}"
    if hello.version != PROTOCOL_VERSION:
        return (
            f"{who} speaks protocol version {hello.version}, {me.role.value}-{me.index} speaks {PROTOCOL_VERSION}; "
            "start both from the same release"
        )
    if hello.config != me.shared:
        return (
            f"{who} was started with other model options than {me.role.value}-{me.index}; give both the same "
            "(compare `penstock config` on each side)"
        )
    return ""


def open_pidfd(pid: int, namespace: int) -> int | None:
    """A descriptor that is readable once the process has ended; the caller closes it. None for a process of another pid
    namespace, and for one that has ended already."""
    if namespace != pid_namespace():
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def ended(pidfd: int) -> bool:
    """Whether the process has ended. select(2) would fail beyond 1,024 descriptors; an api process has ten thousand."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
