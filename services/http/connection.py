"""The server's side of one HTTP connection: uvicorn's, with bounds on size and time, and a short way out.

The parser keeps a header until it is complete, so a head without end would fill the memory before anybody sees it, and
a client that sends a byte now and then would keep its connection, and what was read of its request, for ever.

The short way out is for streams: what a batch brings for one is written by whoever took the batch off its link. Waking
the request's own task for each token, to call through every layer of the application, costs more than all the rest.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from http import HTTPStatus
from typing import Any, cast

import httptools
import msgspec
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import HeadTooLarge, InvalidRequest, RequestError, RequestTimeout
from penstock.services.http.accept import Room
from penstock.services.http.parser import RequestParser, check_head, name_host
from penstock.services.http.request_context import BODY_WRITER, KEY, new_id
from penstock.services.openai import errors
from penstock.services.supervisor import logs
from penstock.services.tracing.propagation import unsampled

log = logging.getLogger(__name__)

UVICORN = "penstock.uvicorn"  # its logger here: errors pass, and what it warns of stands in lines of ours
READ_ON = 8  # unanswered requests up to which a connection is read on: its end is found in no other way
LINGER = 2.0  # seconds that a refused client has to read why
LATE = "penstock.late"  # in the scope of a request whose body took too long


class BodyWriter:
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
    cast(Scope, cycle.scope).pop(BODY_WRITER, None)


class ConnectionLimits(msgspec.Struct, frozen=True):
    """What one client may take of the server before anybody has looked at its request."""

    head_bytes: int = 64 << 10  # request line and headers, trailers included
    head_seconds: float = 10.0  # from their first byte to their last
    body_seconds: float = 60.0  # for the body; it is read as fast as it comes

    @classmethod
    def of(cls, options: ApiConfig) -> ConnectionLimits:
        return cls(options.max_header_bytes, options.header_timeout, options.body_timeout)


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
        limits: ConnectionLimits | None = None,
        room: Room | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._requests = RequestParser(self)
        self.parser = cast(httptools.HttpRequestParser, self._requests)
        self.logger = logging.getLogger(UVICORN)
        self.logger.setLevel(logging.ERROR)
        self._limits = limits or ConnectionLimits()
        self._room = room
        self._phase = Phase.IDLE
        self._head = 0  # bytes of the head that the parser has given us
        self._fruitless = 0  # bytes that went into the parser and have not come out
        self._timed = Phase.IDLE  # the phase that the timer is for
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._refusal: RequestError | None = None  # what was found wrong with the head
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
        if self._room is not None:
            self._room.left()

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
        cast(Scope, self.scope)[BODY_WRITER] = BodyWriter(self.cycle)

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
            self._refuse(HeadTooLarge(message, code="head_too_large"))
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
        if self._phase is Phase.BODY and scope is not None and KEY in scope:
            return bytes(scope[KEY].id)
        name = new_id()
        trace = unsampled().trace_id
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
        body = errors.encode(refusal)
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
