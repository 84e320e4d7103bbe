"""`penstock run-batch`: a file of requests in, a file of responses out, one for every line of the input.

Source: OpenAI API reference, "The request input object" and "The request output object" of batches. Responses are in
the order of completion, as there, and matched by `custom_id`. Each is written at once, so an interrupted run keeps the
responses so far.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from msgspec import Meta

from penstock.protocol.errors import ConfigError, InvalidRequest, LinkError, RequestError
from penstock.services.commands.client import Client, add_server_arguments, server_client
from penstock.services.commands.progress import ProgressBar
from penstock.services.openai.errors import ErrorDetail
from penstock.services.openai.validation import decode
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

STANDARD = "-"
ATTEMPTS = 8  # at a server that is full or not ready
RETRY = 1.0  # seconds, without a Retry-After
BUSY = (429, 503)


class Line(msgspec.Struct, frozen=True):
    """One line of the input."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Annotated[str, Meta(pattern=r"^/v1/[\x21-\x7e]+$(?!\n)", max_length=256)]
    body: dict[str, Any]


class BatchResponse(msgspec.Struct, frozen=True):
    """The server's response, whatever its status."""

    status_code: int
    request_id: str
    body: dict[str, Any]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the output. `error` is for a line that was not sent, or not answered."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: ErrorDetail | None = None

    @property
    def good(self) -> bool:
        return self.response is not None and self.response.status_code == 200


class Name(msgspec.Struct, frozen=True):
    """The legible part of a wrong line."""

    custom_id: str | None = None


LINE = msgspec.json.Decoder(Line)
NAME = msgspec.json.Decoder(Name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object per line: "
                        "custom_id, method, url, body; - is standard input")  # fmt: skip
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="responses; - is standard output")
    parser.add_argument("--concurrency", type=int, default=128, metavar="N", help="requests open at once")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_server_arguments(parser)


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Process every line; 0 when all were served, 1 when the output has errors."""
    if namespace.concurrency < 1:
        raise ConfigError("--concurrency", namespace.concurrency, "it must be at least 1")
    with ExitStack() as stack:
        lines = stack.enter_context(opened(namespace.input_file, "rb", "--input-file")).read().splitlines()
        out = stack.enter_context(opened(namespace.output_file, "wb", "--output-file"))
        client = stack.enter_context(server_client(namespace, effective))
        count = sum(bool(line.strip()) for line in lines)
        progress = stack.enter_context(ProgressBar("run-batch", count, shown=not namespace.quiet))
        bad = 0
        for done, outcome in enumerate(outcomes(client, lines, namespace.concurrency), 1):
            out.write(msgspec.json.encode(outcome) + b"\n")
            out.flush()
            bad += not outcome.good
            progress.show(done, f"{bad} not served")
        progress.conclude(f"{bad} not served")
    return ExitCode.FAILED if bad else ExitCode.ORDERLY


def opened(name: str, mode: Literal["rb", "wb"], option: str) -> BinaryIO:
    """A file, or a standard stream. Raises ConfigError."""
    if name == STANDARD:
        return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
    try:
        return Path(name).open(mode)
    except OSError as error:
        raise ConfigError(option, name, f"it cannot be opened: {error.strerror}") from error


def outcomes(client: Client, lines: Iterable[bytes], concurrency: int) -> Iterator[Outcome]:
    """One outcome per line that is not blank, in order of completion; at most `concurrency` requests are open."""
    seen: set[str] = set()
    cancelled = threading.Event()
    with ThreadPoolExecutor(concurrency, "run-batch") as threads:
        open_ones: set[Future[Outcome]] = set()
        try:
            for number, raw in enumerate(lines, 1):
                if not raw.strip():
                    continue
                try:
                    line = checked(raw, number, seen)
                except RequestError as error:
                    yield refused(raw, error)
                    continue
                open_ones.add(threads.submit(answered, client, line, cancelled))
                if len(open_ones) >= concurrency:
                    done, open_ones = wait(open_ones, return_when=FIRST_COMPLETED)
                    yield from (each.result() for each in done)
            while open_ones:
                done, open_ones = wait(open_ones, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in done)
        finally:
            cancelled.set()
            threads.shutdown(wait=True, cancel_futures=True)


def checked(raw: bytes, number: int, seen: set[str]) -> Line:
    """The line. Raises InvalidRequest naming its number and the mistake, such as a custom_id that was used before."""
    try:
        line = decode(raw, LINE)
    except InvalidRequest as error:
        raise InvalidRequest(f"line {number}: {error.message}", param=error.param, code=error.code) from error
    if line.custom_id in seen:
        message = f"line {number}: an earlier line has the custom_id {line.custom_id!r} too"
        raise InvalidRequest(message, param="custom_id", code="duplicate_custom_id")
    if line.body.get("stream"):
        message = f"line {number}: body.stream: a batch has no streams"
        raise InvalidRequest(message, param="body.stream")
    seen.add(line.custom_id)
    return line


def refused(raw: bytes, error: RequestError) -> Outcome:
    """The outcome of a line that was not sent."""
    try:
        name = NAME.decode(raw).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        name = None
    detail = ErrorDetail(error.message, error.type, error.param, error.code)
    return Outcome(id=new_id(), custom_id=name, error=detail)


def new_id() -> str:
    return "batch_req_" + secrets.token_hex(12)


def answered(client: Client, line: Line, cancelled: threading.Event) -> Outcome:
    """The server's response to a line. A busy server is asked again; one that is gone is an error."""
    body = msgspec.json.encode(line.body)
    try:
        for attempt in range(ATTEMPTS):
            response = client.ask(line.url, body)
            if response.status not in BUSY or attempt == ATTEMPTS - 1:
                break
            if cancelled.wait(response.retry_after or RETRY):
                break
    except LinkError as error:
        detail = ErrorDetail(str(error), "server_error", None, "unreachable")
        return Outcome(id=new_id(), custom_id=line.custom_id, error=detail)
    found = BatchResponse(response.status, response.request_id, response.body)
    return Outcome(id=new_id(), custom_id=line.custom_id, response=found)
