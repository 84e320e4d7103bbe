"""Who may come in where processes of other hosts are let in: those who show the deployment's public key, and so have
its keys. Everybody else is turned away by libzmq before a byte of theirs reaches a port; here they are counted, and
told of now and then.

libzmq asks over a socket (ZAP, ZeroMQ RFC 27) and tells over others (zmq_socket_monitor(3)); a thread answers and
listens, so that a handshake never waits for a loop that is busy with a step. The thread ends with its context.
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
UNKNOWN = "unknown"  # the address of one who was gone before anybody could look
TELL_SECONDS = 30.0  # between two lines of the log about strangers at one listened
EVENT = struct.Struct("=Hi")  # what, and a descriptor or a reason
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
HEARD = (
    FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
)


class ListenerMonitor:
    """One listening socket, as its monitor tells of it. Owned by the admission's thread; others read `refused`.

    The monitor names a connection by its descriptor when it begins and ends, and not at all when its handshake succeeds
    or fails. A failure is followed at once by that connection's end. Of several that are in their handshakes together
    the one that ended without a failure may be either kind: as many of those as have succeeded are not counted.
    """

    def __init__(self, name: str, monitor: zmq.Socket[bytes]) -> None:
        self.name = name
        self.monitor = monitor
        self.refused = 0
        self.untold = 0  # of these, not yet in the log
        self._told = float("-inf")
        self._address = UNKNOWN  # of the last one whose is known
        self._cause = ""  # of the last one
        self._shaking: dict[int, str] = {}  # by descriptor: addresses of those who may be in their handshakes
        self._admitted = 0  # of these
        self._reason = ""  # of the handshake that failed last, until its connection has ended

    def note(self, event: int, value: int) -> None:
        """Something that the monitor told."""
        if event == zmq.EVENT_ACCEPTED:
            self._shaking[value] = address_of(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._admitted += 1
        elif event & FAILURES:
            self._reason = reason_of(event, value)
        elif event == zmq.EVENT_DISCONNECTED and value in self._shaking:
            address = self._shaking.pop(value)
            if self._reason or self._admitted == 0:
                self.refused += 1
                self.untold += 1
                self._address = self._address if address == UNKNOWN else address
                self._cause = self._reason or "it spoke another protocol"
                self._reason = ""
            else:
                self._admitted -= 1
        if self._admitted == len(self._shaking):
            self._shaking.clear()
            self._admitted = 0

    def tell(self, now: float) -> None:
        """Log those who were refused since the last time, unless that was a moment ago."""
        if self.untold and now - self._told >= TELL_SECONDS:
            logs.warning(
                log, "link_refused", link=self.name, address=self._address, reason=self._cause, times=self.untold
            )
            self._told, self.untold, self._address = now, 0, UNKNOWN


class Authenticator:
    """The one of a context; it must be there before any socket listens for other hosts."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: LinkKeys) -> None:
        self._context = context
        self._public = z85.decode(keys.public)
        self._fresh: queue.SimpleQueue[ListenerMonitor] = queue.SimpleQueue()
        self._made = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        zap = context.socket(zmq.REP)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind(ZAP)
        threading.Thread(target=self._run, args=(zap,), name="admission", daemon=True).start()

    def watch(self, listener: zmq.Socket[bytes], name: str) -> ListenerMonitor:
        """Count and tell who is refused at a socket that is about to listen. The socket's end is the listened's."""
        self._made += 1
        where = f"inproc://penstock.listener.{self._made}"
        listener.monitor(where, HEARD)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would stop libzmq's own thread
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(where)
        listened = ListenerMonitor(name, monitor)
        self._fresh.put(listened)
        os.eventfd_write(self._wake, 1)
        return listened

    def _run(self, zap: zmq.Socket[bytes]) -> None:
        """The thread: answers and notes until the context ends."""
        listeners: dict[zmq.Socket[bytes], ListenerMonitor] = {}
        poller = zmq.Poller()
        poller.register(zap, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while True:
                untold = any(listened.untold for listened in listeners.values())
                ready = dict(poller.poll(int(TELL_SECONDS * 1000) if untold else None))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    while not self._fresh.empty():
                        listened = self._fresh.get()
                        listeners[listened.monitor] = listened
                        poller.register(listened.monitor, zmq.POLLIN)
                if zap in ready:
                    zap.send_multipart(verdict(zap.recv_multipart(), self._public))
                for monitor, listened in list(listeners.items()):
                    if monitor in ready and not listen(listened):
                        poller.unregister(monitor)
                        listeners.pop(monitor).monitor.close()
                    listened.tell(time.monotonic())
        except zmq.ContextTerminated:
            pass  # the process's ports are closed
        finally:
            zap.close()
            while not self._fresh.empty():
                self._fresh.get().monitor.close()
            for monitor in listeners:
                monitor.close()
            os.close(self._wake)


def listen(listened: ListenerMonitor) -> bool:
    """Take what its monitor has told; False when the socket is closed."""
    while True:
        try:
            frames = listened.monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return True
        event, value = EVENT.unpack(frames[0])
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        listened.note(event, value)


def verdict(question: list[bytes], public: bytes) -> list[bytes]:
    """The answer to a question of libzmq's: whoever shows this public key, of 32 bytes, may come in."""
    version, request, domain, _, _, mechanism, *credentials = question
    admitted = (
        version == VERSION
        and domain == DOMAIN
        and mechanism == CURVE
        and len(credentials) == 1
        and hmac.compare_digest(credentials[0], public)
    )
    return [VERSION, request, b"200" if admitted else b"400", b"" if admitted else b"other keys", b"", b""]


def reason_of(event: int, value: int) -> str:
    """Why a handshake failed, as far as libzmq tells; the same words for both ends."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "it has other keys"
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "it has no keys"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return "it did not end the handshake: it has other keys, or is no part of Penstock"
    return "it spoke another protocol"


def address_of(descriptor: int) -> str:
    """Who is at the other end of a connection of libzmq's, which may have closed it meanwhile."""
    try:
        with socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM) as connection:
            name = connection.getpeername()
    except OSError:
        return UNKNOWN
    return str(name[0]) if isinstance(name, tuple) else UNKNOWN
