"""One process that the launcher started: its output, its notices, and its end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence

from penstock.protocol.links import Role
from penstock.services.supervisor.process import name_of

TAIL_LINES = 8
READ_BYTES = 64 << 10
MAX_LINE = 1 << 20  # bytes; a longer line is passed on in pieces


class Child:
    """A started process. Owned by the launcher, which watches `output` and `pidfd`. Raises OSError, and leaves nothing
    behind, where the host has no process or descriptor left for it."""

    def __init__(
        self, role: Role, index: int, command: Sequence[str], environ: Mapping[str, str], model: str = ""
    ) -> None:
        """`model`: the one of several that it is for; empty for an api process, and for a server's only model."""
        self.role = role
        self.index = index
        self.model = model
        self.name = name_of(role, index, model)
        self.ready = False
        self.speaking = True
        self.status = "starting"
        self.beat = float("inf")  # monotonic seconds of its last heartbeat; infinity before the first
        self.looked = float("-inf")  # monotonic seconds of the last look at its silence since then
        self.fields: dict[str, str] = {}
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        # A session of its own: Ctrl-C reaches the launcher alone, which then ends its children in order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            raise
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self._partial = b""
        self._ran = 0  # nanoseconds, at the last look

    def read(self) -> list[str]:
        """Lines that it has written since the last call, at most 64 KiB; `speaking` is false once its output has
        ended."""
        try:
            data = os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return []
        self.speaking = bool(data)
        *whole, self._partial = (self._partial + data).split(b"\n")
        if self._partial and (not data or len(self._partial) > MAX_LINE):
            whole.append(self._partial)
            self._partial = b""
        lines = [line.decode(errors="replace") for line in whole]
        self.tail.extend(lines)
        return lines

    def rest(self) -> list[str]:
        """The rest of the output of a process that has ended, without waiting for output of its own children."""
        lines: list[str] = []
        while self.speaking and select.select([self.output], [], [], 0)[0]:
            lines += self.read()
        return lines

    def notice(self, fields: Mapping[str, str], received: float) -> None:
        """Take over the fields of a notice, received at this time."""
        if fields.get("WATCHDOG") == "1":
            self.beat, self.looked = received, float("-inf")
        self.fields.update(fields)
        self.status = self.fields.get("STATUS", self.status)
        self.ready = self.ready or self.fields.get("READY") == "1"

    def runs(self) -> bool:
        """Whether its main thread has run since the last call; False where the kernel does not tell.

        Source: Documentation/scheduler/sched-stats.rst of the kernel, /proc/<pid>/schedstat.
        """
        try:
            with open(f"/proc/{self.pid}/task/{self.pid}/schedstat", encoding="ascii") as file:
                now = int(file.read().split()[0])
        except (OSError, IndexError, ValueError):
            return False
        before, self._ran = self._ran, now
        return now > before

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    def reap(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait(self) -> None:
        """Block until it has ended."""
        self._process.wait()

    @property
    def code(self) -> int:
        """Exit code of a process that was reaped, negative for a signal."""
        assert self._process.returncode is not None
        return self._process.returncode

    def ending(self) -> dict[str, object]:
        """How it ended, as fields of a log line."""
        if self.code < 0:
            return {"signal": signal.Signals(-self.code).name}
        return {"exit_code": self.code}

    def close(self) -> None:
        """Close its descriptors; it must have ended."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self.pidfd)
