"""How the executors of a group find one another, and hear of one another's ends.

The first member listens, the others come to it; when all have come their group begins its life, and nobody can join any
more. So a member that was started again waits for the next life, and never meets members of an older one. The
connections stay open and silent: they are the bond. Whatever ends a process closes its end, at once and by the kernel,
whether its threads turn, hang, or wait for a device; and one member's end is the end of the life of all.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec

from protocol.config import Config
from protocol.errors import ConfigError, LinkError
from protocol.groups import Place, group_size
from protocol.links import shared_hash
from services import journal
from services.notify import progress
from services.process import ExitCode, Stop

log = logging.getLogger(__name__)

RETRY = 0.1  # seconds between tries to reach the first member
HELLO_SECONDS = 2.0  # that one who has connected may take to say who it is
LONGEST_START = 4096  # bytes
HELLO = struct.Struct("<II")  # member's number, hash of the options that all share
FAREWELL_SECONDS = 0.2  # after another's end, in which we may turn out to end, too
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))  # a host's end in 11 s


class Life(msgspec.Struct, frozen=True):
    """What the first member tells the others when all have come."""

    name: str  # of this life of the group
    port: int = 0  # of torch's store at the rendezvous's host; 0: it is a file


class Bond:
    """A member's connections: the first one's to each other, any other's to the first."""

    def __init__(self, links: list[socket.socket]) -> None:
        self._links = links

    def broken(self, seconds: float) -> bool:
        """Whether another member has ended, or does within this time. Nobody says anything, so reading means an end."""
        return bool(select.select(self._links, [], [], seconds)[0])

    def watch(self, stop: Stop, done: Event) -> None:
        """For a thread of its own: end this process when another member ends, unless it is told to end itself."""
        while not done.is_set():
            if self.broken(RETRY):
                if not done.wait(FAREWELL_SECONDS) and not stop.asked:
                    leave()
                return

    def close(self) -> None:
        for link in self._links:
            link.close()


def leave() -> NoReturn:
    """End this process, whatever its threads do: the life of its group is over, and the next one needs it anew."""
    journal.warning(log, "group_broken", reason="another executor of the group has ended")
    logging.shutdown()
    os._exit(ExitCode.GROUP)


