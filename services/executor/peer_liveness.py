"""How the executors of a group hear of one another's ends.

Whatever ends a process closes its end of a connection, at once and by the kernel, whether its threads turn, hang, or
wait for a device; and one member's end is the end of the life of all.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from threading import Event
from typing import NoReturn

from penstock.services.supervisor import logs
from penstock.services.supervisor.process import ExitCode, Stop

log = logging.getLogger(__name__)

LOOK = 0.1  # seconds between looks at whether there is anything left to watch
FAREWELL_SECONDS = 0.2  # after another's end, in which we may turn out to end, too
LAST_SECONDS = 3.0  # the same where we have been told to end, and what is left to do may need the others
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))  # a host's end in 11 s


class PeerLiveness:
    """A member's connections: the first one's to each other, any other's to the first."""

    def __init__(self, links: list[socket.socket]) -> None:
        self._links = links

    @property
    def address(self) -> str:
        """Of this host, as the others of the group reach it; empty where all are on one."""
        link = next(iter(self._links), None)
        return "" if link is None or link.family == socket.AF_UNIX else str(link.getsockname()[0])

    def broken(self, seconds: float) -> bool:
        """Whether another member has ended, or does within this time. Nobody says anything, so reading means an end."""
        return bool(select.select(self._links, [], [], seconds)[0])

    def watch(self, stop: Stop, done: Event) -> None:
        """For a thread of its own: end this process when another member ends. One that is told to end itself gets the
        time to do so, unless it waits for the others."""
        while not done.is_set():
            if self.broken(LOOK):
                if not done.wait(LAST_SECONDS if stop.asked else FAREWELL_SECONDS):
                    leave(ExitCode.ORDERLY if stop.asked else ExitCode.GROUP)
                return

    def close(self) -> None:
        for link in self._links:
            link.close()


def leave(code: ExitCode = ExitCode.GROUP, reason: str = "another executor of the group has ended") -> NoReturn:
    """End this process, whatever its threads do: the life of its group is over, and the next one needs it anew."""
    logs.warning(log, "group_broken", reason=reason)
    logging.shutdown()
    os._exit(code)


def keep_alive(link: socket.socket) -> None:
    """Have the kernel find out when the other's host is gone; on one machine it knows."""
    if link.family == socket.AF_UNIX:
        return
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)
