"""What tests of links between hosts share: ports with keys on loopback, each with a context of its own as each process
has, and a proxy between them that breaks connections."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from penstock.protocol.config import LinksConfig
from penstock.protocol.errors import AddressError
from penstock.protocol.links import LinkSpec, Role
from penstock.services.links import tcp
from penstock.services.links.curve import LinkKeys, new_keys
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Arrival, Joined, Left, Link
from penstock.services.links.tcp import Network

LIMIT = 60.0  # seconds that anything may take on a busy machine
BACKLOG = 128
PORTS = 12_000  # that somebody may listen at for good are below
WORKERS = 16
CHUNK = 1 << 16


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is given up because a machine is busy, unless a test is about that."""
    for name, value in (("HANDSHAKE_MS", 60_000), ("SILENCE_MS", 60_000), ("ATTEMPT", LIMIT)):
        monkeypatch.setattr(tcp, name, value)


class Ends:
    """Ports of one test and their contexts, on a clock that is the machine's own."""

    def __init__(self, keys: LinkKeys | None = None) -> None:
        self.keys = new_keys() if keys is None else keys
        self.ports: list[Link] = []
        self._contexts: list[zmq.Context[zmq.Socket[bytes]]] = []
        self._kept: dict[Link, list[Arrival]] = {}

    def bind(self, link: LinkSpec, incarnation: int = 1, host: str = "127.0.0.1", port: int = 0) -> tuple[Link, int]:
        """A binder and its port, which is a free one unless it is given."""
        while True:
            where = port or free_port(host)
            try:
                made = self._made(link, link.binder, f"tcp://{host}:{where}", 0, incarnation, self.keys)
            except AddressError:
                if port:
                    raise
                continue
            return made, where

    def connect(
        self, link: LinkSpec, port: int, index: int = 0, incarnation: int = 1, keys: LinkKeys | None = None,
        host: str = "127.0.0.1",
    ) -> Link:  # fmt: skip
        return self._made(link, link.connector, f"tcp://{host}:{port}", index, incarnation, keys or self.keys)

    def turn(self, *, wait: int = 2) -> dict[Link, list[Arrival]]:
        """Tick and receive at every port; what each received."""
        found: dict[Link, list[Arrival]] = {}
        for port in self.ports:
            port.tick(time.monotonic())
            found[port] = port.receive()
        self.ports[0].socket.poll(wait)
        return found

    def until(self, port: Link, done: Callable[[list[Arrival]], bool]) -> list[Arrival]:
        """Everything that `port` receives until `done` says so, from what nobody looked at on; all keep turning."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            for other, arrivals in self.turn().items():
                self._kept.setdefault(other, []).extend(arrivals)
            if done(self._kept[port]):
                found, self._kept[port] = self._kept[port], []
                return found
        raise AssertionError(f"nothing of the kind arrived: {self._kept[port]}")

    def meet(self, binder: Link, connector: Link) -> None:
        self.until(connector, joined)
        self.until(binder, joined)

    def close(self, *ports: Link) -> None:
        """Close these ports, or all, and their contexts."""
        for port in ports or tuple(self.ports):
            context = self._contexts.pop(self.ports.index(port))
            self.ports.remove(port)
            port.close()
            context.term()

    def end(self) -> None:
        """Of ports that somebody else has closed: their contexts."""
        for context in self._contexts:
            context.term()

    def _made(self, link: LinkSpec, role: Role, where: str, index: int, incarnation: int, keys: LinkKeys) -> Link:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        name = "scheduler_address" if link.binder is Role.SCHEDULER else "tokenizer_address"
        network = Network(context, LinksConfig(**{name: where, "link_keys": "here"}), keys)
        me = Identity(role, index, incarnation, 7)
        try:
            make = Link.bind if role is link.binder else Link.connect
            port = make(context, link, me, Path("/nowhere"), network=network)
        except BaseException:
            context.term()
            raise
        self.ports.append(port)
        self._contexts.append(context)
        return port


class Proxy:
    """Stands between the ends of TCP connections, in a thread. `cut` breaks those that stand after so many more bytes,
    whichever way they go, in the middle of whatever they are; `stall` passes nothing on any more and closes nothing."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.cuts = 0  # connections that were broken
        self._stalled = False
        self._left: int | None = None  # bytes until the next break
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, self._wake = socket.socketpair()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self, after: int = 0) -> None:
        with self._lock:
            self._left = after
        self._wake.send(b"c")

    def stall(self) -> None:
        """From now on what arrives stays unread."""
        self._wake.send(b"s")

    @property
    def armed(self) -> bool:
        """Whether a cut is still to come."""
        with self._lock:
            return self._left is not None

    def close(self) -> None:
        self._wake.send(b"e")
        self._thread.join(LIMIT)
        for each in (*self._pairs, self._listener, self._waker, self._wake):
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                one = key.fileobj
                if one is self._waker:
                    words = self._waker.recv(CHUNK)
                    if b"e" in words:
                        return
                    if b"s" in words:
                        self._stalled = True
                        for each in self._pairs:
                            self._selector.unregister(each)
                    if self._pairs and self._left == 0:
                        self._break()
                elif one is self._listener:
                    self._accept()
                elif isinstance(one, socket.socket) and one in self._pairs and not self._stalled:
                    self._pass(one)

    def _accept(self) -> None:
        one, _ = self._listener.accept()
        try:
            other = socket.create_connection(("127.0.0.1", self.target), timeout=LIMIT)
        except OSError:
            one.close()
            return
        for each, partner in ((one, other), (other, one)):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[each] = partner
            if not self._stalled:
                self._selector.register(each, selectors.EVENT_READ)

    def _pass(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            data = one.recv(CHUNK)
            with self._lock:
                breaks = self._left is not None and len(data) >= self._left
                if breaks:
                    data = data[: self._left]
                elif self._left is not None:
                    self._left -= len(data)
            if data:
                self._pairs[one].sendall(data)
                if not breaks:
                    return
            if breaks:
                self._break()
                return
        self._end(one)

    def _break(self) -> None:
        with self._lock:
            self._left = None
        self.cuts += 1
        for one in list(self._pairs):
            self._end(one)

    def _end(self, one: socket.socket) -> None:
        for each in (one, self._pairs.get(one)):
            if each is not None and self._pairs.pop(each, None) is not None:
                if not self._stalled:
                    self._selector.unregister(each)
                each.close()


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody has now, and that nobody gets who asks for any: below those that the kernel gives, and apart from
    those of other workers. Source: ip(7), ip_local_port_range."""
    given, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    first, last = (PORTS, given) if given > 2 * PORTS else (50_000, 65_536)
    share, worker = (last - first) // WORKERS, int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = first + worker * share + secrets.randbelow(share)
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((host.strip("[]"), port))
            return port


def joined(arrivals: list[Arrival]) -> bool:
    return any(isinstance(arrival.message, Joined) for arrival in arrivals)


def left(arrivals: list[Arrival]) -> bool:
    return any(isinstance(arrival.message, Left) for arrival in arrivals)


def messages(arrivals: list[Arrival]) -> list[object]:
    return [arrival.message for arrival in arrivals if not isinstance(arrival.message, Joined | Left)]
