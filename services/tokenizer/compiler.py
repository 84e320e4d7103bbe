"""Grammars are compiled in worker processes, each once, and remembered. A request waits for its own alone.

Workers are started when the first grammar comes and stay. One that passes a limit is ended and replaced, and what it
worked on is refused from then on. What is remembered is bounded in number and in bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import logging
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine_core.histogram import Histogram
from protocol.config import TokenizerConfig
from protocol.errors import EngineFailure, InvalidRequest, Overloaded
from protocol.figures import HistogramStatistics
from protocol.messages import Grammar
from services import journal
from services.tokenizer.orders import LENGTH, OUTCOME, TIME_SIGNAL, Done, Refusal

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
NICE = 10  # streams come first
PATIENCE = 5  # times the CPU limit that a compilation may take by the clock, on a machine that is busy
START_LIMIT = 60.0  # seconds until a worker has read the model's tokens
ATTEMPTS = 3
MOST_WAITING = 1024  # compilations; beyond it 429
KEPT = 512  # bytes of an entry beside its texts
LONG = 16 << 10  # bytes of a source, which takes a tenth of a millisecond to hash
MOST_BYTES = 64 << 20  # of remembered sources and refusals
COMPILE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


# Exit codes of a process whose memory (abort, MemoryError) or stack (segmentation fault) ran out.
OUT_OF_MEMORY = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, os.EX_UNAVAILABLE)


class End(enum.Enum):
    """Why a worker ended during a compilation."""

    TIME = "time"
    MEMORY = "memory"
    OTHER = "other"  # nothing that the grammar did


class CompilerStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what stands now."""

    workers: int  # now
    waiting: int  # now: compilations without a worker
    remembered: int  # now: grammars, refused ones included
    bytes: int  # now: of those
    compiled: int
    refused: int
    hits: int  # requests whose grammar was remembered or on its way
    replaced: int  # workers that passed a limit or died
    slowest: float  # seconds of CPU of one compilation
    seconds: HistogramStatistics  # of CPU, of each that came to an end


class Worker:
    """One worker process. Used by one task at a time."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        answers: asyncio.StreamReader,
        pipes: tuple[asyncio.ReadTransport, asyncio.WriteTransport],
    ) -> None:
        self._process = process
        self._answers = answers
        self._pipes = pipes

    @classmethod
    async def start(cls, process: subprocess.Popen[bytes]) -> Worker:
        """The worker that `process` becomes once it is ready. Raises EngineFailure when it does not come up."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended: reading from it tells
            # From its first import on, which it could not see to itself.
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        loop, answers = asyncio.get_running_loop(), asyncio.StreamReader()
        outward, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), process.stdout)
        inward, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        worker = cls(process, answers, (outward, inward))
        try:
            await asyncio.wait_for(worker._read(), START_LIMIT)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await worker.end()
            journal.error(log, "worker_failed", exit_code=process.returncode)
            raise EngineFailure("a worker process does not start") from error
        return worker

    def tell(self, body: bytes) -> None:
        """Send a frame."""
        self._pipes[1].writelines((LENGTH.pack(len(body)), body))

    async def ask(self, body: bytes, seconds: float) -> bytes | End:
        """The answer to one frame, or why there is none and no worker any more."""
        try:
            self.tell(body)
            return await asyncio.wait_for(self._read(), seconds)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            return await self.end(late=isinstance(error, TimeoutError))

    async def end(self, *, late: bool = False) -> End:
        """End it, if it has not ended by itself; why it did, or that it was `late`."""
        loop = asyncio.get_running_loop()
        if not late:
            with contextlib.suppress(TimeoutError):  # its streams close a moment before the process is gone
                await asyncio.wait_for(loop.run_in_executor(None, self._process.wait), 1.0)
        code = self._process.poll()
        self.kill()
        await loop.run_in_executor(None, self.bury)
        if late or code == -TIME_SIGNAL:
            return End.TIME
        return End.MEMORY if code in OUT_OF_MEMORY else End.OTHER

    def kill(self) -> None:
        """End it at once; its owner is gone or does not wait."""
        self._process.kill()
        for pipe in self._pipes:
            pipe.close()

    def bury(self) -> None:
        """Wait for the end of one that was killed."""
        self._process.wait()

    async def _read(self) -> bytes:
        head = await self._answers.readexactly(LENGTH.size)
        return await self._answers.readexactly(LENGTH.unpack(head)[0])


