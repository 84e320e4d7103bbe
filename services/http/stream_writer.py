"""A streamed response, written straight to its connection, and the wait for its client to disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.services.http.request_context import ClientDisconnect, RequestContext

T = TypeVar("T")

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on at once
)


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
