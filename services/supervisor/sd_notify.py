"""Readiness and status, told by a process to whoever started it: the sd_notify protocol over a unix datagram socket.

Under systemd the other end is systemd; under `penstock serve` it is the launcher with a `NoticeSocket` of its own.
Source: sd_notify(3).
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

VARIABLE = "NOTIFY_SOCKET"
MAX_NOTICE = 16 << 10  # bytes of one datagram
STAGE_SECONDS = 1800.0  # that one stage of a start may take
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def notify(
    *lines: str, environ: Mapping[str, str] = os.environ, given: socket.socket | None = None
) -> bool:
    """Send `NAME=value` lines as one datagram to $NOTIFY_SOCKET; False when there is none or nobody listens.

    Newlines within a line become spaces, because a newline ends a field. Never raises and never blocks: a process runs
    on when its supervisor is gone, or when it has no descriptor left. One that must be heard even then has its socket
    from the beginning: `given`.
    """
    path = environ.get(VARIABLE, "")
    if not path:
        return False
    target = "\0" + path[1:] if path.startswith("@") else path
    payload = "\n".join(line.replace("\n", " ") for line in lines).encode()[:MAX_NOTICE]
    try:
        if given is not None:
            given.sendto(payload, target)
            return True
        with speaker() as sender:
            sender.sendto(payload, target)
    except OSError:
        return False
    return True


def speaker() -> socket.socket:
    """A socket to send notices through."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)


def progress(text: str) -> None:
    """Tell of a stage of the start, which may take as long as weights or compilers need: the supervisor waits on."""
    notify(f"STATUS={text}", f"EXTEND_TIMEOUT_USEC={int(STAGE_SECONDS * 1e6)}")


class Notice(msgspec.Struct, frozen=True):
    """One datagram: who sent it, as the kernel says, and its fields."""

    pid: int
    fields: dict[str, str]
    received: float  # monotonic seconds

    @property
    def ready(self) -> bool:
        return self.fields.get("READY") == "1"

    @property
    def status(self) -> str:
        return self.fields.get("STATUS", "")


class NoticeSocket:
    """The listening end. The kernel attaches the sender's credentials, so a child cannot speak for another.

    A file that stands at `path` is replaced: whoever listened there was killed, as the directory's lock says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[Notice]:
        """Every datagram that has arrived; never blocks. Descriptors sent along are closed unseen."""
        notices: list[Notice] = []
        space = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(64)
        while True:
            try:
                payload, ancillary, flags, _ = self._socket.recvmsg(MAX_NOTICE, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return notices
            pid = 0
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid, _, _ = CREDENTIALS.unpack(data[: CREDENTIALS.size])
                elif level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    close_all(data)
            if pid and not flags & socket.MSG_TRUNC:
                notices.append(Notice(pid, parse(payload), time.monotonic()))

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def parse(payload: bytes) -> dict[str, str]:
    """The fields of one datagram; lines without '=' are left out, the last of equal names holds."""
    fields = {}
    for line in payload.decode(errors="replace").split("\n"):
        name, equals, value = line.partition("=")
        if equals and name:
            fields[name] = value
    return fields


def close_all(data: bytes) -> None:
    descriptors = array.array("i")
    descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    for descriptor in descriptors:
        os.close(descriptor)
