"""The server's side of one HTTP connection: uvicorn's, with limits on size and time, and a direct writer for streams.

uvicorn's parser keeps a header until it is complete. An endless head would fill the memory, and a client that sends a
byte now and then would hold its connection, and the request read so far, for ever.

Streams are written by the delivery of each batch. Waking the request's own task for each token, and calling through
every layer of the application, costs more than all the rest.

The server speaks HTTP/1 alone. A client may offer another protocol in any request, and a server that declines answers
as if there were no offer (RFC 9110, section 7.8); Java's own client offers h2c by default. httptools takes the bytes
after such a head for the other protocol: the body would be lost, and every request after it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import (
    HeadTooLarge,
    InvalidRequest,
    RequestError,
    RequestTimeout,
    UnknownCoding,
    UnknownVersion,
)
from penstock.services.http.request_context import REQUEST_ID_KEY, STREAM_WRITER, new_id, new_trace
from penstock.services.http.server import ConnectionLimiter
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

UVICORN = "penstock.uvicorn"  # its logger here: errors pass, and what it warns of stands in lines of ours
READ_ON = 8  # unanswered requests up to which a connection is read on: its end is found in no other way
LINGER = 2.0  # seconds that a refused client has to read why
LATE = "penstock.late"  # in the scope of a request whose body took too long
OFFER = b"upgrade"
VERSIONS = "this server speaks HTTP/1.1 and HTTP/1.0"
WRONG_VERSION = ("Invalid HTTP version", "Pause on PRI/Upgrade")  # llhttp's words; the second are of HTTP/2's preface
CHUNKED = b"chunked"
Headers = list[tuple[bytes, bytes]]


class StreamWriter:
    """Writes to the body of one response that has begun and goes on."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport

    @property
    def open(self) -> bool:
        """Whether a write would leave at once; not when the client is slow or gone, or the body is not chunked."""
        cycle = self._cycle
        shut = cycle.disconnected or cycle.response_complete or self._transport.is_closing()
        return not (shut or cycle.flow.write_paused) and bool(cycle.chunked_encoding)

    def write(self, body: bytes) -> None:
        """Send a part of the body; `open` is true and the body not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def forget(cycle: RequestResponseCycle) -> None:
    """Let go of a request that was answered, or that nobody waits for: its scope and its writer hold each other, and
    so what is unread of its body."""
    cycle.body = bytearray()
    cast(Scope, cycle.scope).pop(STREAM_WRITER, None)


class ConnectionLimits(msgspec.Struct, frozen=True):
    """What one client may take of the server before anybody has looked at its request."""

    head_bytes: int = 64 << 10  # request line and headers, trailers included
    head_seconds: float = 10.0  # from their first byte to their last
    body_seconds: float = 60.0  # for the body; it is read as fast as it comes

    @classmethod
    def of(cls, options: ApiConfig) -> ConnectionLimits:
        return cls(options.max_header_bytes, options.header_timeout, options.body_timeout)


class RequestParser:
    """As httptools.HttpRequestParser. A head with an offer is parsed a second time, without it: where it ends for the
    first time, and its message with it, `offered` is true, and the receiver passes over what it is told."""

    def __init__(self, receiver: Connection) -> None:
        self._receiver = receiver
        self._parser = self._fresh()
        self._version_refused = False

    @property
    def refusal(self) -> RequestError | None:
        """Why the head at hand is refused, where there is more to say than that it is no HTTP/1.1."""
        return UnknownVersion(VERSIONS) if self._version_refused else None

    @property
    def offered(self) -> bool:
        """Whether the head at hand offers another protocol."""
        return bool(self._parser.should_upgrade())

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError for what is no HTTP, and for CONNECT, which has no other meaning."""
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                head = self._head()
            except httptools.HttpParserError as error:
                self._version_refused = str(error) in WRONG_VERSION
                raise
            self._parser = self._fresh()
            try:
                self._parser.feed_data(head)
            except httptools.HttpParserUpgrade:
                raise httptools.HttpParserError("a tunnel is asked for") from None

    def close(self) -> None:
        """Nothing more is parsed. The receiver, which has this parser, is held no longer."""
        del self._parser, self._receiver

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """No request is one for another protocol."""
        return False

    def _head(self) -> bytes:
        """The head that was parsed, without the offer."""
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._receiver.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self._receiver.headers if name.lower() != OFFER]
        return b"\r\n".join([*lines, b"", b""])

    def _fresh(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._receiver)
        # As uvicorn has it: a request that stands behind one with `Connection: close` is no reason to refuse that one.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser


