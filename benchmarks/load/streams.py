"""Streams of which every token is kept, so that a disturbed run can be held against an undisturbed one.

Nothing is retried here and nothing buffered: what a server loses or says twice is seen, and so is each pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from penstock.services.bench.client import Target
from penstock.services.bench.response import Malformed, Response


class Choice(msgspec.Struct, frozen=True, gc=False):
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """What matters of a completion chunk."""

    choices: tuple[Choice, ...] = ()
    error: msgspec.Raw = msgspec.Raw()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the client of one stream got. Seconds."""

    tokens: tuple[int, ...] = ()
    ends: tuple[str, ...] = ()  # one, of a stream that went well
    error: str = ""  # an event that says so, a status, or how the connection broke
    pause: float = 0.0  # the longest time between two events

    def same(self, other: Answer) -> bool:
        """Whether both clients were told the same, and nothing went wrong."""
        return not (self.error or other.error) and (self.tokens, self.ends) == (other.tokens, other.ends)

    def as_long(self, other: Answer) -> bool:
        """Whether both got as many tokens, whatever they are, and nothing went wrong."""
        return not (self.error or other.error) and (len(self.tokens), self.ends) == (len(other.tokens), other.ends)


class Progress:
    """Tokens that all streams together have got, and how many streams are open. One may wait for a number of tokens."""

    def __init__(self, streams: int) -> None:
        self.tokens = 0
        self.open = streams
        self._mark = 0
        self._over = asyncio.get_running_loop().create_future()

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self._look()

    def ended(self) -> None:
        self.open -= 1
        self._look()

    async def reach(self, mark: int) -> bool:
        """Whether so many came before the last stream ended."""
        self._mark = mark
        self._look()
        await self._over
        return self.tokens >= mark

    def _look(self) -> None:
        if self._mark and (self.tokens >= self._mark or not self.open) and not self._over.done():
            self._over.set_result(None)


class Stream(asyncio.Protocol):
    """One request on a connection of its own. `answer` is what came so far; `over` is done with the end of it."""

    def __init__(self, request: bytes, progress: Progress) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._progress = request, progress
        self._response, self._decoder = Response(), msgspec.json.Decoder(Chunk)
        self._transport: asyncio.Transport | None = None
        self._tokens: list[int] = []
        self._ends: list[str] = []
        self._error, self._done = "", False
        self._last = self._pause = 0.0

    @property
    def answer(self) -> Answer:
        return Answer(tokens=tuple(self._tokens), ends=tuple(self._ends), error=self._error, pause=self._pause)

    def fail(self, error: str) -> None:
        """The stream is over, with an error unless it had its end before."""
        if self.over.done():
            return
        self._error = self._error or error
        self._end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        try:
            for event in self._response.feed(data):
                if event == b"[DONE]":
                    self._done = True
                else:
                    self._take(self._decoder.decode(event), now)
        except (Malformed, msgspec.DecodeError) as error:
            self.fail(f"malformed: {error}")
        if self._response.complete:
            self._complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._response.close()
        if self._response.complete:
            self._complete()
        self.fail(f"disconnected: {exc or 'the server closed the connection'}")

    def _take(self, chunk: Chunk, now: float) -> None:
        self._pause = max(self._pause, now - self._last if self._last else 0.0)
        self._last = now
        if bytes(chunk.error) not in (b"", b"null"):
            self._error = bytes(chunk.error).decode(errors="replace")[:300]
        for choice in chunk.choices:
            self._tokens += choice.token_ids or ()
            if choice.finish_reason:
                self._ends.append(choice.finish_reason)
            self._progress.add(len(choice.token_ids or ()))

    def _complete(self) -> None:
        if self.over.done():
            return
        if self._response.status != 200:
            told = bytes(self._response.body[:200]).decode(errors="replace")
            self._error = f"http {self._response.status} {told}"
        elif not (self._done or self._error):
            self._error = "ended without [DONE]"
        self._end()

    def _end(self) -> None:
        self.over.set_result(None)
        self._progress.ended()
        if self._transport is not None:
            self._transport.abort()


async def play(
    where: Target, bodies: Sequence[bytes], limit: float, mark: int = 0, strike: Callable[[], None] | None = None
) -> list[Answer]:
    """The answers to requests that are sent all at once, with `return_token_ids`; `strike` is called when their clients
    have got `mark` tokens together. Who has no end after `limit` seconds has an error instead."""
    loop, progress = asyncio.get_running_loop(), Progress(len(bodies))
    streams = [Stream(where.encode(body), progress) for body in bodies]

    async def struck() -> None:
        if strike is not None and await progress.reach(mark):
            strike()

    async def open_stream(stream: Stream) -> None:
        try:
            await loop.create_connection(lambda: stream, where.host, where.port)
        except OSError as error:
            stream.fail(f"no connection: {error}")

    blow = asyncio.create_task(struck())
    await asyncio.gather(*map(open_stream, streams))
    await asyncio.wait([stream.over for stream in streams], timeout=limit)
    for stream in streams:
        stream.fail(f"no end after {limit:g} s")
    await blow
    return [stream.answer for stream in streams]
