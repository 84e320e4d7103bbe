"""Connections as they come in, no more than there are descriptors for.

While there is no room nobody is accepted: who comes waits in the listener's queue. A process that met the limit of open
files in the midst of its work would fail there, with every stream on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import ssl
from collections.abc import Callable

import msgspec

from penstock.services.http.listener import Socket
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

DESCRIPTORS = 1 << 16  # that are asked for
SPARE = 32  # descriptors for files that are opened and closed again, and for links that come back
SPARE_PER_LINK = 4
PAUSE = 0.1  # seconds before the next try where the process, or the machine, has no descriptor left
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Of one connection, already gone again: accept(2), "Error handling".
GONE = (
    errno.ECONNABORTED, errno.EPERM, errno.ENETDOWN, errno.EPROTO, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET,
    errno.EHOSTUNREACH, errno.EOPNOTSUPP, errno.ENETUNREACH,
)  # fmt: skip


class RoomStatistics(msgspec.Struct, frozen=True):
    """Open connections, those in their TLS handshake among them, and how many there may be; how often accepting has
    waited for one to close, and how often it failed for want of a descriptor."""

    open: int
    limit: int
    waits: int
    failures: int


class Room:
    """Counts the connections of one process. Whoever accepts and each connection tell it."""

    def __init__(self, limit: int = DESCRIPTORS) -> None:
        self.limit = limit
        self.failures = 0
        self._open = 0
        self._waits = 0
        self._free = asyncio.Event()

    def taken(self) -> None:
        self._open += 1

    def left(self) -> None:
        self._open -= 1
        self._free.set()

    async def wait(self) -> None:
        """Until one more connection has room."""
        if self._open >= self.limit:
            self._waits += 1
            if self._waits == 1:
                logs.warning(log, "connections_full", limit=self.limit, option="--max-connections")
        while self._open >= self.limit:
            self._free.clear()
            await self._free.wait()

    def statistics(self) -> RoomStatistics:
        return RoomStatistics(self._open, self.limit, self._waits, self.failures)


async def accept(
    listener: Socket,
    room: Room,
    make: Callable[[], asyncio.Protocol],
    encryption: ssl.SSLContext | None,
    handshake: float,
) -> None:
    """Accept connections until cancelled; each has the protocol that `make` gives, which tells `room` of its end.
    A TLS handshake may take `handshake` seconds. Raises OSError where the listener itself is broken."""
    loop = asyncio.get_running_loop()
    handshakes: set[asyncio.Task[None]] = set()
    while True:
        await room.wait()
        try:
            peer, _ = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno in GONE:
                continue
            if error.errno not in FULL:
                raise
            room.failures += 1
            if room.failures == 1:
                logs.warning(log, "no_descriptor", reason=error.strerror)
            await asyncio.sleep(PAUSE)
            continue
        room.taken()
        task = loop.create_task(serve(peer, room, make(), encryption, handshake))
        handshakes.add(task)
        task.add_done_callback(handshakes.discard)


async def serve(
    peer: Socket, room: Room, protocol: asyncio.Protocol, encryption: ssl.SSLContext | None, handshake: float
) -> None:
    """Hand an accepted connection to its protocol, behind a TLS handshake where there is one."""
    seconds = handshake if encryption is not None else None
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol, peer, ssl=encryption, ssl_handshake_timeout=seconds
        )
    except (OSError, ssl.SSLError) as error:  # the client's: nobody is there to be told
        logs.debug(log, "no_handshake", reason=str(error))
        peer.close()
        if not getattr(protocol, "transport", None):
            room.left()


def room_for(wanted: int, links: int) -> int:
    """Connections that a process may have with the descriptors that it has left; at most `wanted`, unless that is 0."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    room = max(1, most - len(os.listdir("/proc/self/fd")) - SPARE - SPARE_PER_LINK * links)
    if wanted > room:
        logs.warning(log, "fewer_connections", wanted=wanted, limit=room, open_files=most)
    return min(wanted or room, room)


def allow_descriptors() -> None:
    """As many open files as we can use and the system lets us have: a connection is one. Some refuse what they name."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
