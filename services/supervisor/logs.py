"""The log of a process: one line per event on stderr, as logfmt or as JSON.

    2026-11-21T11:02:03.123Z info scheduler-0 executor_ready blocks=4096 device=cpu
    {"time": "2026-11-21T11:02:03.123Z", "level": "info", "process": "scheduler-0", "event": "executor_ready", ...}

A module has `log = logging.getLogger(__name__)` and writes `logs.info(log, "executor_ready", blocks=4096)`. Records of
other libraries pass through the same formatter, so a line is always one event. Prompts are logged only with
--log-prompts.

The launcher writes the log lines of all processes, so it writes through streams that never block: a terminal stopped
with Ctrl-S or a pager that nobody scrolls must not stop a server.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import math
import os
import re
import select
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

MAX_WAITING = 4 << 20  # bytes of text that wait for a stream's descriptor; further writes are dropped and counted
CLOSE_SECONDS = 2.0  # for the last lines when a process ends
HEAD = ("time", "level", "process", "event")
PLAIN = re.compile(r"[\w./:@+,\-\[\]()*%]+")
QUIET = ("asyncio", "httpx", "httpcore", "huggingface_hub", "urllib3", "uvicorn", "uvicorn.error")


class LineFormatter(logging.Formatter):
    """Formats any record as one line: a JSON object with `json_lines`, else logfmt."""

    def __init__(self, process: str, *, json_lines: bool = False) -> None:
        super().__init__()
        self._process = process
        self._write = as_json if json_lines else as_logfmt

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        fields = dict(getattr(record, "fields", {}))
        event = record.getMessage()
        if "fields" not in record.__dict__:
            fields = {"message": event, "logger": record.name}
            event = "log"
        if record.exc_info and record.exc_info[0] is not None:
            fields["trace"] = self.formatException(record.exc_info)
        return self._write((stamp.replace("+00:00", "Z"), record.levelname.lower(), self._process, event), fields)


def as_logfmt(head: tuple[str, str, str, str], fields: dict[str, object]) -> str:
    """The bare values of HEAD, then the fields."""
    return " ".join([*head, *(f"{name}={text(value)}" for name, value in fields.items())])


def as_json(head: tuple[str, str, str, str], fields: dict[str, object]) -> str:
    """One object in ASCII, so on one line. A field with a name of HEAD gets an underscore appended."""
    named = {f"{name}_" if name in HEAD else name: plain(value) for name, value in fields.items()}
    return json.dumps(dict(zip(HEAD, head, strict=True)) | named)


def plain(value: object) -> object:
    """The value if JSON can hold it (RFC 8259 has no NaN), else its text."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if finite and isinstance(value, bool | int | float | str | None) else str(value)


def setup(process: str, level: str, style: str = "logfmt", stream: TextIO | None = None) -> None:
    """Log every record at `level` (debug, info, warning, error) or above to stderr.

    `style` is logfmt or json, `process` is role-index. Replaces the root logger's handlers. Python warnings and
    uncaught exceptions become records too: a crash is one line.
    """
    output = logging.StreamHandler(stream if stream is not None else sys.stderr)
    output.setFormatter(LineFormatter(process, json_lines=style == "json"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(output)
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    warnings.formatwarning = one_line_warning
    sys.excepthook = uncaught


def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: logs the exception that ends this process."""
    fields = {"error": kind.__name__}
    logging.getLogger("penstock").critical("%s", "crashed", extra={"fields": fields}, exc_info=(kind, error, trace))


def debug(log: logging.Logger, event: str, /, **fields: object) -> None:
    write(log, logging.DEBUG, event, fields)


def info(log: logging.Logger, event: str, /, **fields: object) -> None:
    write(log, logging.INFO, event, fields)


def warning(log: logging.Logger, event: str, /, **fields: object) -> None:
    write(log, logging.WARNING, event, fields)


def error(log: logging.Logger, event: str, /, **fields: object) -> None:
    write(log, logging.ERROR, event, fields)


def exception(log: logging.Logger, event: str, /, **fields: object) -> None:
    """`error`, with the current exception as field `trace`."""
    write(log, logging.ERROR, event, fields, trace=True)


def write(log: logging.Logger, level: int, event: str, fields: dict[str, object], *, trace: bool = False) -> None:
    """Log one event: its name and its fields."""
    if log.isEnabledFor(level):
        log.log(level, "%s", event, extra={"fields": fields}, exc_info=trace, stacklevel=3)


def text(value: object) -> str:
    """A value in logfmt: bare if that is unambiguous, else a JSON string, which is always on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    plain = str(value)
    if PLAIN.fullmatch(plain):
        return plain
    return json.dumps(plain, ensure_ascii=not plain.isprintable())


def one_line_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    del line
    return f"{category.__name__}: {message} ({filename.rsplit('/', 1)[-1]}:{lineno})"


class NonBlockingStream(io.TextIOBase):
    """A text stream whose writes return at once; a thread passes the text on to a descriptor in order.

    With more than `limit` bytes waiting, whole writes are dropped; a line with their number follows as soon as the
    descriptor takes text again. A descriptor that fails (its reader is gone, the disk is full) only loses text. It
    stays blocking and belongs to the caller: other processes may share it.
    """

    def __init__(self, descriptor: int, limit: int = MAX_WAITING) -> None:
        self._descriptor = descriptor
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self.waiting_bytes = 0  # and those being written
        self.dropped = 0  # writes
        self._reported = 0  # dropped writes that a notice has counted
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_waiting, name="output", daemon=True)
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
        """Never blocks and never raises for an error of the descriptor."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._closed or self.waiting_bytes + len(data) > self._limit:
                self.dropped += 1
            elif data:
                self._waiting.append(data)
                self.waiting_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing to do: the thread writes as soon as the descriptor takes text."""

    def settle(self, seconds: float) -> bool:
        """Wait until everything is written; False if that takes longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.waiting_bytes, seconds)

    def finish(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait for the last lines, then drop all later text. The thread may stay blocked for good: it is a daemon and
        holds no lock that the interpreter's shutdown waits for."""
        self.settle(seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _write_waiting(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                data = self._waiting.popleft()
            whole = write_all(self._descriptor, data)
            with self._changed:
                self.waiting_bytes -= len(data)
                if not whole:
                    self.dropped += 1
                elif self.dropped > self._reported and not self._closed:
                    count, self._reported = self.dropped - self._reported, self.dropped
                    notice = f"{count} lines of output were dropped: nobody took them\n".encode()
                    self._waiting.appendleft(notice)
                    self.waiting_bytes += len(notice)
                self._changed.notify_all()


def write_all(descriptor: int, data: bytes) -> bool:
    """Write everything, however long that takes. False if the descriptor failed before the end."""
    written = 0
    while written < len(data):
        try:
            written += os.write(descriptor, data[written:])
        except BlockingIOError:  # another process made it non-blocking
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True


@contextlib.contextmanager
def nonblocking_output() -> Iterator[None]:
    """Inside the context, stdout and stderr of this process never block."""
    errors, output = NonBlockingStream(2), NonBlockingStream(1)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
            yield
    finally:
        errors.finish()
        output.finish()
