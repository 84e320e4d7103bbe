"""Authentication of peers on other hosts: libzmq admits those that show the deployment's public key, and so have its
keys, and rejects all others before any application data is read. Rejected peers are counted and logged here.

libzmq asks over a socket (ZAP, ZeroMQ RFC 27) and reports over others (zmq_socket_monitor(3)). A thread serves both, so
that a handshake never waits for a loop that is busy with a step. The thread ends with its context.
"""

from __future__ import annotations

import hmac
import logging
import os
import queue
import socket
import struct
import threading
import time

import zmq
from zmq.utils import z85

from penstock.services.links.curve import LinkKeys
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

ZAP = "inproc://zeromq.zap.01"
DOMAIN = b"penstock"
VERSION = b"1.0"
CURVE = b"CURVE"
UNKNOWN = "unknown"  # the address of a peer that was gone before it could be read
LOG_SECONDS = 30.0  # between two log lines about rejected peers at one listener
EVENT = struct.Struct("=Hi")  # the event, and a descriptor or a reason
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
MONITORED = (
    FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
)


class ListenerMonitor:
    """One listening socket, by the events of its monitor. Owned by the authenticator's thread; others read `refused`.

    The monitor names a connection by its descriptor when it begins and ends, but not when its handshake succeeds or
    fails. A failure is followed at once by that connection's end. Among concurrent handshakes, a connection that ends
    without a failure may have succeeded or not: as many of them as have succeeded are not counted.
    """

    def __init__(self, name: str, monitor: zmq.Socket[bytes]) -> None:
        self.name = name
        self.monitor = monitor
        self.refused = 0
        self.unlogged = 0  # of these
        self._logged = float("-inf")  # when the last line was
        self._address = UNKNOWN  # the last known one
        self._cause = ""  # of the last one
        self._handshaking: dict[int, str] = {}  # addresses by descriptor, perhaps in their handshakes
        self._admitted = 0  # of these
        self._reason = ""  # of the handshake that failed last, until its connection has ended

    def note(self, event: int, value: int) -> None:
        """An event of the monitor."""
        if event == zmq.EVENT_ACCEPTED:
            self._handshaking[value] = address_of(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._admitted += 1
        elif event & FAILURES:
            self._reason = reason_of(event, value)
        elif event == zmq.EVENT_DISCONNECTED and value in self._handshaking:
            address = self._handshaking.pop(value)
            if self._reason or self._admitted == 0:
                self.refused += 1
                self.unlogged += 1
                self._address = self._address if address == UNKNOWN else address
                self._cause = self._reason or "it spoke another protocol"
                self._reason = ""
            else:
                self._admitted -= 1
        if self._admitted == len(self._handshaking):
            self._handshaking.clear()
            self._admitted = 0

    def log_refused(self, now: float) -> None:
        """Log the peers that were refused since the last line, unless that was a moment ago."""
        if self.unlogged and now - self._logged >= LOG_SECONDS:
            logs.warning(
                log, "link_refused", link=self.name, address=self._address, reason=self._cause, times=self.unlogged
            )
            self._logged, self.unlogged, self._address = now, 0, UNKNOWN


class Authenticator:
    """The authenticator of a context; made before any socket of it listens for other hosts."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: LinkKeys) -> None:
        self._context = context
        self._public = z85.decode(keys.public)
        self._new: queue.SimpleQueue[ListenerMonitor] = queue.SimpleQueue()
        self._made = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        zap = context.socket(zmq.REP)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind(ZAP)
        threading.Thread(target=self._run, args=(zap,), name="authenticator", daemon=True).start()

    def watch(self, socket: zmq.Socket[bytes], name: str) -> ListenerMonitor:
        """Count and log the peers refused at a socket that is about to listen, until it is closed."""
        self._made += 1
        where = f"inproc://penstock.listener.{self._made}"
        socket.monitor(where, MONITORED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # a full queue would stop libzmq's own thread
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(where)
        listener = ListenerMonitor(name, monitor)
        self._new.put(listener)
        os.eventfd_write(self._wake, 1)
        return listener

    def _run(self, zap: zmq.Socket[bytes]) -> None:
        """The thread: answers and counts until the context ends."""
        listeners: dict[zmq.Socket[bytes], ListenerMonitor] = {}
        poller = zmq.Poller()
        poller.register(zap, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while True:
                unlogged = any(listener.unlogged for listener in listeners.values())
                ready = dict(poller.poll(int(LOG_SECONDS * 1000) if unlogged else None))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    while not self._new.empty():
                        listener = self._new.get()
                        listeners[listener.monitor] = listener
                        poller.register(listener.monitor, zmq.POLLIN)
                if zap in ready:
                    zap.send_multipart(zap_reply(zap.recv_multipart(), self._public))
                for monitor, listener in list(listeners.items()):
                    if monitor in ready and not read_events(listener):
                        poller.unregister(monitor)
                        listeners.pop(monitor).monitor.close()
                    listener.log_refused(time.monotonic())
        except zmq.ContextTerminated:
            pass  # the process has closed its links
        finally:
            zap.close()
            while not self._new.empty():
                self._new.get().monitor.close()
            for monitor in listeners:
                monitor.close()
            os.close(self._wake)


def read_events(listener: ListenerMonitor) -> bool:
    """Read the events of a monitor; False when its socket is closed."""
    while True:
        try:
            frames = listener.monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return True
        event, value = EVENT.unpack(frames[0])
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        listener.note(event, value)


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
    """Why a handshake failed, as far as libzmq knows; the same words for both ends."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "it has other keys"
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "it has no keys"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "it did not end the handshake: it has other keys, or is no part of Penstock"
    return "it spoke another protocol"


def address_of(descriptor: int) -> str:
    """The address at the other end of a connection of libzmq's, which may have closed it meanwhile."""
    try:
        with socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM) as connection:
            name = connection.getpeername()
    except OSError:
        return UNKNOWN
    return str(name[0]) if isinstance(name, tuple) else UNKNOWN
