"""The server's side of one HTTP connection: uvicorn's, with a bound on the head of a request and a short way out.

The parser keeps a header until it is complete, so a head without end would fill the memory before anybody sees it.

The short way out is for streams: what a batch brings for one is written by whoever took the batch off its link. Waking
the request's own task for each token, to call through every layer of the application, costs more than all the rest.
"""

from __future__ import annotations

import asyncio
from typing import cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from protocol.errors import RequestError
from services.api import errors

MAX_HEAD = 64 << 10  # bytes of request line and headers
STATUS = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
OUTLET = "penstock.outlet"  # where the scope holds it


class Outlet:
    """Writes to the body of one response that has begun and goes on."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport

    @property
    def open(self) -> bool:
        """Whether a write would leave at once; not when the client is slow or gone, or the body is not chunked."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.chunked_encoding
        )

    def write(self, body: bytes) -> None:
        """Send a part of the body; the outlet is open and the body not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def outlet_of(scope: Scope) -> Outlet | None:
    """The short way out for the response to this request; None where the server has none."""
    found = scope.get(OUTLET)
    assert found is None or isinstance(found, Outlet)
    return found


class Connection(HttpToolsProtocol):
    """Refuses heads of more than MAX_HEAD bytes (RFC 6585, section 5) and closes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = 0  # bytes of the head so far
        self._in_head = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        # The task that serves the request has been made, and runs after this callback.
        cast(Scope, self.scope)[OUTLET] = Outlet(self.cycle)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse()

    def _refuse(self) -> None:
        refusal = RequestError(f"the head of the request is larger than {MAX_HEAD} bytes", code="head_too_large")
        refusal.type = "invalid_request_error"
        body = errors.encode(refusal)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS + head + body)
        self.transport.close()
