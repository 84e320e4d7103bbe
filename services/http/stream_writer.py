"""Responses from a reply, as one body or as a stream, aborted as soon as the client disconnects.

A response begins with the reply's first output, so a refusal by a later process still has its own HTTP status. From
then on the delivery of each batch writes the stream, past the request's own task. That task wakes for the end, for an
error, and when the client is slow: it then waits for the connection while deltas merge in the reply.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol, TypeVar

from penstock.protocol.errors import EngineFailure, RequestError
from penstock.services.client.engine_client import EngineClient
from penstock.services.client.output_collector import Choice, OutputCollector
from penstock.services.http.connection import BodyWriter
from penstock.services.http.request_context import BODY_WRITER, ClientDisconnect, RequestContext
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)
T = TypeVar("T")

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on at once
)


class Framing(Protocol):
    """An API's events for one streamed response."""

    def take(self, collector: OutputCollector, updated: list[Choice]) -> bytes:
        """Events of everything that the choices of `updated` have to give, which is thereby taken."""

    def end(self, collector: OutputCollector) -> bytes:
        """The last events of a complete response."""

    def failure(self, collector: OutputCollector, error: RequestError) -> bytes:
        """The last events of a stream that cannot go on."""


class StreamWriter:
    """Writes a stream that has begun straight to its connection."""

    __slots__ = ("_context", "_frames", "_writer")

    def __init__(self, frames: Framing, writer: BodyWriter, context: RequestContext) -> None:
        self._frames = frames
        self._writer = writer
        self._context = context

    def write(self, collector: OutputCollector) -> bool:
        """As `services.client.output_collector.StreamWriter.write`."""
        if not self._writer.open:
            return False
        try:
            body = self._frames.take(collector, collector.get_nowait())
            if body:
                self._writer.write(body)
        except Exception:  # guard: design 7, one request that finds a bug of ours ends alone
            context = self._context
            trace = context.trace.trace_id
            logs.exception(log, "request_failed", id=context.id.decode(), trace_id=trace, route=context.route)
            collector.fail(EngineFailure("the server failed on this request", code="internal_error"))
        return True


async def whole(collector: OutputCollector) -> None:
    """Wait for the end of the reply. Raises its error, or ClientDisconnect."""
    await collector.get()
    if collector.disconnected:
        raise ClientDisconnect
    if (failure := collector.failure) is not None:
        raise failure


async def stream(collector: OutputCollector, frames: Framing, context: RequestContext) -> None:
    """Send the reply as it grows; everything new goes out in one write.

    Raises ClientDisconnect, and the reply's error if nothing was sent yet; a later error is sent as the last frame.
    """
    updated = await collector.get()
    if (failure := collector.failure) is not None and not collector.disconnected:
        raise failure
    send = context.send
    writer: BodyWriter | None = context.scope.get(BODY_WRITER)
    if not collector.disconnected:
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
    flow = StreamWriter(frames, writer, context) if writer is not None else None
    while not collector.disconnected:
        ended, error = collector.ended, collector.error
        body = frames.take(collector, updated)
        if error is not None:
            body += frames.failure(collector, error)
        elif ended:
            body += frames.end(collector)
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": not ended})
        if ended:
            return
        updated = await collector.get(flow)
    raise ClientDisconnect


@asynccontextmanager
async def attended(
    collector: OutputCollector, engine_client: EngineClient, context: RequestContext
) -> AsyncIterator[None]:
    """While inside, the client's disconnect or the request's timeout aborts the reply at once; on the way out whatever
    is left is aborted."""
    watch = asyncio.create_task(abort_on_disconnect(collector, engine_client, context))
    try:
        with timed(collector, engine_client, context):
            yield
    finally:
        watch.cancel()
        engine_client.abort(collector)
        context.note(collector)
        collector.end_trace(time.monotonic())


@contextmanager
def timed(collector: OutputCollector, engine_client: EngineClient, context: RequestContext) -> Iterator[None]:
    """While inside, the request's timeout ends the reply, queued or running."""
    left = context.time_left(time.monotonic())
    if left == math.inf:
        yield
        return

    def expire() -> None:
        if not collector.ended:
            engine_client.abort(collector)
            collector.fail(context.deadline_exceeded())

    timer = asyncio.get_running_loop().call_later(left, expire)
    try:
        yield
    finally:
        timer.cancel()


async def disconnected(context: RequestContext) -> None:
    """Return when the client has disconnected. To be awaited beside the answer, after the body was read."""
    while (await context.receive())["type"] != "http.disconnect":
        pass


async def abort_on_disconnect(collector: OutputCollector, engine_client: EngineClient, context: RequestContext) -> None:
    await disconnected(context)
    engine_client.abort(collector)
    collector.disconnect()


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
