"""The server's side of one HTTP connection: uvicorn's, with a bound on the head of a request.

The parser keeps a header until it is complete, so a head without end would fill the memory before anybody sees it.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from protocol.errors import RequestError
from services.api import errors

MAX_HEAD = 64 << 10  # bytes of request line and headers
STATUS = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"


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
