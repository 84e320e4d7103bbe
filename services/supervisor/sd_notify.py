"""The sd_notify protocol: a process tells its supervisor that it is ready, what it does, that it is alive, and why it
failed.

Under systemd the other end is systemd; under `penstock serve` it is the launcher with a `NoticeSocket` of its own.
Sources: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.protocol.errors import AddressError, ConfigError, LinkError, ModelError, PenstockError

NOTIFY_SOCKET = "NOTIFY_SOCKET"
WATCHDOG_USEC = "WATCHDOG_USEC"  # microseconds of silence after which the supervisor acts
WATCHDOG_PID = "WATCHDOG_PID"  # the process that is watched, if only one is
MAX_NOTICE = 16 << 10  # bytes of one datagram
PHASE_SECONDS = 1800.0  # that one phase of a start may take
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
HEARTBEATS = 4  # per watchdog interval
STATUS = "STATUS="  # such a line is sent once: a status does not last
IDLE_SECONDS = 60.0  # between checks of a process that was not asked for heartbeats
ERROR_FIELD = "X_PENSTOCK_FAULT"  # of a notice: the error that ended the process
MAX_ERROR = 4000  # characters of an error's message: a notice is one datagram
CONFIG_ERRORS: Mapping[str, type[ConfigError]] = {"ConfigError": ConfigError, "AddressError": AddressError}
ERRORS: Mapping[str, type[PenstockError]] = {"ModelError": ModelError, "LinkError": LinkError}


def notify(*lines: str, environ: Mapping[str, str] = os.environ, given: socket.socket | None = None) -> bool:
    """Send `NAME=value` lines as one datagram to $NOTIFY_SOCKET; False without a supervisor that listens.

    A line break within a line becomes a space, because it would end the field. Never raises and never blocks: a process
    outlives its supervisor, and a lack of descriptors. A caller that must be heard even then opens its socket at start
    and passes it as `given`.
    """
    path = environ.get(NOTIFY_SOCKET, "")
    if not path:
        return False
    target = "\0" + path[1:] if path.startswith("@") else path
    payload = "\n".join(line.replace("\n", " ") for line in lines).encode()[:MAX_NOTICE]
    try:
        if given is not None:
            given.sendto(payload, target)
            return True
        with notice_sender() as sender:
            sender.sendto(payload, target)
    except OSError:
        return False
    return True


def notice_sender() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)


def progress(text: str) -> None:
    """Report a phase of the start and have the supervisor extend its start timeout."""
    notify(f"STATUS={text}", f"EXTEND_TIMEOUT_USEC={int(PHASE_SECONDS * 1e6)}")


class Heartbeat:
    """WATCHDOG=1 at the pace the supervisor asked for: systemd by WatchdogSec=, `penstock serve` always. Both kill a
    process that falls silent, but `penstock serve` only after its first heartbeat: loading takes as long as it takes.

    The kernel queues few notices for a supervisor that is late, ten by default, and drops the rest. So every heartbeat
    repeats what holds for good, readiness above all.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        meant = environ.get(WATCHDOG_PID, str(os.getpid())) == str(os.getpid())
        asked = environ.get(WATCHDOG_USEC, "")
        self.interval = int(asked) / 1e6 / HEARTBEATS if meant and asked.isdecimal() and int(asked) else float("inf")
        self._next = float("-inf") if self.interval < float("inf") else float("inf")
        self._told: tuple[str, ...] = ()
        # A silent process is killed, so heartbeats must not depend on a free descriptor.
        self._sender = notice_sender() if self.interval < float("inf") else None
        if self._sender is not None:
            weakref.finalize(self, self._sender.close)

    def tell(self, *lines: str) -> None:
        """Send these lines and all earlier ones, now and with each heartbeat; a status only now. Single-threaded."""
        lasting = [line for line in lines if not line.startswith(STATUS)]
        self._told = tuple(dict.fromkeys((*self._told, *lasting)))
        beat = ("WATCHDOG=1",) if "READY=1" in lines and self._sender is not None else ()  # a hang from now on is found
        notify(*beat, *self._told, *(line for line in lines if line.startswith(STATUS)), environ=self._environ)

    def tick(self, now: float) -> None:
        """Called often; `now` is in monotonic seconds."""
        if now >= self._next:
            self._next = now + self.interval
            # A process may wait for others before it is ready; while it is alive, that is no start timeout.
            patience = f"EXTEND_TIMEOUT_USEC={int(2e6 * HEARTBEATS * self.interval)}"
            notify("WATCHDOG=1", patience, *self._told, environ=self._environ, given=self._sender)