def begin(folder: Path, options: TokenizerConfig) -> subprocess.Popen[bytes]:
    """A worker's process. From this thread, since it ends with it; not as uvloop begins one, which copies the memory
    map of this process and keeps every stream waiting for 20 ms."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "services.tokenizer.worker", str(folder), str(os.getpid()),
         str(options.grammar_compile_timeout), str(options.grammar_compile_memory)],
        bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


class Compiler:
    """Owner of the workers and of what they found. Lives on one asyncio loop."""

    def __init__(self, folder: Path, options: TokenizerConfig) -> None:
        self._folder = folder
        self._options = options
        self._known: OrderedDict[bytes, Done | Refusal] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._flights: dict[bytes, asyncio.Task[Done | Refusal]] = {}
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._seats = asyncio.Semaphore(options.grammar_workers)
        self._compiled = self._refused = self._hits = self._replaced = self._waiting = 0
        self._slowest = 0.0
        self._seconds = Histogram(COMPILE)

    async def compile(self, grammar: Grammar) -> Done:
        """Raises InvalidRequest naming the grammar's field and why it is refused, Overloaded, EngineFailure."""
        most = self._options.grammar_max_bytes
        if len(grammar.source) + len(grammar.unread) + len(grammar.whitespace) > most:
            message = f"{grammar.param} is longer than {most} characters (--grammar-max-bytes)"
            raise InvalidRequest(message, param=grammar.param, code="grammar_too_complex")
        key = await self._key(grammar)
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            self._hits += 1
        else:
            found = await asyncio.shield(self._flight(key, grammar))
        if isinstance(found, Refusal):
            raise InvalidRequest(f"{grammar.param}: {found.message}", param=grammar.param, code=found.code)
        return found

    def close(self) -> None:
        """End the workers and whoever waits for them."""
        for flight in self._flights.values():
            flight.cancel()
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.bury()

    def statistics(self) -> CompilerStatistics:
        """Counters for metrics and tests."""
        return CompilerStatistics(
            workers=len(self._all),
            waiting=self._waiting,
            remembered=len(self._known),
            bytes=self._bytes,
            compiled=self._compiled,
            refused=self._refused,
            hits=self._hits,
            replaced=self._replaced,
            slowest=self._slowest,
            seconds=self._seconds.statistics(),
        )

    async def _key(self, grammar: Grammar) -> bytes:
        """Its content's. Hashing what is long leaves the interpreter to streams."""
        if len(grammar.unread) <= LONG:
            return content_key(grammar)
        return await asyncio.get_running_loop().run_in_executor(None, content_key, grammar)

    def _flight(self, key: bytes, grammar: Grammar) -> asyncio.Task[Done | Refusal]:
        """The one compilation of this grammar that is on its way."""
        flight = self._flights.get(key)
        if flight is not None:
            self._hits += 1
            return flight
        if self._waiting >= MOST_WAITING:
            raise Overloaded("too many grammars wait to be compiled")
        flight = self._flights[key] = asyncio.get_running_loop().create_task(self._compile(key, grammar))
        flight.add_done_callback(forget(self._flights, key))
        return flight

    async def _compile(self, key: bytes, grammar: Grammar) -> Done | Refusal:
        self._waiting += 1
        try:
            await self._seats.acquire()
        finally:
            self._waiting -= 1
        try:
            found = await self._outcome(msgspec.msgpack.encode(grammar))
        finally:
            self._seats.release()
        if isinstance(found, Done):
            self._compiled += 1
            self._slowest = max(self._slowest, found.seconds)
            self._seconds.observe(found.seconds)
        else:
            self._refused += 1
        self._remember(key, found)
        return found

    async def _outcome(self, body: bytes) -> Done | Refusal:
        """What a worker says of it. A limit that it passes is a refusal; a worker that is killed costs time only."""
        options = self._options
        for _ in range(ATTEMPTS):
            worker = self._idle.pop() if self._idle else await self._start()
            found = await worker.ask(body, options.grammar_compile_timeout * PATIENCE)
            if not isinstance(found, End):
                self._idle.append(worker)
                return OUTCOME.decode(found)
            self._all.discard(worker)
            self._replaced += 1
            journal.warning(log, "compile_worker_ended", reason=found.value)
            if found is End.TIME:
                limit = f"{options.grammar_compile_timeout:g} s (--grammar-compile-timeout)"
                return Refusal(f"compiling it takes more than {limit}", "grammar_too_complex")
            if found is End.MEMORY:
                limit = f"{options.grammar_compile_memory >> 20} MiB (--grammar-compile-memory)"
                return Refusal(f"compiling it takes more than {limit}", "grammar_too_complex")
        raise EngineFailure("grammars cannot be compiled at this time")

    async def _start(self) -> Worker:
        worker = await Worker.start(begin(self._folder, self._options))
        self._all.add(worker)
        return worker

    def _remember(self, key: bytes, found: Done | Refusal) -> None:
        self._known[key] = found
        self._bytes += size_of(found)
        while len(self._known) > self._options.grammar_cache_entries or self._bytes > MOST_BYTES:
            _, oldest = self._known.popitem(last=False)
            self._bytes -= size_of(oldest)


def content_key(grammar: Grammar) -> bytes:
    """The same for grammars that mean the same, whichever field they came in."""
    content = (grammar.kind, grammar.source, grammar.whitespace, grammar.lenient, len(grammar.unread))
    found = hashlib.sha256(msgspec.msgpack.encode(content))  # the fastest here where processors know it
    found.update(grammar.unread)
    return found.digest()


def size_of(found: Done | Refusal) -> int:
    """Bytes that keeping it takes."""
    texts = (found.source, *found.approximations) if isinstance(found, Done) else (found.message,)
    return KEPT + sum(map(sys.getsizeof, texts))


def forget(flights: dict[bytes, asyncio.Task[Done | Refusal]], key: bytes) -> Callable[[object], None]:
    """What takes a flight off the list when it has landed, its failure looked at."""

    def landed(task: object) -> None:
        del flights[key]
        assert isinstance(task, asyncio.Task)
        if not task.cancelled():
            task.exception()

    return landed