class Rendezvous:
    """One member's part in the beginning of a life. `where` is a socket file, or tcp://host:port for several hosts."""

    def __init__(self, where: str, member: int, size: int, shared: int) -> None:
        self._where = where
        self._member = member
        self._size = size
        self._shared = shared

    def meet(self, stop: Stop) -> tuple[Life, Bond] | None:
        """Wait until all members have come; None: we were told to end.

        Raises LinkError when this member was started with other options, ConfigError where nobody can listen.
        """
        return self._gather(stop) if self._member == 0 else self._join(stop)

    def _gather(self, stop: Stop) -> tuple[Life, Bond] | None:
        listener = self._listen()
        links: dict[int, socket.socket] = {}
        try:
            while len(links) < self._size - 1:
                readable = select.select([listener, *links.values()], [], [], RETRY)[0]
                if stop.asked:
                    Bond(list(links.values())).close()
                    return None
                for number, link in tuple(links.items()):
                    if link in readable:  # it has ended before the life began; its successor will come
                        links.pop(number).close()
                if listener in readable:
                    self._admit(listener.accept()[0], links)
            life = Life(secrets.token_hex(8), 0 if is_file(self._where) else free_port(listener))
            for link in links.values():
                with suppress(OSError):  # it has ended at this very moment, as the bond will say
                    link.sendall(msgspec.json.encode(life) + b"\n")
        finally:
            listener.close()
            if is_file(self._where):
                Path(self._where).unlink(missing_ok=True)
        return life, Bond(list(links.values()))

    def _admit(self, link: socket.socket, links: dict[int, socket.socket]) -> None:
        """Take one who has connected, if it is a member that has not come yet."""
        link.settimeout(HELLO_SECONDS)
        try:
            number, shared = HELLO.unpack(received(link, HELLO.size))
        except (OSError, struct.error):
            link.close()
            return
        if shared != self._shared:
            journal.error(log, "refused", member=number, reason="it was started with other model options")
            link.sendall(b"\n")
        if shared != self._shared or number in links or not 0 < number < self._size:
            link.close()
            return
        keep_alive(link)
        link.settimeout(None)
        links[number] = link
        progress(f"waiting for {self._size - 1 - len(links)} more executors of the group")

    def _listen(self) -> socket.socket:
        """Raises ConfigError where nobody can."""
        try:
            if not is_file(self._where):
                host, port = host_and_port(self._where)
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, port), family=family, backlog=self._size)
            Path(self._where).unlink(missing_ok=True)
            with ExitStack() as failing:
                listener = failing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(self._where)
                listener.listen(self._size)
                failing.pop_all()
                return listener
        except OSError as error:
            raise ConfigError("--rendezvous", self._where, f"it cannot be listened at: {error.strerror}") from error

    def _join(self, stop: Stop) -> tuple[Life, Bond] | None:
        progress("waiting for the first executor of the group")
        while not stop.asked:
            link = self._connect()
            if link is not None:
                try:
                    said = self._introduce(link, stop)
                except OSError:
                    said = b""
                if said == b"\n":
                    link.close()
                    raise LinkError(
                        f"executor {self._member} was started with other model options than the first of its group; "
                        "give both the same (compare `penstock config` on each side)"
                    )
                if said:
                    return msgspec.json.decode(said, type=Life), Bond([link])
                link.close()
            select.select([stop.fileno()], [], [], RETRY)
        return None

    def _connect(self) -> socket.socket | None:
        """To the first member, if it listens."""
        if not is_file(self._where):
            try:
                return socket.create_connection(host_and_port(self._where), HELLO_SECONDS)
            except OSError:
                return None
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(self._where)
        except OSError:
            link.close()
            return None
        return link

    def _introduce(self, link: socket.socket, stop: Stop) -> bytes:
        """Say who we are and wait for the beginning: its line, or nothing if the first member has ended meanwhile."""
        keep_alive(link)
        link.settimeout(None)
        link.sendall(HELLO.pack(self._member, self._shared))
        line = b""
        while not line.endswith(b"\n") and len(line) < LONGEST_START and not stop.asked:
            if not select.select([link], [], [], RETRY)[0]:
                continue
            more = link.recv(1)
            if not more:
                return b""
            line += more
        return line


def rendezvous(config: Config, place: Place) -> Rendezvous:
    """Of the executor at a place, in its replica's group. Of a given address replica r has the r-th port."""
    model = config.model
    where = config.executor.rendezvous
    if where:
        host, _, port = where.rpartition(":")
        where = f"{host}:{int(port) + place.replica}"
    else:
        where = str(Path(config.run.run_dir) / f"group-{place.replica}.sock")
    member = place.stage * model.tensor_parallel_size + place.rank
    return Rendezvous(where, member, group_size(model), shared_hash(model))


def is_file(where: str) -> bool:
    return not where.startswith("tcp://")


def host_and_port(where: str) -> tuple[str, int]:
    found = urlsplit(where)
    assert found.hostname is not None, "the options were checked"
    assert found.port is not None
    return found.hostname, found.port


def free_port(listener: socket.socket) -> int:
    """One that nobody listens at now, at the address of this listener."""
    with socket.create_server((listener.getsockname()[0], 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def received(link: socket.socket, count: int) -> bytes:
    """As many bytes, or fewer from one who has ended."""
    found = b""
    while len(found) < count and (more := link.recv(count - len(found))):
        found += more
    return found


def keep_alive(link: socket.socket) -> None:
    """Have the kernel find out when the other's host is gone; on one machine it knows."""
    if link.family == socket.AF_UNIX:
        return
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)
