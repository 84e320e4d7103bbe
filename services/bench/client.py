"""One client process of the load generator: `python -m penstock.services.bench.client`, started by serve.py.

Connections are raw asyncio transports, because the client must cost little beside the server it measures: a general
client library spends more on each event than the server does. A token costs one callback, one decode and one append.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from penstock.services.bench.workload import Record, Request, Workload, requests

INTERVAL = 0.25  # seconds between two progress reports


class Delta(msgspec.Struct, frozen=True, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct, frozen=True, gc=False):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None  # with return_token_ids


class PromptDetails(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The fields that matter of a completion chunk, of either endpoint."""

    choices: tuple[Choice, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None  # with return_token_ids
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class Target(msgspec.Struct, frozen=True):
    """Where to send requests, taken from a base URL such as http://localhost:8000 or http://localhost:8000/v1."""

    host: str
    port: int
    path: str
    api_key: str = ""

    def encode(self, body: bytes, endpoint: str = "completions") -> bytes:
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


class Malformed(Exception):
    """The server's bytes are not an HTTP response."""


class Response:
    """One HTTP response, reduced to the events it streams, whatever the cuts between the bytes fed to it."""

    def __init__(self) -> None:
        self.status = 0
        self.started = False
        self.complete = False  # the whole body has been read
        self.keep_alive = True
        self.body = bytearray()  # of a response other than 200
        self._parser = httptools.HttpResponseParser(self)
        self._framed = False  # by a length or chunks; else the body ends with the connection
        self._events: list[bytes] = []
        self._text = b""  # the beginning of the next event

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that these bytes complete. Raises Malformed."""
        self.started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.complete:  # bytes after the response do not matter
                raise Malformed(str(error)) from error
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """The connection ended, which completes a response without a length."""
        self.complete = self.complete or bool(self.status and not self._framed)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status, self.keep_alive = self._parser.get_status_code(), self._parser.should_keep_alive()

    def on_body(self, payload: bytes) -> None:
        if self.status != 200:
            self.body += payload
            return
        text = self._text + payload if self._text else payload
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")  # a CR at the end waits for its LF in `_text`
        *blocks, self._text = text.split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:  # the usual form
                self._events.append(block[6:])
            elif lines := [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]:
                self._events.append(b"\n".join(lines))

    def on_message_complete(self) -> None:
        self.complete = True


class Tally:
    """Chunks with tokens, over all connections of a load."""

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
        """Send a request; the future is done when `take` has its outcome."""
        assert self._transport is not None
        assert self._finished is None
        self._response, self._gaps, self._ids, self._done = Response(), array("d"), 0, False
        self._record = Record(request.index, request.variant, start=start)
        self._finished = asyncio.get_running_loop().create_future()
        self._transport.write(encoded)
        return self._finished

    @property
    def unanswered(self) -> bool:
        """Not a byte of the latest request's response has arrived."""
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
        """End the current request with an error, and with it the connection: its stream cannot be trusted."""
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
                    self.take_chunk(self._decoder.decode(event), now)
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

    def take_chunk(self, chunk: Chunk, now: float) -> None:
        record = self._record
        if record is None:
            return
        if bytes(chunk.error) not in (b"", b"null"):
            record.error, record.detail = "error event", bytes(chunk.error).decode(errors="replace")[:200]
        for choice in chunk.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content
            # An empty text without a finish reason is a token of an incomplete character in a completion, and the role
            # in a chat.
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
            elif self._ids and record.tokens and self._ids != record.tokens:
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
    """Fail a request whose stream went well but whose counts contradict each other."""
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
    """Drives one process's share of a workload: a closed loop of `concurrency` requests, or timed arrivals."""

    def __init__(self, where: Target, endpoint: str, timeout: float) -> None:
        self.records: list[Record] = []
        self.tally = Tally()
        self.open = 0
        self._where, self._endpoint, self._timeout = where, endpoint, timeout
        self._idle: deque[Connection] = deque()

    async def connect(self, count: int) -> None:
        """Open connections before the load starts, as far as the server allows."""
        found = await asyncio.gather(*(self._connection() for _ in range(count)), return_exceptions=True)
        self._idle.extend(one for one in found if isinstance(one, Connection))

    async def run(self, load: Iterable[Request], concurrency: int, start: float) -> None:
        """Send every request from `start` (monotonic seconds) on; return when each has its record."""
        # Encoded before the start, so that little work is left for the measurement.
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
                # RFC 9112, 9.3.1: a server may close a kept connection just as it is used; that is no failure.
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


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A client process's share of a workload: the first line of its standard input."""

    target: Target
    workload: Workload
    model: str
    extra: dict[str, Any]
    timeout: float
    worker: int
    workers: int
    warmup: bool

    @property
    def concurrency(self) -> int:
        """This process's share of the open requests; 0 means no limit."""
        total = self.workload.concurrency
        if self.workload.rate and not total:
            return 0
        return (total or 1) // self.workers + (self.worker < (total or 1) % self.workers)


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A line of standard output: the first when the process is ready, then one every INTERVAL."""

    finished: int = 0
    failed: int = 0
    events: int = 0
    open: int = 0


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last line of standard output."""

    records: tuple[Record, ...]
    cpu_seconds: float


def report(message: Progress | Finished) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


async def report_progress(load: Load) -> None:
    while True:
        await asyncio.sleep(INTERVAL)
        failed = sum(bool(record.error) for record in load.records)
        report(Progress(len(load.records), failed, load.tally.events, load.open))


async def work(job: Job) -> None:
    """Do the job, from the time (monotonic seconds) on the second line of standard input."""
    load = Load(job.target, job.workload.endpoint, job.timeout)
    share = list(requests(job.workload, job.model, warmup=job.warmup, extra=job.extra, worker=job.worker,
                          workers=job.workers))  # fmt: skip
    await load.connect(min(job.concurrency, len(share)))
    report(Progress())
    start = float(await asyncio.to_thread(sys.stdin.buffer.readline))
    gc.collect()
    gc.freeze()
    gc.disable()
    cpu = time.process_time()
    reporter = asyncio.create_task(report_progress(load))
    await load.run(share, job.concurrency, start)
    cpu = time.process_time() - cpu
    reporter.cancel()
    load.close()
    report(Finished(tuple(load.records), cpu))


if __name__ == "__main__":
    uvloop.run(work(msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)))
