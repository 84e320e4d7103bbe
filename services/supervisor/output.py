"""Writing to a terminal, a pipe or a file that may stop taking text, without ever waiting for it.

A terminal stopped with Ctrl-S, a pager that nobody scrolls or a full disk blocks or fails a plain `print`. The launcher
writes the logs of all processes, so it must not block: a blocked launcher leaves their pipes full, and they block, too.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import threading
from collections import deque
from collections.abc import Iterator

import msgspec

MOST_BYTES = 4 << 20  # of text that waits; what comes beyond it is dropped and counted
CLOSE_SECONDS = 2.0  # that the end of a process gives its last lines


class OutputStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what waits now."""

    written_bytes: int
    dropped: int  # writes
    waiting_bytes: int


class OutputStream(io.TextIOBase):
    """A text stream over a descriptor, whose writes return at once. A thread of its own passes the text on in order.

    Text beyond `MOST_BYTES` is dropped, a whole write at a time; the number of dropped writes is told as soon as the
    descriptor takes text again. A descriptor that fails (its reader is gone, the disk is full) costs text, no more.
    The descriptor stays the caller's and blocking: it may be shared with other processes.
    """

    def __init__(self, descriptor: int, limit: int = MOST_BYTES) -> None:
        self._descriptor = descriptor
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # that wait or are being written
        self._written = 0
        self._dropped = 0
        self._told = 0  # of those dropped, how many the reader was told of
        self._over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._pass_on, name="output", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Take text to be written; never blocks and never raises for what the descriptor does."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._over or self._bytes + len(data) > self._limit:
                self._dropped += 1
            elif data:
                self._waiting.append(data)
                self._bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread writes as soon as the descriptor takes it."""

    def settle(self, seconds: float) -> bool:
        """Wait until everything is written; whether it was, within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, seconds)

    def finish(self, seconds: float = CLOSE_SECONDS) -> None:
        """Give the last lines so much time; what comes later is dropped. The thread may stay blocked for good: it is a
        daemon and holds no lock that the interpreter's end waits for."""
        self.settle(seconds)
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def statistics(self) -> OutputStatistics:
        with self._changed:
            return OutputStatistics(self._written, self._dropped, self._bytes)

    def _pass_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over)
                if not self._waiting:
                    return
                data = self._waiting.popleft()
            written = write_all(self._descriptor, data)
            with self._changed:
                self._bytes -= len(data)
                self._written += written
                if written < len(data):
                    self._dropped += 1
                elif self._dropped > self._told and not self._over:
                    notice = f"{self._dropped - self._told} lines of output were dropped: nobody took them\n".encode()
                    self._told = self._dropped
                    self._waiting.appendleft(notice)
                    self._bytes += len(notice)
                self._changed.notify_all()


def write_all(descriptor: int, data: bytes) -> int:
    """Write it all, however long that takes; the bytes that were written before the descriptor failed."""
    written = 0
    while written < len(data):
        try:
            written += os.write(descriptor, data[written:])
        except BlockingIOError:  # somebody else made it non-blocking
            select.select([], [descriptor], [])
        except OSError:
            break
    return written


@contextlib.contextmanager
def unblocked() -> Iterator[None]:
    """Have all that this process prints and logs inside pass through streams whose writes never block."""
    errors, output = OutputStream(2), OutputStream(1)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
            yield
    finally:
        errors.finish()
        output.finish()
