"""How the executors of a group notice that one of them has ended.

The kernel closes a connection as soon as the process at its end is gone, whether that process's threads run, hang, or
wait for a device. The end of one member is the end of the generation for all, and so is its sleep: it says so first,
for the scheduler may have been killed before it told the others.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from contextlib import suppress
from threading import Event
from typing import NoReturn

from penstock.services.supervisor import logs
from penstock.services.supervisor.process import ExitCode, Stop

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between looks at whether there is anything left to watch
GRACE_SECONDS = 0.2  # after another member's end, in which this process may turn out to end, too
DRAIN_SECONDS = 3.0  # the same where this process was told to end: what it still has to do may need the others
SLEEP, DISCARD = b"s", b"d"  # all that members ever say; the second: and keep no weights
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))  # a lost host shows in 11 s


class PeerLiveness:
    """A member's connections: those of the first member to all others, that of any other to the first."""

    def __init__(self, links: list[socket.socket]) -> None:
        self._links = links
        self.asleep = False  # another member sleeps, or is about to; so does this one then
        self.discards = False  # and it keeps no weights

    @property
    def address(self) -> str:
        """The address of this host by which the other members reach it."""
        return str(self._links[0].getsockname()[0])

    def broken(self, seconds: float) -> bool:
        """Whether another member has ended or sleeps, or does so within this time."""
        return bool(select.select(self._links, [], [], seconds)[0])

    def watch(self, stop: Stop, done: Event) -> None:
        """For a thread of its own: end this process when another member ends. A process that was told to end gets the
        time to do so, unless it waits for the others."""
        while not done.is_set():
            if self.broken(POLL_SECONDS):
                if self._hears_sleep():
                    self.asleep = True
                    return
                if not done.wait(DRAIN_SECONDS if stop.asked else GRACE_SECONDS):
                    leave(ExitCode.ORDERLY if stop.asked else ExitCode.GROUP)
                return

    def say_sleep(self, *, discard: bool) -> None:
        """Tell the other members that this one's end is none."""
        for link in self._links:
            with suppress(OSError):  # it has ended, or sleeps
                link.send(DISCARD if discard else SLEEP, socket.MSG_NOSIGNAL)

    def _hears_sleep(self) -> bool:
        """Whether each of those that can be read has said so before its end."""
        with suppress(OSError):
            said = [link.recv(1) for link in select.select(self._links, [], [], 0.0)[0]]
            self.discards = self.discards or DISCARD in said
            return all(word in (SLEEP, DISCARD) for word in said)
        return False

    def close(self) -> None:
        for link in self._links:
            link.close()


def leave(code: ExitCode = ExitCode.GROUP, reason: str = "another executor of the group has ended") -> NoReturn:
    """End this process, whatever its threads do: the next generation of its group needs a new one."""
    logs.warning(log, "group_broken", reason=reason)
    logging.shutdown()
    os._exit(code)


def keep_alive(link: socket.socket) -> None:
    """Have the kernel find out when the host at the other end is gone."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)
