"""One HTTP request with its response: made by the middleware, the argument of every endpoint, and then logged."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.protocol import limits
from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    UnsupportedMediaType,
)
from penstock.protocol.messages import Adapter, Client, TraceContext
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)
T = TypeVar("T")

REQUEST_ID_KEY = "penstock.request_id"  # where the scope holds the id: the context itself would make a cycle with it
STREAM_WRITER = "penstock.stream_writer"  # where the scope holds the connection's, if the server has one
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
SECONDS = re.compile(rb"[0-9]{1,6}(\.[0-9]{1,6})?")
SESSION = re.compile(rb"[\x21-\x7e]{1,256}")
DIGEST_BYTES = 12
LOGGED = 64 << 10  # bytes of a body that --log-prompts shows
MEASURED = 8 << 10  # bytes of a body whose nesting is measured in one go: less than half a millisecond
# A string, or the rest of a piece in which one has begun: without that end each quote in it would be tried.
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
QUOTE, ESCAPE, END = b'"', b"\\", b"\0"
STEPS = (-1, 1)  # of a closing and of an opening bracket
OPENING, CLOSING = b"[{", b"]}"
OTHERS = bytes(set(range(256)) - set(OPENING + CLOSING))


class ClientDisconnect(Exception):
    """The client closed its connection before the answer was complete."""


class BodyBudget:
    """Limits of request bodies, and the bytes of all bodies whose requests have not ended."""

    __slots__ = ("options", "total")

    def __init__(self, options: ApiConfig) -> None:
        self.options = options
        self.total = 0


class Outcome(msgspec.Struct):
    """What the log and the metrics say about a response."""

    status: int = 0  # 0 until the response has begun
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reason: str = ""  # code of the error that the response is or ended with
    first_token: float | None = None  # seconds after the start
    route: str = "other"  # the path of the route
    quiet: bool = False  # logged at debug


class RequestContext:
    """`id` is the client's X-Request-Id or one of ours; it names the request in the log."""

    __slots__ = (
        "adapter", "background", "body", "budget", "headers", "id", "method", "outcome", "path", "path_params",
        "receive", "response_headers", "scope", "send", "size", "started", "tenant", "timeout",
        "timeout_source", "trace",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send, budget: BodyBudget) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.headers: dict[bytes, list[bytes]] = {}  # of the request, names in lower case
        for name, value in scope["headers"]:
            self.headers.setdefault(name, []).append(value)
        given = self.headers.get(b"x-request-id", ())
        self.id = next((bytes(value) for value in given if REQUEST_ID.fullmatch(value)), None) or new_id()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.started = time.monotonic()
        self.path_params: Mapping[str, Any] = {}
        self.tenant = ""  # a digest of the key that was accepted; empty where none is required
        self.adapter: Adapter | None = None  # what the request names as its model, where that is one
        self.trace = TraceContext()  # what its engine requests carry on
        self.timeout = math.inf  # seconds from the start in which it must end
        self.timeout_source = ""
        self.response_headers: list[tuple[bytes, bytes]] = []  # beside those of the body
        self.outcome = Outcome()
        self.body: bytes | None = None  # read by an endpoint that hands the request on to another
        self.background = False  # whether the work goes on behind the response; `release` is then the worker's to call
        self.size = 0  # bytes of the body so far, which count as unfinished
        self.budget = budget

    @property
    def query(self) -> str:
        return str(self.scope["query_string"].decode("latin-1"))

    def header(self, name: bytes) -> bytes | None:
        """The header's first value."""
        values = self.headers.get(name)
        return values[0] if values else None

    def set_timeout(self, seconds: float | None, source: str) -> None:
        """End the request at most so many seconds after its start; the shortest of several timeouts holds."""
        if seconds is not None and seconds < self.timeout:
            self.timeout, self.timeout_source = seconds, source

    def header_timeout(self) -> float | None:
        """Seconds of the header X-Request-Timeout, None without it. Raises InvalidRequest."""
        given = self.headers.get(b"x-request-timeout")
        if not given:
            return None
        seconds = float(given[0]) if len(given) == 1 and SECONDS.fullmatch(given[0]) else math.nan
        if not limits.MIN_TIMEOUT <= seconds <= limits.MAX_TIMEOUT:
            bounds = f"from {limits.MIN_TIMEOUT:g} to {limits.MAX_TIMEOUT}"
            message = f"the header X-Request-Timeout must be a number of seconds {bounds}"
            raise InvalidRequest(message, code="invalid_header")
        return seconds

    def time_left(self, now: float) -> float:
        """Seconds until the timeout, infinity without one."""
        return max(0.0, self.started + self.timeout - now)

    def deadline_exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request was not complete after {self.timeout:g} s ({self.timeout_source})")

    def sender(self, user: str | None = None) -> tuple[str, Client]:
        """The session, and the client that the request counts against in the engine's fair queue.

        The session is a digest of the header X-Session-Id, or else of the body's `user`; empty without either. Its
        requests go to one replica where no cached prefix decides (engine_core/placement).

        The client's tenant is the key, on a server that has keys; below it stands the body's `user`, or else the
        session, or else the connection. So a key gains nothing by inventing users. Unchecked keys count for nothing:
        OpenAI's client sends the same one from everywhere.

        Raises InvalidRequest for a header that is no name.
        """
        session = digest(b"user:" + user.encode("utf-8", "surrogatepass")) if user else ""
        host, port = self.scope.get("client") or ("", 0)
        name = session
        if (given := self.headers.get(b"x-session-id")) is not None:
            if len(given) > 1 or not SESSION.fullmatch(given[0]):
                message = "the header X-Session-Id must be given once, as 1 to 256 visible ASCII characters"
                raise InvalidRequest(message, code="invalid_header")
            session = digest(b"header:" + given[0])
        return session, Client(self.tenant, name or session or digest(f"connection:{host}:{port}".encode()))

    async def read_json(self) -> bytes:
        """The whole JSON body, within the limits of the options.

        Raises UnsupportedMediaType for another content type than JSON (none at all passes) and for a compressed body,
        PayloadTooLarge past --max-body-bytes, announced or counted, InvalidRequest past --max-json-depth, and
        ClientDisconnect.
        """
        if (read := self.body) is not None:
            self.body = None
            return read
        options = self.budget.options
        limit, levels = options.max_body_bytes, options.max_json_depth
        self._check_body_headers(limit)
        pieces: list[bytes] = []
        opened = 0
        nesting: Nesting | None = None  # of a body with brackets enough to be too deep
        more = True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = message.get("body", b"")
            more = message.get("more_body", False)
            if self.size + len(piece) > limit:
                raise too_large(limit)
            self.reserve(len(piece))
            pieces.append(piece)
            opened += piece.count(b"[") + piece.count(b"{")  # no JSON is deeper than it has opening brackets
            if opened > levels:
                if nesting is None:
                    nesting, piece = Nesting(), b"".join(pieces)
                for start in range(0, len(piece), MEASURED):
                    nesting.push(piece[start : start + MEASURED])
                    if nesting.deepest > levels:
                        told = f"the body is nested deeper than {levels} levels (--max-json-depth)"
                        raise InvalidRequest(told, code="limit_exceeded")
                    await asyncio.sleep(0)  # streams come first
        body = b"".join(pieces)
        if options.log_prompts:
            shown = body[:LOGGED].decode(errors="replace")
            logs.info(log, "body", id=self.id.decode(), trace_id=self.trace.trace_id, size=len(body), body=shown)
        return body

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Begin the response."""
        self.outcome.status = status
        found = [*headers, *self.response_headers]
        await self.send({"type": "http.response.start", "status": status, "headers": found})

    async def send_json(self, body: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Answer with JSON; nothing was sent before."""
        await self.send_body(body, b"application/json", status, headers)

    async def send_body(
        self, body: bytes, content_type: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Answer with a whole body; nothing was sent before."""
        head = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
        await self.start(status, head)
        await self.send({"type": "http.response.body", "body": body})

    def reserve(self, size: int) -> None:
        """Count bytes of the body, or of what it names. Raises Overloaded past --max-queued-bytes; a body that is alone
        has any size that is allowed."""
        budget = self.budget
        limit = budget.options.max_queued_bytes
        if budget.total > self.size and budget.total + size > limit:
            message = f"the bodies of unfinished requests would be more than {limit} bytes (--max-queued-bytes)"
            raise Overloaded(message)
        budget.total += size
        self.size += size

    def _check_body_headers(self, limit: int) -> None:
        for value in self.headers.get(b"content-type", ()):
            kind = value.split(b";", 1)[0].strip().lower()
            if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
                raise UnsupportedMediaType("the content type must be application/json")
        for value in self.headers.get(b"content-encoding", ()):
            if value.strip().lower() != b"identity":
                raise UnsupportedMediaType("the body must not be compressed", code="unsupported_content_encoding")
        for value in self.headers.get(b"content-length", ()):
            if not value.isdigit():
                raise InvalidRequest("the content length is not a number", code="invalid_content_length")
            if len(value) > 18 or int(value) > limit:
                raise too_large(limit)


def too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {limit} bytes (--max-body-bytes)")


def bug(context: RequestContext) -> EngineFailure:
    """The error of a request that has found a bug of ours, which is being handled and is logged."""
    trace, route = context.trace.trace_id, context.outcome.route
    logs.exception(log, "request_failed", id=context.id.decode(), trace_id=trace, route=route)
    return EngineFailure("the server failed on this request", code="internal_error")


def digest(name: bytes) -> str:
    return blake2b(name, digest_size=DIGEST_BYTES).hexdigest()


def new_trace() -> TraceContext:
    """A context of which nothing is recorded: its trace id joins log lines of all processes."""
    return TraceContext(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00")


def new_id() -> bytes:
    return secrets.token_hex(16).encode()


async def disconnected(context: RequestContext) -> None:
    """Return when the client has disconnected. To be awaited beside the answer, after the body was read."""
    while (await context.receive())["type"] != "http.disconnect":
        pass


async def answered(call: Coroutine[None, None, T], context: RequestContext) -> T:
    """The result of `call`. Raises its errors, and ClientDisconnect when the client goes first."""
    calling = asyncio.ensure_future(call)
    leaving = asyncio.ensure_future(disconnected(context))
    try:
        await asyncio.wait((calling, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            raise ClientDisconnect
        return calling.result()
    finally:
        calling.cancel()
        leaving.cancel()


class Nesting:
    """Counts the levels of one body. What is no JSON may count as anything: it is refused in any case."""

    def __init__(self) -> None:
        self._level = 0
        self._open = b""  # the beginning of a string that has not ended, as far as its end depends on it
        self.deepest = 0

    def push(self, piece: bytes) -> None:
        """The next bytes of the body."""
        text = self._open + piece
        left = STRING.sub(b"", text + END)
        self._open = b""
        if not left.endswith(END):  # a string has taken it
            escaping = (len(text) - len(text.rstrip(ESCAPE))) % 2
            self._open = QUOTE + ESCAPE * escaping
        signs = left.translate(None, OTHERS).translate(bytes.maketrans(OPENING + CLOSING, b"\1\1\0\0"))
        self.deepest = max(self.deepest, max(accumulate(map(STEPS.__getitem__, signs), initial=self._level)))
        self._level += 2 * signs.count(1) - len(signs)