async def send_heartbeats(heartbeat: Heartbeat) -> None:
    """Send heartbeats from the running event loop until cancelled; they prove that this loop is not blocked."""
    import asyncio  # the command line imports this module and needs no event loop

    loop = asyncio.get_running_loop()
    while True:
        heartbeat.tick(loop.time())
        await asyncio.sleep(min(heartbeat.interval, IDLE_SECONDS))


class ErrorNotice(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error of protocol/errors.py as a field of the process's last notice.

    `penstock serve` needs only the exit code and the log; a Python program that started an engine raises the same error
    that ended the process.
    """

    kind: str
    message: str
    option: str = ""
    value: str | int | float | bool | None = None
    allowed: str = ""


ERROR_NOTICE = msgspec.json.Decoder(ErrorNotice)


def error_line(error: PenstockError) -> str:
    """The line of a notice that carries `error`."""
    notice = ErrorNotice(type(error).__name__, str(error)[:MAX_ERROR])
    if isinstance(error, ConfigError):
        value = error.value if isinstance(error.value, int | float | None) else str(error.value)[:MAX_ERROR]
        notice = msgspec.structs.replace(notice, option=error.option, value=value, allowed=error.allowed[:MAX_ERROR])
    return f"{ERROR_FIELD}={msgspec.json.encode(notice).decode()}"


def crash_line(process: str, ending: str, last: str) -> str:
    """The same for a process that could not report its error; its last lines of output give the reason, if any do."""
    return error_line(LinkError(f"{process} ended ({ending}); its last lines:\n{last[-MAX_ERROR // 2 :]}"))


def read_error(field: str) -> PenstockError:
    """The error in a notice's ERROR_FIELD."""
    try:
        notice = ERROR_NOTICE.decode(field)
    except msgspec.DecodeError:
        return LinkError(f"a process failed and said why in words that cannot be read: {field[:MAX_ERROR]}")
    if notice.kind in CONFIG_ERRORS:
        return CONFIG_ERRORS[notice.kind](notice.option, notice.value, notice.allowed)
    return ERRORS.get(notice.kind, LinkError)(notice.message)


class Notice(msgspec.Struct, frozen=True):
    """One datagram: its sender, as attested by the kernel, and its fields."""

    pid: int
    fields: dict[str, str]
    received: float  # monotonic seconds

    @property
    def ready(self) -> bool:
        return self.fields.get("READY") == "1"


class NoticeSocket:
    """The listening end. The kernel attaches the sender's credentials, so a child cannot speak for another.

    A file at `path` is replaced: its owner was killed, as the lock of the run directory shows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self._socket = notice_sender()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[Notice]:
        """Every datagram that has arrived; never blocks. Descriptors sent with one are closed."""
        notices: list[Notice] = []
        space = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(64)
        while True:
            try:
                payload, ancillary, flags, _ = self._socket.recvmsg(MAX_NOTICE, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return notices
            pid = 0
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid, _, _ = CREDENTIALS.unpack(data[: CREDENTIALS.size])
                elif level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    close_all(data)
            if pid and not flags & socket.MSG_TRUNC:
                notices.append(Notice(pid, parse(payload), time.monotonic()))

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def parse(payload: bytes) -> dict[str, str]:
    """The fields of one datagram. Lines without '=' are skipped; the last of several equal names counts."""
    fields = {}
    for line in payload.decode(errors="replace").split("\n"):
        name, equals, value = line.partition("=")
        if equals and name:
            fields[name] = value
    return fields


def close_all(data: bytes) -> None:
    descriptors = array.array("i")
    descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    for descriptor in descriptors:
        os.close(descriptor)