class Phase(enum.Enum):
    """Which part of a request a connection is receiving."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"


class Connection(HttpToolsProtocol):
    """Refuses what is no HTTP and heads that are too large, and cuts off who sends too slowly.

    A timer runs only while a request has come in part: one that comes whole, as most do, costs none. A connection that
    waits for its next request, or for its first, has uvicorn's timer of idle ones.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        encode_error: Callable[[RequestError], bytes],
        limits: ConnectionLimits | None = None,
        limiter: ConnectionLimiter | None = None,
        application: ASGIApp | None = None,
        refusal: RequestError | None = None,
    ) -> None:
        """application: what the listener of this connection serves; None: the configuration's. refusal: the answer to
        whatever is asked."""
        super().__init__(config, server_state, app_state, _loop)
        if application is not None:
            self.app = application
        self._encode_error = encode_error  # the body of a refusal, as the API has it
        self._requests = RequestParser(self)
        self.parser = cast(httptools.HttpRequestParser, self._requests)
        self.logger = logging.getLogger(UVICORN)
        self.logger.setLevel(logging.ERROR)
        self._limits = limits or ConnectionLimits()
        self._limiter = limiter
        self._phase = Phase.IDLE
        self._head = 0  # bytes of the head that the parser has given us
        self._fruitless = 0  # bytes that went into the parser and have not come out
        self._timed = Phase.IDLE  # the phase that the timer is for
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._refusal = refusal  # what was found wrong with the head
        self._cycles: deque[RequestResponseCycle] = deque()  # the one that is served, and those that came behind it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is None:  # a unix socket has no addresses, and connections are told apart by them
            self.client = ("unix", id(self))
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells the last one, and it is the first that waits for an answer
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
            forget(cycle)
        self._unset_keepalive_if_required()
        if self._timer is not None:
            self._timer.cancel()
        self._requests.close()
        if self._limiter is not None:
            self._limiter.release()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # read past, so that the client can read what it was told (RFC 9112, section 9.6)
        self._fruitless += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._refused:
            return
        if self._fruitless > self._limits.head_bytes:
            self.send_400_response("")
        elif self._phase is not self._timed:
            self._set_timer()
        elif self._phase is Phase.IDLE and self._free:
            self._rest()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        self._phase = Phase.HEAD

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._phase is Phase.HEAD:  # a trailer is no header: it is dropped (RFC 9110, section 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._requests.offered:
            return  # the same head comes once more, without the offer
        if self._refusal is not None:
            raise self._refusal
        try:
            check_head(self._requests.get_http_version(), self.headers)
        except RequestError as error:
            self._refusal = error.with_traceback(None)
            raise
        name_host(self.url, self.headers)
        super().on_headers_complete()  # raises for a target that is none, with the phase still that of a head
        self._phase = Phase.BODY
        self._fruitless = 0
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        self._cycles.append(self.cycle)
        if 1 < len(self._cycles) <= READ_ON:
            self.flow.resume_reading()
        # The task that serves the request has been made, and runs after this callback.
        cast(Scope, self.scope)[STREAM_WRITER] = StreamWriter(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._fruitless = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._requests.offered:
            return
        self._phase = Phase.IDLE
        self._fruitless = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        forget(self._cycles[0])
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser refused, or we inside its callbacks. `msg` is uvicorn's, in plain text; ours is an object."""
        limit = self._limits.head_bytes
        if max(self._head, self._fruitless) > limit:
            message = f"the head of the request is larger than {limit} bytes (--max-header-bytes)"
            self._refuse(HeadTooLarge(message))
            return
        refusal = self._refusal or self._requests.refusal
        self._refuse(refusal or InvalidRequest("the request is not valid HTTP/1.1", code="invalid_http"))

    def timeout_keep_alive_handler(self) -> None:
        """The connection was idle for too long; one that has not even read its last answer is not waited for."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    @property
    def _free(self) -> bool:
        """Whether no request is being served."""
        return self.cycle is None or self.cycle.response_complete

    def _rest(self) -> None:
        """Start the timer of idle connections anew."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _count(self, size: int) -> None:
        """Bytes of the head. Raises ValueError, which the parser turns into its own error and a call for refusal."""
        self._fruitless -= size
        self._head += size
        if self._head > self._limits.head_bytes:
            raise ValueError("the head is too large")

    def _set_timer(self) -> None:
        """Time the phase that has begun."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = self._phase
        if self._phase is not Phase.IDLE:
            seconds = self._limits.head_seconds if self._phase is Phase.HEAD else self._limits.body_seconds
            self._timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        """The time for this part of the request is over, unless it was us who did not read."""
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self._set_timer()
            return
        in_head = self._timed is Phase.HEAD
        if not in_head:
            cast(Scope, self.scope)[LATE] = True
        limit, option = (self._limits.head_seconds, "--header-timeout") if in_head else (
            self._limits.body_seconds, "--body-timeout"
        )  # fmt: skip
        what = "head" if in_head else "body"
        self._refuse(RequestTimeout(f"the {what} of the request took longer than {limit:g} s ({option})"))

    def _request_id(self, refusal: RequestError) -> bytes:
        """What the log calls the request that came in part. One that the application has not seen gets its name and
        its line in the log here."""
        scope = cast(Scope | None, self.scope)
        if self._phase is Phase.BODY and scope is not None and REQUEST_ID_KEY in scope:
            return bytes(scope[REQUEST_ID_KEY])
        name = new_id()
        trace = new_trace().trace_id
        logs.info(log, "request", id=name.decode(), trace_id=trace, status=refusal.status, reason=refusal.code)
        return name

    @property
    def _answerable(self) -> bool:
        """Whether an answer now would be taken for that of the request which is being received."""
        if self._phase is Phase.BODY:
            return not self.cycle.response_started and not self.pipeline
        return self._free

    def _refuse(self, refusal: RequestError) -> None:
        """Answer past the application, where that can be understood, and close; behind a request that is being served
        its own answer comes first, and nothing more is read."""
        name = self._request_id(refusal)
        if not self._answerable:
            if self._phase is Phase.BODY:
                self.transport.close()
                return
            self._refused = True
            self.cycle.keep_alive = False
            if self._timer is not None:
                self._timer.cancel()
            return
        body = self._encode_error(refusal)
        status = HTTPStatus(refusal.status)
        line = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(line + head + b"x-request-id: " + name + b"\r\n\r\n" + body)
        self._refused = True
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # whoever waits for the rest of the body need not
            self.cycle.message_event.set()
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(LINGER, self.transport.close)


def check_head(version: str, headers: Headers) -> None:
    """Raise RequestError for a head that llhttp takes and that is not to be served. Names are in lower case.

    What makes two readers disagree on where a request ends (both lengths, several of them, folded lines, bare line
    feeds) is refused by llhttp already.
    """
    if version not in ("1.0", "1.1"):
        raise UnknownVersion(VERSIONS)
    given = b",".join(value for name, value in headers if name == b"transfer-encoding").lower()
    codings = [coding.strip() for coding in given.split(b",") if given]
    if codings and version == "1.0":
        raise InvalidRequest("HTTP/1.0 has no transfer codings", code="invalid_http")
    if codings and codings != [CHUNKED]:
        message = "the only transfer coding of a request that is served is chunked"
        raise UnknownCoding(message)
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (not hosts and version == "1.1"):
        raise InvalidRequest("the header Host must be there once", code="invalid_host")


def name_host(url: bytes, headers: Headers) -> None:
    """Put the host of a target in absolute form into `headers`: the header Host is then ignored (RFC 9112, section
    3.2.2). Raises httptools.HttpParserInvalidURLError."""
    if url[:1] in (b"/", b"*"):
        return
    target = httptools.parse_url(url)
    if target.host is None:
        return
    host = b"[%b]" % target.host if b":" in target.host else target.host
    if target.port is not None:
        host += b":%d" % target.port
    headers[:] = [(name, value) for name, value in headers if name != b"host"] + [(b"host", host)]
