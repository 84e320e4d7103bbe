"""The client of the load generator: connections on raw asyncio transports and the loops that keep them busy.

One coroutine per request at most; a token costs one callback, one parse and one list append.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Iterable
from typing import cast
from urllib.parse import urlsplit

import msgspec

from penstock.services.bench.response import Malformed, Response
from penstock.services.bench.workload import Request


class Delta(msgspec.Struct, frozen=True, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct, frozen=True, gc=False):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None  # where the server was asked for them


class PromptDetails(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """What matters of a completion chunk, of either endpoint."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class Record(msgspec.Struct, gc=False):
    """What became of one request. Times are seconds of the system's monotonic clock, the same in every process."""

    index: int
    variant: int
    start: float = 0.0
    first: float = 0.0  # first token
    last: float = 0.0  # last token
    end: float = 0.0
    events: int = 0  # chunks that brought tokens
    tokens: int = 0  # by the server's usage
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""  # kind; empty for a request that went well
    detail: str = ""
    gaps: bytes = b""  # float64 seconds between consecutive events


class Target(msgspec.Struct, frozen=True):
    """Where to send requests, taken from a base URL such as http://localhost:8000 or http://localhost:8000/v1."""

    host: str
    port: int
    path: str
    api_key: str = ""

    def encode(self, body: bytes, endpoint: str = "completions") -> bytes:
        """The bytes of one POST request."""
        name = "chat/completions" if endpoint == "chat" else endpoint
        head = f"POST {self.path}/v1/{name} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
        head += "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
        head += f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def target(base_url: str, api_key: str = "") -> Target:
    """Raises ValueError for a URL that is not plain http."""
    parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"--base-url: {base_url!r} is not allowed; http://HOST:PORT, without TLS")
    return Target(parts.hostname, parts.port or 80, parts.path.rstrip("/").removesuffix("/v1"), api_key)


class Tally:
    """Chunks that brought tokens, of all connections of a load."""

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events = 0


