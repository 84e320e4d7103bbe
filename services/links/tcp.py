"""The sockets below links. On one machine they are plain. Between hosts they have keys and heartbeats, and a connection
that has ended is never resumed.

Messages on their way over TCP are lost when the connection breaks. So each connection is a session of its own, or part
of one: a connector's socket makes one connection, under a name of its own, and libzmq never reconnects by itself. What
a binder receives under one name came over one connection, in order and without a gap. A connector that comes back has
another name and says Hello.

libzmq rejects peers without the keys before any application data is read: it asks over a socket (ZAP) that a thread
serves, so that a handshake never waits for a loop that is busy with a step.

Sources: zmq_setsockopt(3) for each option, CurveZMQ (ZeroMQ RFC 26), ZAP (RFC 27).
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import socket as sockets
import struct
import threading
from pathlib import Path

import zmq
from zmq.utils import z85

from penstock.protocol.config import LinksConfig
from penstock.protocol.errors import AddressError
from penstock.protocol.links import MOST_BYTES, HostAddress, LinkSpec, address, given_address, read_address
from penstock.services.links.curve import LinkKeys, read_keys
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

CONNECT_MS = 3000  # until a host that does not answer is tried again
HANDSHAKE_MS = 5000  # for the CURVE handshake
HEARTBEAT_MS = 2000  # between heartbeats, which libzmq's own thread sends and answers
SILENCE_MS = 5000  # without an answer to a heartbeat until the connection is given up
KEEPALIVE = ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 5), (zmq.TCP_KEEPALIVE_INTVL, 2),
             (zmq.TCP_KEEPALIVE_CNT, 3))  # fmt: skip
RETRY = 0.25  # seconds between the beginnings of two connections
ATTEMPT = (CONNECT_MS + HANDSHAKE_MS) / 1000 + 1  # seconds until a connection must be established
LOG_SECONDS = 30.0  # between two log lines about one binder's keys
EVENT = struct.Struct("=Hi")  # of a monitor: the event, and a descriptor or a reason
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILURES
ZAP = "inproc://zeromq.zap.01"
VERSION, DOMAIN, CURVE = b"1.0", b"penstock", b"CURVE"


class TcpConnection:
    """A connector's connections to a binder on another host, one after the other, each on a socket of its own.

    A socket whose connection has ended is closed a tick after the next one has begun, so that loops can unregister its
    descriptor first."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], spec: LinkSpec, where: HostAddress, keys: LinkKeys
    ) -> None:
        self.socket: zmq.Socket[bytes] | None = None
        self._context = context
        self._spec = spec
        self._where = where
        self._keys = keys
        self._before: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._begun: float | None = None  # monotonic seconds; None until the first tick after the beginning
        self._ended = False
        self._tries = 0
        self._logged = float("-inf")

    def open(self, name: bytes) -> zmq.Socket[bytes]:
        """Begin a connection under a new name."""
        self._close_monitor()
        self._close_before()
        self._before = self.socket
        made = self.socket = open_socket(self._context, zmq.DEALER, self._spec)
        made.setsockopt(zmq.IDENTITY, name)
        made.setsockopt(zmq.IMMEDIATE, 1)
        made.setsockopt(zmq.RECONNECT_IVL, -1)
        made.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        made.setsockopt(zmq.IPV6, self._ipv6())
        secure(made, self._keys)
        made.setsockopt(zmq.CURVE_SERVERKEY, self._keys.public)
        where = f"inproc://penstock.connection.{secrets.token_hex(8)}"
        made.monitor(where, ENDS)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(where)
        made.connect(str(self._where))
        self._begun, self._ended = None, False
        self._tries += 1
        return made

    def stands(self) -> bool:
        """Whether there is a connection now: with one, there is room for all that credit allows. Once ended, it is not
        established again."""
        assert self.socket is not None
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def over(self, now: float) -> bool:
        """Whether the last connection has ended, or was not established in time, and another may begin."""
        self._close_before()
        self._listen(now)
        if self._begun is None:
            self._begun = now
        since = now - self._begun
        return since >= RETRY and (self._ended or (since >= ATTEMPT and not self.stands()))

    def close(self, linger: int) -> None:
        """Close everything; `linger` is in milliseconds, for messages that were sent."""
        self._close_monitor()
        self._close_before()
        if self.socket is not None:
            self.socket.close(linger)

    def _ipv6(self) -> bool:
        """Whether to connect over IPv6. A name may have addresses of both kinds and its host listen on one: they are
        tried in turn, by libzmq's own thread, so that no loop waits for a name server."""
        if self._where.host.startswith("["):
            return True
        return self._tries % 2 == 1 and not numeric(self._where.host)

    def _listen(self, now: float) -> None:
        assert self._monitor is not None
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, value = EVENT.unpack(frames[0])
            self._ended = True
            if event & FAILURES and now - self._logged >= LOG_SECONDS:
                self._logged = now
                reason = reason_of(event, value)
                logs.warning(log, "link_not_admitted", link=self._spec.name, address=self._where, reason=reason)

    def _close_monitor(self) -> None:
        if self._monitor is not None:
            assert self.socket is not None
            self.socket.disable_monitor()
            self._monitor.close()
            self._monitor = None

    def _close_before(self) -> None:
        if self._before is not None:
            self._before.close(linger=0)
            self._before = None


