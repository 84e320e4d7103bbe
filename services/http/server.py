"""The HTTP server: its listening socket, the connections it accepts, and uvicorn's main loop.

A process accepts no more connections than it has file descriptors for; the others wait in the listener's queue. Running
out of descriptors elsewhere would fail there, with every stream of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import cast

import msgspec
import uvicorn

from penstock.protocol.admin import OPTION as ADMIN
from penstock.protocol.admin import read_admin_address
from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import ConfigError, InvalidRequest
from penstock.services.supervisor import address, logs

log = logging.getLogger(__name__)

Socket = socket.socket

MODES: Mapping[str, int] = {"owner": 0o600, "group": 0o660, "everybody": 0o666}
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 4))  # a dead host: 140 s
SERVER_TICK = 1.0  # seconds between new values of the Date header
DESCRIPTORS = 1 << 16  # that are asked for
SPARE = 32  # descriptors for files that are opened and closed again, and for links that come back
SPARE_PER_LINK = 4
PAUSE = 0.1  # seconds before the next try when the process, or the machine, has no descriptor left
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Of one connection, already gone again: accept(2), "Error handling".
GONE = (
    errno.ECONNABORTED, errno.EPERM, errno.ENETDOWN, errno.EPROTO, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET,
    errno.EHOSTUNREACH, errno.EOPNOTSUPP, errno.ENETUNREACH,
)  # fmt: skip


def listen(options: ApiConfig) -> Socket:
    """A bound socket, which further api processes may bind too unless it is a file. Raises AddressError."""
    return listen_at_file(options) if options.uds else listen_at_address(options)


def listen_for_metrics(options: ApiConfig) -> Socket | None:
    """The same at --metrics-port; None without one. Raises AddressError."""
    if not options.metrics_port:
        return None
    with address.named("--metrics-port", options.metrics_port):
        return listen_at_address(msgspec.structs.replace(options, port=options.metrics_port))


def admin_options(options: ApiConfig) -> ApiConfig | None:
    """What a listener at --admin-address goes by: one process, the operator's own pages, its owner's socket. None
    without one."""
    found = read_admin_address(options.admin_address)
    if found is None:
        return None
    return msgspec.structs.replace(
        options, host=found.host, port=found.port, uds=found.file, uds_mode="owner", api_processes=1,
        allowed_origins="", allow_credentials=False,
    )  # fmt: skip


def listen_for_operator(options: ApiConfig) -> Socket | None:
    """The same at --admin-address; None without one. Raises AddressError, and ConfigError for an address that others
    reach without TLS."""
    found = admin_options(options)
    if found is None:
        return None
    check_admin_reach(found)
    with address.named(ADMIN, options.admin_address):
        return listen(found)


def check_admin_reach(options: ApiConfig) -> None:
    """Raise ConfigError unless `admin_options` are of a loopback address or a socket, or there is TLS: the operator's
    key crosses no network as it is."""
    if not (options.uds or options.ssl_certfile or address.only_here(options)):
        raise ConfigError(ADMIN, options.admin_address, "other machines reach it: it needs --ssl-certfile, or loopback")


def listen_at_address(options: ApiConfig) -> Socket:
    family, target = address.resolve(options.host, options.port)
    listener = Socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if options.api_processes > 1:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # every connection inherits these
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEP_ALIVE:
            listener.setsockopt(socket.IPPROTO_TCP, name, value)
        listener.bind(target)
    except OSError as error:
        listener.close()
        raise address.refusal(options.host, options.port, error) from error
    listener.setblocking(False)
    return listener


def listen_at_file(options: ApiConfig) -> Socket:
    """Replaces a file that a dead server left, but not one that a process listens at."""
    path = Path(options.uds)
    address.check_file(path)
    listener = Socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = path.with_name(f".{path.name}.new")  # at no moment open to more users than MODES says
    try:
        fresh.unlink(missing_ok=True)
        listener.bind(str(fresh))
        fresh.chmod(MODES[options.uds_mode])
        fresh.rename(path)
    except OSError as error:
        listener.close()
        raise address.file_refusal(path, error) from error
    listener.setblocking(False)
    return listener


def remove_file(options: ApiConfig) -> None:
    """Remove the file that `listen` made."""
    if options.uds:
        with contextlib.suppress(OSError):
            Path(options.uds).unlink()


def url_of(listener: Socket, options: ApiConfig) -> str:
    """The url for clients; a file's path as nginx and others write it."""
    if options.uds:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls(options: ApiConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the certificate of the options; None without one. Raises ConfigError."""
    if not options.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    key = options.ssl_keyfile or options.ssl_certfile
    for flag, path in (("--ssl-certfile", options.ssl_certfile), ("--ssl-keyfile", key)):
        if not Path(path).is_file():
            raise ConfigError(flag, path, "it must be a PEM file")
    try:
        # Without a password, even an empty one, OpenSSL would ask the terminal for it.
        context.load_cert_chain(options.ssl_certfile, key, password=options.ssl_keyfile_password)
    except (OSError, ValueError) as error:
        told = "it must fit its key" if options.ssl_keyfile else "it must hold its key, or --ssl-keyfile name it"
        raise ConfigError("--ssl-certfile", options.ssl_certfile, f"{told}: {reason(error)}") from error
    if options.ssl_ca_certs:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except OSError as error:
            raise ConfigError("--ssl-ca-certs", options.ssl_ca_certs, f"it must be PEM: {reason(error)}") from error
        required = options.ssl_cert_reqs == "required"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


def reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


class ConnectionStatistics(msgspec.Struct, frozen=True):
    """Open connections, TLS handshakes included, and their limit; how often accepting waited for one to close, and how
    often it failed for want of a descriptor."""

    open: int
    limit: int
    waits: int
    failures: int


class ConnectionLimiter:
    """Counts the connections of one process, as `accept` and each connection report them."""

    def __init__(self, limit: int = DESCRIPTORS) -> None:
        self.limit = limit
        self.failures = 0
        self._open = 0
        self._waits = 0
        self._free = asyncio.Event()

    def acquire(self) -> None:
        self._open += 1

    def release(self) -> None:
        self._open -= 1
        self._free.set()

    async def wait(self) -> None:
        """Until the limit allows one more connection."""
        if self._open >= self.limit:
            self._waits += 1
            if self._waits == 1:
                logs.warning(log, "connections_full", limit=self.limit, option="--max-connections")
        while self._open >= self.limit:
            self._free.clear()
            await self._free.wait()

    def statistics(self) -> ConnectionStatistics:
        return ConnectionStatistics(self._open, self.limit, self._waits, self.failures)


async def accept(
    listener: Socket,
    limiter: ConnectionLimiter,
    make: Callable[..., asyncio.Protocol],
    encryption: ssl.SSLContext | None,
    handshake: float,
) -> None:
    """Accept connections until cancelled; `make` gives each its protocol, which releases it at the `limiter`.

    A TLS handshake may take `handshake` seconds, its first byte as many. Raises OSError for a broken listener.
    """
    loop = asyncio.get_running_loop()
    handshakes: set[asyncio.Task[None]] = set()
    while True:
        await limiter.wait()
        try:
            peer, _ = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno in GONE:
                continue
            if error.errno not in FULL:
                raise
            limiter.failures += 1
            if limiter.failures == 1:
                logs.warning(log, "no_descriptor", reason=error.strerror)
            await asyncio.sleep(PAUSE)
            continue
        limiter.acquire()
        task = loop.create_task(connect(peer, limiter, make, encryption, handshake))
        handshakes.add(task)
        task.add_done_callback(handshakes.discard)


async def connect(
    peer: Socket,
    limiter: ConnectionLimiter,
    make: Callable[..., asyncio.Protocol],
    encryption: ssl.SSLContext | None,
    handshake: float,
) -> None:
    """Hand an accepted connection to its protocol, after the TLS handshake if there is one. A client that speaks plain
    HTTP instead is told so."""
    protocol = None
    try:
        if encryption is not None and (await first_byte(peer, handshake)).isupper():
            encryption = None
            protocol = make(refusal=InvalidRequest("this port speaks HTTPS, and http:// came", code="https_required"))
        else:
            protocol = make()
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol, peer, ssl=encryption, ssl_handshake_timeout=handshake if encryption is not None else None
        )
    except (OSError, ssl.SSLError) as error:  # the client's fault, and no answer would reach it
        logs.debug(log, "no_handshake", reason=str(error))
        peer.close()
        if not getattr(protocol, "transport", None):
            limiter.release()


async def first_byte(peer: Socket, seconds: float) -> bytes:
    """What a client begins with, a capital in HTTP and 22 in TLS, which stays to be read. Raises TimeoutError, and
    OSError for one that is gone."""
    loop, there = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(peer, there.set)
    try:
        await asyncio.wait_for(there.wait(), seconds)
    finally:
        loop.remove_reader(peer)
    return peer.recv(1, socket.MSG_PEEK)


def connection_limit(wanted: int, links: int) -> int:
    """Connections that the remaining descriptors of this process allow; at most `wanted`, unless that is 0."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    limit = max(1, most - len(os.listdir("/proc/self/fd")) - SPARE - SPARE_PER_LINK * links)
    if wanted > limit:
        logs.warning(log, "fewer_connections", wanted=wanted, limit=limit, open_files=most)
    return min(wanted or limit, limit)


def raise_descriptor_limit() -> None:
    """Allow as many open files as are of use, since each connection is one, or as the system grants."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse the limit that they name
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class Server(uvicorn.Server):
    """uvicorn's server with a main loop that wakes once a second, or for a signal, and with `accept` in tasks."""

    accepting: tuple[asyncio.Task[None], ...]  # of each listener

    def __init__(self, config: uvicorn.Config, idle: float) -> None:
        config.load()
        config.timeout_keep_alive = cast(int, idle)  # it goes to call_later, which takes fractions
        super().__init__(config)
        self._asked = asyncio.Event()
        self._forced = asyncio.Event()

    async def startup(self, sockets: list[Socket] | None = None) -> None:
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[Socket] | None = None) -> None:
        for task in self.accepting:
            task.cancel()
        await asyncio.wait(self.accepting)  # the listeners are closed next and must have no reader
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await self.pause(SERVER_TICK)

    def exit(self, *, force: bool = False) -> None:
        """End, at once or when every response is complete."""
        self.should_exit = True
        self._asked.set()
        if force:
            self.force_exit = True
            self._forced.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Without uvicorn's own, which would raise the signal once more at the end."""
        del sig, frame
        self.exit(force=self.should_exit)

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until the end is asked for; then until it must come at once."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for((self._forced if self.should_exit else self._asked).wait(), seconds)