class Connection(asyncio.Protocol):
    """One connection; it carries one request at a time and is kept while the server keeps it."""

    def __init__(self, tally: Tally) -> None:
        self.open = False
        self._tally = tally
        self._decoder = msgspec.json.Decoder(Chunk)
        self._transport: asyncio.Transport | None = None
        self._response = Response()
        self._record: Record | None = None
        self._gaps = array("d")
        self._ids = 0
        self._done = False
        self._finished: asyncio.Future[None] | None = None

    def ask(self, request: Request, encoded: bytes, start: float) -> asyncio.Future[None]:
        """Send a request; the future is done when `record` holds what became of it."""
        assert self._transport is not None
        assert self._finished is None
        self._response, self._gaps, self._ids, self._done = Response(), array("d"), 0, False
        self._record = Record(request.index, request.variant, start=start)
        self._finished = asyncio.get_running_loop().create_future()
        self._transport.write(encoded)
        return self._finished

    @property
    def unanswered(self) -> bool:
        """Not a byte came back for the latest request."""
        return not self._response.started

    def take(self) -> Record:
        assert self._record is not None
        record, self._record = self._record, None
        record.gaps = self._gaps.tobytes()
        return record

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: str, detail: str = "") -> None:
        """End the request under way with an error, and the connection with it: its stream cannot be trusted."""
        if self._record is not None and not self._record.error:
            self._record.error, self._record.detail = error, detail[:200]
        self._finish(time.monotonic())
        self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.open = cast(asyncio.Transport, transport), True  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        response = self._response
        try:
            for event in response.feed(data):
                if event == b"[DONE]":
                    self._done = True
                else:
                    self._chunk(self._decoder.decode(event), now)
        except (Malformed, msgspec.DecodeError) as error:
            self.fail("malformed", str(error))
            return
        if response.complete:
            self._complete(now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._response.close()
        if self._finished is None:
            return
        if self._response.complete:
            self._complete(time.monotonic())
        else:
            self.fail("disconnected", str(exc or "the server closed the connection"))

    def _chunk(self, chunk: Chunk, now: float) -> None:
        record = self._record
        if record is None:
            return
        if bytes(chunk.error) not in (b"", b"null"):
            record.error, record.detail = "error event", bytes(chunk.error).decode(errors="replace")[:200]
        for choice in chunk.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content
            # A completion's empty text without an end is a token that decodes to nothing yet; a chat's is its role.
            if text or choice.token_ids or (text == "" and delta is None and choice.finish_reason is None):
                if record.events:
                    self._gaps.append(now - record.last)
                else:
                    record.first = now
                record.events += 1
                record.last = now
                self._ids += len(choice.token_ids or ())
                self._tally.events += 1
            elif choice.finish_reason is not None and record.events:
                record.last = now
        if chunk.usage is not None:
            record.tokens, record.prompt_tokens = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            record.cached_tokens = (details.cached_tokens or 0) if details else 0

    def _complete(self, now: float) -> None:
        record, response = self._record, self._response
        if record is not None and not record.error:
            if response.status != 200:
                record.error = f"http {response.status}"
                record.detail = bytes(response.body[:200]).decode(errors="replace")
            elif not self._done:
                record.error = "ended without [DONE]"
            elif self._ids and self._ids != record.tokens:
                record.error, record.detail = "token count", f"{self._ids} ids streamed, usage says {record.tokens}"
        self._finish(now)
        if not response.keep_alive:
            self.close()

    def _finish(self, now: float) -> None:
        if self._record is not None and not self._record.end:
            self._record.end = now
        if self._finished is not None:
            finished, self._finished = self._finished, None
            if not finished.done():
                finished.set_result(None)


def judge(record: Record, request: Request) -> None:
    """Mark a request whose stream went well but whose counts contradict each other."""
    if record.error:
        return
    if not record.tokens:
        record.error = "no usage"
    elif request.output_tokens >= 0 and record.tokens != request.output_tokens:
        record.error, record.detail = "token count", f"{record.tokens} tokens of {request.output_tokens} asked for"
    elif request.prompt_tokens >= 0 and record.prompt_tokens != request.prompt_tokens:
        record.error, record.detail = "prompt count", f"usage says {record.prompt_tokens} of {request.prompt_tokens}"
    elif record.events > record.tokens:
        record.error, record.detail = "token count", f"{record.events} chunks with text for {record.tokens} tokens"


class Load:
    """Drives one process's share of a workload: a closed loop of `concurrency` requests, or arrivals on time."""

    def __init__(self, where: Target, endpoint: str, timeout: float) -> None:
        self.records: list[Record] = []
        self.tally = Tally()
        self.open = 0
        self._where, self._endpoint, self._timeout = where, endpoint, timeout
        self._idle: deque[Connection] = deque()

    async def connect(self, count: int) -> None:
        """Open connections ahead of the load, as far as the server lets us."""
        found = await asyncio.gather(*(self._connection() for _ in range(count)), return_exceptions=True)
        self._idle.extend(one for one in found if isinstance(one, Connection))

    async def run(self, load: Iterable[Request], concurrency: int, start: float) -> None:
        """Send every request once `start` (monotonic seconds) has come; return when each has its record."""
        # Encoded before the start, so that the load's own work is only what the wire makes it do.
        waiting = deque((request, self._where.encode(request.body, self._endpoint)) for request in load)
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        if waiting and any(request.due for request, _ in waiting):
            limit = asyncio.Semaphore(concurrency or len(waiting))
            async with asyncio.TaskGroup() as group:
                for request, encoded in waiting:
                    await asyncio.sleep(max(0.0, start + request.due - time.monotonic()))
                    await limit.acquire()
                    group.create_task(self._one(request, encoded)).add_done_callback(lambda _: limit.release())
        else:
            await asyncio.gather(*(self._drain(waiting) for _ in range(min(concurrency or 1, len(waiting)))))

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _drain(self, waiting: deque[tuple[Request, bytes]]) -> None:
        while waiting:
            await self._one(*waiting.popleft())

    async def _one(self, request: Request, encoded: bytes) -> None:
        start = time.monotonic()
        self.open += 1
        record = None
        while record is None:
            reused = bool(self._idle)
            try:
                connection = self._idle.pop() if reused else await self._connection()
            except OSError as error:
                record = Record(request.index, request.variant, start, end=time.monotonic(), error="no connection",
                                detail=str(error))  # fmt: skip
                break
            if connection.open:
                record = await self._ask(connection, request, encoded, start)
                # RFC 9112, 9.3.1: a server may close a kept connection just when it is used; that is no failure.
                if reused and connection.unanswered and record.error == "disconnected":
                    record = None
        self.open -= 1
        self.records.append(record)

    async def _ask(self, connection: Connection, request: Request, encoded: bytes, start: float) -> Record:
        finished = connection.ask(request, encoded, start)
        timer = asyncio.get_running_loop().call_later(self._timeout, connection.fail, "timeout")
        await finished
        timer.cancel()
        record = connection.take()
        judge(record, request)
        if connection.open:
            self._idle.append(connection)
        return record

    async def _connection(self) -> Connection:
        loop, where = asyncio.get_running_loop(), self._where
        _, connection = await loop.create_connection(lambda: Connection(self.tally), where.host, where.port)
        return connection
