"""Streams of which every token is kept, so that a disturbed run can be held against an undisturbed one.

Nothing is retried here and nothing buffered: what a server loses or says twice is seen, and so is each pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from penstock.services.bench.client import Chunk, Connection, Tally, Target
from penstock.services.bench.workload import Record


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


class Stream(Connection):
    """One request on a connection of its own, whose tokens are kept."""

    def __init__(self, request: bytes, progress: Progress) -> None:
        super().__init__(Tally())
        self._encoded, self._progress = request, progress
        self._tokens: list[int] = []
        self._ends: list[str] = []
        self._record = Record(0, 0)
        self._last = self._pause = 0.0
        self._finished = asyncio.get_running_loop().create_future()
        self._finished.add_done_callback(lambda _: progress.ended())
        self.over = self._finished

    @property
    def answer(self) -> Answer:
        assert self._record is not None
        error, detail = self._record.error, self._record.detail
        return Answer(
            tokens=tuple(self._tokens), ends=tuple(self._ends), pause=self._pause,
            error=f"{error}{' ' if error.startswith('http') else ': '}{detail}" if detail else error,
        )  # fmt: skip

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.write(self._encoded)

    def take_chunk(self, chunk: Chunk, now: float) -> None:
        super().take_chunk(chunk, now)
        self._pause = max(self._pause, now - self._last if self._last else 0.0)
        self._last = now
        for choice in chunk.choices:
            self._tokens += choice.token_ids or ()
            if choice.finish_reason:
                self._ends.append(choice.finish_reason)
            self._progress.add(len(choice.token_ids or ()))


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
            stream.fail("no connection", str(error))

    blow = asyncio.create_task(struck())
    await asyncio.gather(*map(open_stream, streams))
    await asyncio.wait([stream.over for stream in streams], timeout=limit)
    for stream in streams:
        if not stream.over.done():
            stream.fail(f"no end after {limit:g} s")
        stream.close()
    await blow
    return [stream.answer for stream in streams]
