"""One end of a link: a ROUTER that binds or a DEALER that connects, with a handshake, credit, and notice of lost peers.

Sending never queues beyond the peer's credit: `send` returns False and the caller keeps its data. A peer is lost when:
- its process ends. A pidfd shows it; of a process elsewhere, a probe twice a second that finds no connection;
- a new incarnation takes its place, or it says Goodbye;
- it was silent for the link's limit.

A session is what stands between two ends from one handshake to the next. After a restart of the binder, data of its
connectors reaches a stranger, who answers Goodbye, and the connector says Hello again. Either end may give up a peer
that lives (a stopped one, for example). Both hear of the session's end before the next one begins, whatever is still on
its way. Between hosts a connection that breaks ends its session, too (services/links/tcp.py). So every message was
either handed to the session that `send` named, or its owner receives `Left` for that session.

Synchronous: event loops watch the descriptor (services/links/async_link.py), plain loops poll the socket.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zmq

from penstock.protocol.errors import LinkError
from penstock.protocol.links import (
    MALFORMED,
    MOST_BYTES,
    Credit,
    Goodbye,
    Hello,
    LinkSpec,
    Refused,
    Welcome,
    address,
    decoder,
    identity,
)
from penstock.protocol.message import Message
from penstock.services.links import handshake
from penstock.services.links.handshake import Identity, ended, open_pidfd
from penstock.services.links.tcp import Network, TcpConnection, open_socket
from penstock.services.supervisor.run_directory import SocketFile

log = logging.getLogger(__name__)

HELLO_INTERVAL = 2.0  # seconds between the hellos of an established session, which are its heartbeat
HELLO_RETRY = 0.1  # seconds between hellos until the first welcome
GOODBYE = "said goodbye"  # reason of an orderly end
UNREACHABLE = "unreachable"  # reason of a lost connection
RECONNECTED = "connected again"  # reason of a connection that another one replaces
PROBE_INTERVAL = 0.5  # seconds between probes of a peer whose process cannot be seen from here
PROBES = 20  # without an answer; a stopped peer must not find its queue full of them
CREDIT_SHARE = 4  # credit goes back when a quarter of the window has been received
CREDIT_INTERVAL = 2.0  # seconds after which a smaller share goes back, too
LINGER = 100  # milliseconds that a goodbye may take


class Joined(msgspec.Struct, frozen=True):
    """A session with a peer has begun."""


class Left(msgspec.Struct, frozen=True):
    """The session with a peer is over: nothing that it was sent will be answered."""

    reason: str


class SocketStatistics(msgspec.Struct, frozen=True):
    """Counters since the link was opened."""

    peers: int = 0
    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused_sends: int = 0
    unacknowledged: int = 0  # now: messages sent whose credit has not come back


class Peer:
    """One session with the process at the other end. Equal only to itself."""

    __slots__ = (
        "credit", "epoch", "heard", "incarnation", "index", "name", "number", "pid", "pidfd", "probes", "session",
        "taken",
    )  # fmt: skip

    def __init__(self, name: bytes, hello: Hello | Welcome, window: int, now: float, number: int = 0) -> None:
        self.name = name
        self.session = hello.session
        self.number = number
        self.index = hello.index
        self.incarnation = hello.incarnation
        self.pid = hello.pid
        self.epoch = hello.epoch
        self.credit = window  # messages that may still be sent
        self.taken = 0  # messages received and not yet credited
        self.heard = now
        self.probes = 0  # since then
        self.pidfd = open_pidfd(hello.pid, hello.pid_namespace)

    def __repr__(self) -> str:
        return f"Peer({self.name.decode(errors='replace')}, pid {self.pid})"

    def exited(self) -> bool:
        """Whether its process has ended; False when that cannot be known from here."""
        return self.pidfd is not None and ended(self.pidfd)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def end_of(pid: int) -> str:
    """The reason of a process that has ended. Its last messages may be lost with its connection, a goodbye too."""
    return f"process {pid} ended"


def level_of(peer: Peer, reason: str) -> int:
    """How loud it is to say that a peer left: a lost one is a warning; of a process that ended its launcher warns."""
    return logging.INFO if reason in (GOODBYE, end_of(peer.pid)) else logging.WARNING


class Arrival(msgspec.Struct, frozen=True):
    """A message of the link, or that a peer joined or left."""

    peer: Peer
    message: Message | Joined | Left


class Link:
    """One end of a link. Made by `bind` or `connect`; owned by one thread."""

    def __init__(self, socket: zmq.Socket[bytes], spec: LinkSpec, me: Identity, *, binder: bool) -> None:
        self.socket = socket
        self.spec = spec
        self.me = me
        self.epoch = 0  # told in handshakes; the owner may change it
        self._binder = binder
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder(spec, at_binder=binder)
        self._peers: dict[bytes, Peer] = {}
        self._dismissed: dict[int, tuple[bytes, int]] = {}  # at a binder, by index: name and session that it gave up
        self._arrivals: list[Arrival] = []  # found outside receive()
        self._file: SocketFile | None = None  # of a binder on this machine
        self._reached = False  # a binder that other hosts reach
        self._connection: TcpConnection | None = None  # of a connector to another host; it owns the socket
        self._hello_sent = float("-inf")
        self._probed = float("-inf")
        self._credited = float("-inf")  # when all credit last went back
        self._now = 0.0  # as of the last tick
        self._session = 0  # of a connector: how often it gave the binder up
        self._number = 0  # of a binder: sessions that it began
        self._traffic: Counter[str] = Counter()  # by their names in SocketStatistics

    @classmethod
    def bind(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        spec: LinkSpec,
        me: Identity,
        run_dir: Path,
        network: Network | None = None,
    ) -> Link:
        """Listen as binder number `me.index`. A socket file that an earlier process left is taken over. Raises
        AddressError for an address that cannot be listened at."""
        if network is not None and network.reaches(spec):
            link = cls(network.listen(spec, me.index), spec, me, binder=True)
            link._reached = True
            return link
        socket = open_socket(context, zmq.ROUTER, spec)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        where = address(spec, run_dir, me.index)
        socket.bind(where)
        link = cls(socket, spec, me, binder=True)
        link._file = SocketFile(Path(where.removeprefix("ipc://")))
        return link

    @classmethod
    def connect(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        spec: LinkSpec,
        me: Identity,
        run_dir: Path,
        index: int = 0,
        network: Network | None = None,
    ) -> Link:
        """Connect to binder number `index`, now or whenever it comes up."""
        if network is not None and network.reaches(spec):
            connection = network.connection(spec, index)
            link = cls(connection.open(identity(me.role, me.index, me.incarnation)), spec, me, binder=False)
            link._connection = connection
            return link
        socket = open_socket(context, zmq.DEALER, spec)
        socket.setsockopt(zmq.IDENTITY, identity(me.role, me.index, me.incarnation))
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.connect(address(spec, run_dir, index))
        return cls(socket, spec, me, binder=False)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Peers in the order in which they joined."""
        return tuple(self._peers.values())

    def fileno(self) -> int:
        """The edge-triggered descriptor of the socket: after each send and receive, receive again. Between hosts a tick
        may begin another connection, which changes `socket` and this."""
        return self.socket.FD

    def send(self, peer: Peer, message: Message) -> bool:
        """Send `message`. False when the peer is gone or its credit is used up; then nothing was sent."""
        return self.send_each((peer,), message)

    def send_each(self, peers: Iterable[Peer], message: Message) -> bool:
        """Send to each of `peers`, encoded once. True when each took it."""
        payload = self._encoder.encode(message)
        assert len(payload) <= MOST_BYTES, "messages are bounded where they are made"
        sent = True
        for peer in peers:
            if peer.credit > 0 and self._peers.get(peer.name) is peer and self._put(peer.name, payload):
                peer.credit -= 1
                self._traffic["messages_out"] += 1
                self._traffic["bytes_out"] += len(payload)
            else:
                self._traffic["refused_sends"] += 1
                sent = False
        return sent

    def give_up(self, peer: Peer, reason: str) -> None:
        """End the session with a peer that lives; it is told and says Hello again. `Left` arrives here."""
        if self._peers.get(peer.name) is peer:
            self._dismiss(peer, reason, self._arrivals)

    def receive(self) -> list[Arrival]:
        """Everything that has arrived, without blocking. Raises LinkError when the binder refused our handshake."""
        arrivals = self._arrivals  # a send below may add to them
        self._read(arrivals)
        if self._connection is not None and self._peers and not self._connection.stands():
            self._lose(self._peers[b""], UNREACHABLE, arrivals)
        for peer in self.peers:
            if peer.taken * CREDIT_SHARE >= self.spec.window:
                self._give_credit(peer)
        self._arrivals = []
        return arrivals

    def tick(self, now: float) -> None:
        """Say hello, return credit, notice lost peers; `now` is in monotonic seconds. Call every 0.2 s, or every
        second while there are peers and their pidfds are watched."""
        self._now = now
        self._read(self._arrivals)  # last messages come before an end, and waiting hellos count
        due = now - self._credited >= CREDIT_INTERVAL
        if due:
            self._credited = now
        probing = now - self._probed >= PROBE_INTERVAL
        if probing:
            self._probed = now
        for peer in self.peers:
            if due and peer.taken:
                self._give_credit(peer)
            if peer.exited():
                self._lose(peer, end_of(peer.pid), self._arrivals)
            elif self.spec.silence and now - peer.heard > self.spec.silence:
                self._dismiss(peer, f"silent for {self.spec.silence:g} s", self._arrivals)
            elif probing and (peer.pidfd is None or self._reached):
                self._probe(peer)
        if self._connection is not None and not self._peers and self._connection.over(now):
            self._begin_again(self._connection)
        interval = HELLO_INTERVAL if self._peers or self._binder else HELLO_RETRY
        if not self._binder and now - self._hello_sent >= interval:
            self._say_hello()

    def statistics(self) -> SocketStatistics:
        return SocketStatistics(
            peers=len(self._peers),
            unacknowledged=sum(self.spec.window - peer.credit for peer in self._peers.values()),
            **self._traffic,
        )

    def close(self) -> None:
        """Say Goodbye to every peer, close the socket, and remove its file."""
        goodbye = self._encoder.encode(Goodbye(self.me.incarnation))
        for peer in self.peers:
            self._put(peer.name, goodbye)
            peer.close()
        self._peers.clear()
        if self._file is not None:
            self._file.remove()
        if self._connection is not None:
            self._connection.close(LINGER)
        self.socket.close(LINGER)

    def _begin_again(self, connection: TcpConnection) -> None:
        """Begin another connection, and so another session, under a name that none had before."""
        self._session += 1
        me = self.me
        self.socket = connection.open(identity(me.role, me.index, me.incarnation, self._session))
        self._hello_sent = float("-inf")

    def _probe(self, peer: Peer) -> None:
        """Send an empty credit to a peer whose process cannot be seen. When that process has ended, a binder's message
        has no destination and a connector's finds no connection: a connection has room for all that credit allows."""
        if peer.probes >= PROBES:
            return
        peer.probes += 1
        if not self._put(peer.name, self._encoder.encode(Credit(0))) and not self._binder:
            self._lose(peer, UNREACHABLE, self._arrivals)

    def _read(self, arrivals: list[Arrival]) -> None:
        """Take everything that has arrived at the socket."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            name = frames[0] if self._binder else b""
            self._take(name, frames[-1], arrivals)

    def _put(self, name: bytes, payload: bytes) -> bool:
        try:
            if self._binder:
                self.socket.send_multipart((name, payload), zmq.NOBLOCK)
            else:
                self.socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            peer = self._peers.get(name)
            if peer is not None:
                self._lose(peer, UNREACHABLE, self._arrivals)
            return False
        return True

    def _take(self, name: bytes, payload: bytes, arrivals: list[Arrival]) -> None:
        try:
            message = self._decoder.decode(payload)
        except MALFORMED as error:
            log.error("link %s: a peer sent what is not of this protocol: %s", self.spec.name, error)
            if name in self._peers:
                self._dismiss(self._peers[name], "sent a malformed message", arrivals)
            return
        self._traffic["messages_in"] += 1
        self._traffic["bytes_in"] += len(payload)
        peer = self._peers.get(name)
        if peer is not None:
            peer.heard = self._now
            peer.probes = 0
        match message:
            case Hello():
                self._answer(name, message, arrivals)
            case Welcome():
                self._welcomed(peer, message, arrivals)
            case Refused(reason):
                raise LinkError(reason)
            case Credit(count):
                if peer is not None:
                    peer.credit += count
            case Goodbye() as goodbye:
                if peer is not None and self._ends(goodbye, peer):
                    self._lose(peer, GOODBYE, arrivals)
                if not self._binder and not self._peers:
                    self._hello_sent = float("-inf")
            case _ if peer is None:
                self._say_goodbye(name)
            case _:
                peer.taken += 1
                arrivals.append(Arrival(peer, message))

    def _say_hello(self) -> None:
        """A connection that is being made takes none yet: the next tick says it again."""
        if self._put(b"", self._encoder.encode(handshake.hello(self.me, self.epoch, self._session))):
            self._hello_sent = self._now

    def _answer(self, name: bytes, hello: Hello, arrivals: list[Arrival]) -> None:
        reason = handshake.refusal(self.spec, self.me, hello)
        if reason:
            log.error("link %s: refused: %s", self.spec.name, reason)
            self._put(name, self._encoder.encode(Refused(reason)))
            return
        known = self._peers.get(name)
        over_name, over_session = self._dismissed.get(hello.index, (b"", 0))
        if known is None and name == over_name and hello.session <= over_session:
            self._say_goodbye(name)  # on its way when its sender was given up, as is the data behind it
            return
        rival = next((peer for peer in self._peers.values() if peer.index == hello.index and peer.name != name), None)
        if rival is not None and rival.incarnation == hello.incarnation and rival.session > hello.session:
            self._say_goodbye(name)  # from a connection that has ended; its sender has another
            return
        if known is not None and known.session != hello.session:
            self._lose(known, "began again", arrivals)
        if name not in self._peers:
            if rival is not None:
                same = rival.incarnation == hello.incarnation
                self._lose(rival, RECONNECTED if same else "replaced by a new incarnation", arrivals)
            self._number += 1
            peer = self._peers[name] = Peer(name, hello, self.spec.window, self._now, self._number)
            arrivals.append(Arrival(peer, Joined()))
        self._peers[name].epoch = hello.epoch
        welcome = handshake.welcome(self.me, hello, self.epoch, self._peers[name].number)
        self._put(name, self._encoder.encode(welcome))

    def _welcomed(self, peer: Peer | None, welcome: Welcome, arrivals: list[Arrival]) -> None:
        if welcome.session != self._session:
            return  # answers a Hello from before the binder was given up
        if peer is not None and (peer.incarnation, peer.number) != (welcome.incarnation, welcome.number):
            self._lose(peer, "restarted" if peer.incarnation != welcome.incarnation else "began again", arrivals)
            self._session = welcome.session  # the binder has begun already
            peer = None
        if peer is None:
            peer = self._peers[b""] = Peer(b"", welcome, self.spec.window, self._now, welcome.number)
            arrivals.append(Arrival(peer, Joined()))
        peer.epoch = welcome.epoch

    def _give_credit(self, peer: Peer) -> None:
        if self._put(peer.name, self._encoder.encode(Credit(peer.taken))):
            peer.taken = 0

    def _dismiss(self, peer: Peer, reason: str, arrivals: list[Arrival]) -> None:
        """Lose a peer that may still live: it is told, so that it forgets the session and says Hello again."""
        self._lose(peer, reason, arrivals)
        if self._binder:
            self._dismissed[peer.index] = (peer.name, peer.session)
        self._say_goodbye(peer.name)

    def _say_goodbye(self, name: bytes) -> None:
        """Tell an end that is no peer that every session until now is over."""
        before = self._number + 1 if self._binder else self._session
        self._put(name, self._encoder.encode(Goodbye(self.me.incarnation, before)))

    def _ends(self, goodbye: Goodbye, peer: Peer) -> bool:
        """Whether it is about the present session."""
        if self._binder:
            return peer.session < goodbye.before
        return peer.incarnation != goodbye.incarnation or peer.number < goodbye.before

    def _lose(self, peer: Peer, reason: str, arrivals: list[Arrival]) -> None:
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            peer.close()
            self._session += not self._binder
            arrivals.append(Arrival(peer, Left(reason)))