class Network:
    """Which links of a process cross hosts, and how. One per context, which ends it; shared by the process's links."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], links: LinksConfig, keys: LinkKeys) -> None:
        self._context = context
        self._links = links
        self._keys = keys
        self._authenticating = False  # from the first listener on

    def reaches(self, spec: LinkSpec) -> bool:
        """Whether a link crosses hosts."""
        return bool(given_address(spec, self._links))

    def connection(self, spec: LinkSpec, index: int) -> TcpConnection:
        """To binder number `index`."""
        return TcpConnection(self._context, spec, self._where(spec, index), self._keys)

    def listen(self, spec: LinkSpec, index: int) -> zmq.Socket[bytes]:
        """A ROUTER that listens as binder number `index`, for peers with the keys. Raises AddressError."""
        if not self._authenticating:
            authenticate(self._context, self._keys)
            self._authenticating = True
        where = self._where(spec, index)
        numbers, ipv6 = resolved(spec, where)
        made = open_socket(self._context, zmq.ROUTER, spec)
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)
        made.setsockopt(zmq.IPV6, ipv6)
        secure(made, self._keys)
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a reply nobody is admitted
        try:
            made.bind(str(HostAddress(numbers, where.port)))
        except zmq.ZMQError as error:
            made.close(linger=0)
            raise refusal(spec, where, error.errno or 0) from error
        return made

    def _where(self, spec: LinkSpec, index: int) -> HostAddress:
        return read_address(option(spec), address(spec, Path(), index, self._links))


def network_of(context: zmq.Context[zmq.Socket[bytes]], links: LinksConfig) -> Network | None:
    """None where every link stays on this machine. Raises ConfigError for keys that cannot be used."""
    if not (links.scheduler_address or links.tokenizer_address):
        return None
    return Network(context, links, read_keys(links.link_keys))


def authenticate(context: zmq.Context[zmq.Socket[bytes]], keys: LinkKeys) -> None:
    """Answer libzmq's questions about peers in a thread, which ends with the context."""
    zap = context.socket(zmq.REP)
    zap.setsockopt(zmq.LINGER, 0)
    zap.bind(ZAP)
    threading.Thread(target=serve_zap, args=(zap, z85.decode(keys.public)), name="authenticator", daemon=True).start()


def serve_zap(zap: zmq.Socket[bytes], public: bytes) -> None:
    try:
        while True:
            zap.send_multipart(zap_reply(zap.recv_multipart(), public))
    except zmq.ContextTerminated:
        zap.close()


def zap_reply(query: list[bytes], public: bytes) -> list[bytes]:
    """The reply to a ZAP request: a peer with this public key, of 32 bytes, is admitted."""
    version, request, domain, _, _, mechanism, *credentials = query
    admitted = (
        version == VERSION
        and domain == DOMAIN
        and mechanism == CURVE
        and len(credentials) == 1
        and hmac.compare_digest(credentials[0], public)
    )
    return [VERSION, request, b"200" if admitted else b"400", b"" if admitted else b"other keys", b"", b""]


def reason_of(event: int, value: int) -> str:
    """Why a handshake failed, as far as libzmq knows."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "it has other keys"
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "it has no keys"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "it did not end the handshake: it has other keys, or is no part of Penstock"
    return "it spoke another protocol"


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, spec: LinkSpec) -> zmq.Socket[bytes]:
    """A socket with its limits."""
    made = context.socket(kind)
    made.setsockopt(zmq.SNDHWM, spec.high_water)
    made.setsockopt(zmq.RCVHWM, spec.high_water)
    made.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    made.setsockopt(zmq.LINGER, 0)
    return made


def secure(made: zmq.Socket[bytes], keys: LinkKeys) -> None:
    """Options of both ends over TCP: keys, a limit for handshakes, heartbeats."""
    made.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    made.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    made.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_MS + SILENCE_MS)
    for name, value in KEEPALIVE:
        made.setsockopt(name, value)


def option(spec: LinkSpec) -> str:
    """The option that gives the address of the link's binders."""
    return f"--{spec.binder}-address"


def numeric(host: str) -> bool:
    """Whether it is an IPv4 address, not a name."""
    try:
        sockets.inet_pton(sockets.AF_INET, host)
    except OSError:
        return False
    return True


def resolved(spec: LinkSpec, where: HostAddress) -> tuple[str, bool]:
    """The numeric address of a host in libzmq's form, and whether it is IPv6. A name with both kinds gives the IPv4
    one, on every host alike. Raises AddressError for an unknown host."""
    try:
        found = sockets.getaddrinfo(where.bare, where.port, type=sockets.SOCK_STREAM)
    except OSError as error:
        raise AddressError(option(spec), str(where), f"its host is not known here: {error.strerror}") from error
    family, _, _, _, named = min(found, key=lambda one: one[0] != sockets.AF_INET)
    return (f"[{named[0]}]", True) if family == sockets.AF_INET6 else (str(named[0]), False)


def refusal(spec: LinkSpec, where: HostAddress, number: int) -> AddressError:
    """A failed bind as an error for the operator."""
    if number == zmq.EADDRINUSE:
        return AddressError(option(spec), str(where), "another process listens there")
    if number in (zmq.EADDRNOTAVAIL, errno.ENODEV):
        return AddressError(option(spec), str(where), "its host must be an address of this machine")
    return AddressError(option(spec), str(where), f"it cannot be bound: {zmq.strerror(number)}")
