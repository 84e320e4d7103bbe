"""The log of a process: one line per event on stderr, as logfmt or as JSON.

    2026-11-21T11:02:03.123Z info scheduler-0 executor_ready blocks=4096 device=cpu
    {"time": "2026-11-21T11:02:03.123Z", "level": "info", "process": "scheduler-0", "event": "executor_ready", ...}

A module keeps `log = logging.getLogger(__name__)` and writes `logs.info(log, "executor_ready", blocks=4096)`.
Records of other libraries pass through the same formatter, so a line is always one event. Prompts are never logged,
unless --log-prompts asks for it.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import re
import sys
import warnings
from types import TracebackType
from typing import TextIO

HEAD = ("time", "level", "process", "event")
PLAIN = re.compile(r"[\w./:@+,\-\[\]()*%]+")
QUIET = ("asyncio", "httpx", "httpcore", "huggingface_hub", "urllib3", "uvicorn", "uvicorn.error")


class LineFormatter(logging.Formatter):
    """Turns a record into one line, whatever stands in it: an object where `json_lines`, else logfmt."""

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
    """The values of HEAD bare, then the fields."""
    return " ".join([*head, *(f"{name}={text(value)}" for name, value in fields.items())])


def as_json(head: tuple[str, str, str, str], fields: dict[str, object]) -> str:
    """One object; a field that is called like one of HEAD has an underscore behind its name. ASCII, so one line."""
    named = {f"{name}_" if name in HEAD else name: plain(value) for name, value in fields.items()}
    return json.dumps(dict(zip(HEAD, head, strict=True)) | named)


def plain(value: object) -> object:
    """The value where JSON has it (RFC 8259 has no NaN), else as text."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if finite and isinstance(value, bool | int | float | str | None) else str(value)


def setup(process: str, level: str, style: str = "logfmt", stream: TextIO | None = None) -> None:
    """Send every record of this process at `level` (an option's word: debug, info, warning, error) or above to stderr.

    `style` is logfmt or json, `process` is role-index. Replaces what handlers the root logger had. Python warnings
    become records too, and so does an exception that nobody caught: a crash is one line.
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
    """As sys.excepthook: the exception that ends this process."""
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
    """As `error`, with the exception being handled as field `trace`."""
    write(log, logging.ERROR, event, fields, trace=True)


def write(log: logging.Logger, level: int, event: str, fields: dict[str, object], *, trace: bool = False) -> None:
    """One event: a word, and what is known about it."""
    if log.isEnabledFor(level):
        log.log(level, "%s", event, extra={"fields": fields}, exc_info=trace, stacklevel=3)


def text(value: object) -> str:
    """A value as logfmt: bare when it cannot be misread, otherwise a JSON string, so that a line stays one line."""
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
