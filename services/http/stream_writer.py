"""From a reply to the client: as one body or as a stream, watching meanwhile whether the client is still there.

A response begins with the reply's first news, so what a later part refuses still gets its own HTTP status. From then on
a stream flows through its outlet: the batch that brings tokens is written on the spot. Its task wakes up for the end,
for errors, and when the client is slow: it then waits for the connection, while deltas merge in the reply.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol, TypeVar

from starlette.types import Receive, Send

from penstock.protocol.errors import DeadlineExceeded, EngineFailure, RequestError
from penstock.services.client.engine_client import Pipeline
from penstock.services.client.output_collector import Choice, Reply
from penstock.services.http.connection import Outlet
from penstock.services.http.disconnect import ClientLeft, departure
from penstock.services.http.request_context import Exchange
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)
T = TypeVar("T")

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on as they come
)


class Framing(Protocol):
    """An API's events for one streamed response."""

    def take(self, reply: Reply, news: list[Choice]) -> bytes:
        """Events of everything that the choices of `news` have to give, which is thereby taken."""

    def end(self, reply: Reply) -> bytes:
        """The last ones of a response that is complete."""

    def failure(self, reply: Reply, error: RequestError) -> bytes:
        """The last ones of a stream that cannot go on."""


async def whole(reply: Reply) -> None:
    """Wait for the end of the reply. Raises its error, or ClientLeft."""
    await reply.news()
    if reply.left:
        raise ClientLeft
    if (failure := reply.failure) is not None:
        raise failure


class Flow:
    """The tap of a stream that has begun."""

    __slots__ = ("_exchange", "_frames", "_outlet")

    def __init__(self, frames: Framing, outlet: Outlet, exchange: Exchange) -> None:
        self._frames = frames
        self._outlet = outlet
        self._exchange = exchange

    def flow(self, reply: Reply) -> bool:
        """As `services.client.output_collector.Tap.flow`."""
        if not self._outlet.open:
            return False
        try:
            body = self._frames.take(reply, reply.take_news())
            if body:
                self._outlet.write(body)
        except Exception:  # guard: design 7, one request that finds a bug of ours ends alone
            current = self._exchange
            trace = current.context.trace_id
            logs.exception(log, "request_failed", id=current.id.decode(), trace_id=trace, route=current.endpoint)
            reply.fail(EngineFailure("the server failed on this request", code="internal_error"))
        return True


async def stream(reply: Reply, frames: Framing, send: Send, outlet: Outlet | None, exchange: Exchange) -> None:
    """Send the reply as it grows, one write for all that has come since the last one.

    Raises the reply's error if nothing was sent yet, and ClientLeft; later errors are sent as the last frame.
    """
    news = await reply.news()
    if (failure := reply.failure) is not None and not reply.left:
        raise failure
    if not reply.left:
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
    flow = Flow(frames, outlet, exchange) if outlet is not None else None
    while not reply.left:
        ended, error = reply.ended, reply.error
        body = frames.take(reply, news)
        if error is not None:
            body += frames.failure(reply, error)
        elif ended:
            body += frames.end(reply)
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": not ended})
        if ended:
            return
        news = await reply.news(flow)
    raise ClientLeft


@asynccontextmanager
async def attended(reply: Reply, pipeline: Pipeline, receive: Receive, exchange: Exchange) -> AsyncIterator[None]:
    """While inside, a client that leaves aborts its request at once, and so does the exchange's time when it is over;
    on the way out whatever is left is aborted."""
    watch = asyncio.create_task(abort_on_departure(reply, pipeline, receive))
    try:
        with timed(reply, pipeline, exchange):
            yield
    finally:
        watch.cancel()
        pipeline.drop(reply)
        exchange.note(reply)
        reply.told(time.monotonic())


@contextmanager
def timed(reply: Reply, pipeline: Pipeline, exchange: Exchange) -> Iterator[None]:
    """While inside, the exchange's time ends the request when it is over."""
    left = exchange.left(time.monotonic())
    if left == math.inf:
        yield
        return
    timer = asyncio.get_running_loop().call_later(left, expire, reply, pipeline, exchange.late())
    try:
        yield
    finally:
        timer.cancel()


async def abort_on_departure(reply: Reply, pipeline: Pipeline, receive: Receive) -> None:
    await departure(receive)
    pipeline.drop(reply)
    reply.leave()


def expire(reply: Reply, pipeline: Pipeline, error: DeadlineExceeded) -> None:
    """End the request wherever it is, in the queue or running."""
    if not reply.ended:
        pipeline.drop(reply)
        reply.fail(error)


async def answered(question: Coroutine[None, None, T], receive: Receive) -> T:
    """The answer of `question`. Raises what it raises, and ClientLeft when the client goes first."""
    asking = asyncio.ensure_future(question)
    leaving = asyncio.ensure_future(departure(receive))
    try:
        await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise ClientLeft
        return asking.result()
    finally:
        asking.cancel()
        leaving.cancel()
