"""Grammars are compiled in worker processes, each once, and remembered. A request waits for its own alone.

A worker that passes a limit is ended and replaced, and its grammar is refused from then on. What is remembered is
bounded in number and in bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.engine_core.histogram import Histogram, HistogramStatistics
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.errors import InvalidRequest, Overloaded
from penstock.protocol.messages import Grammar
from penstock.services.tokenizer.worker_pool import ATTEMPTS, MOST_WAITING, PATIENCE, End, WorkerKind, WorkerPool
from penstock.services.tokenizer.worker_protocol import COMPILED, Done, Refusal

KEPT = 512  # bytes of an entry beside its texts
LONG = 16 << 10  # bytes of a source, which takes a tenth of a millisecond to hash
MOST_BYTES = 64 << 20  # of remembered sources and refusals
COMPILE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


class GrammarCompilerStatistics(msgspec.Struct, frozen=True):
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


class GrammarCompiler:
    """Owner of the workers and of what they found. Lives on one asyncio loop."""

    def __init__(self, folder: Path, options: TokenizerConfig) -> None:
        self._options = options
        self._known: OrderedDict[bytes, Done | Refusal] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._flights: dict[bytes, asyncio.Task[Done | Refusal]] = {}
        limits = (str(options.grammar_compile_timeout), str(options.grammar_compile_memory))
        kind = WorkerKind(
            "compile", f"{ATTEMPTS} compile workers ended without an answer; the server's log says why",
            "penstock.services.tokenizer.compile_worker", (str(folder), str(os.getpid()), *limits), os.environ,
            spare=1, complains=True,
        )  # fmt: skip
        self._pool = WorkerPool(kind, options.grammar_workers)
        self._compiled = self._refused = self._hits = 0
        self._slowest = 0.0
        self._seconds = Histogram(COMPILE)

    def start(self) -> None:
        """Start the first worker."""
        self._pool.fill()

    async def warm(self) -> None:
        """Wait until the first grammar would find its worker ready, or the log has said why there is none."""
        await self._pool.warm()

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
        self._pool.close()

    def statistics(self) -> GrammarCompilerStatistics:
        """Counters for metrics and tests."""
        return GrammarCompilerStatistics(
            workers=len(self._pool.workers),
            waiting=self._pool.waiting,
            remembered=len(self._known),
            bytes=self._bytes,
            compiled=self._compiled,
            refused=self._refused,
            hits=self._hits,
            replaced=self._pool.replaced,
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
        if self._pool.waiting >= MOST_WAITING:
            raise Overloaded("too many grammars wait to be compiled")
        flight = self._flights[key] = asyncio.get_running_loop().create_task(self._compile(key, grammar))
        flight.add_done_callback(forget(self._flights, key))
        return flight

    async def _compile(self, key: bytes, grammar: Grammar) -> Done | Refusal:
        found = await self._outcome(msgspec.msgpack.encode(grammar))
        if isinstance(found, Done):
            self._compiled += 1
            self._slowest = max(self._slowest, found.seconds)
            self._seconds.observe(found.seconds)
        else:
            self._refused += 1
        self._remember(key, found)
        return found

    async def _outcome(self, body: bytes) -> Done | Refusal:
        """A worker's answer; a limit that it passes is a refusal."""
        options = self._options
        match await self._pool.ask(body, options.grammar_compile_timeout * PATIENCE):
            case bytes() as answer:
                return COMPILED.decode(answer)
            case End.TIME:
                limit = f"{options.grammar_compile_timeout:g} s (--grammar-compile-timeout)"
            case _:
                limit = memory_limit(options)
        return Refusal(f"compiling it takes more than {limit}", "grammar_too_complex")

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


def memory_limit(options: TokenizerConfig) -> str:
    """What a compilation may take, for its refusal."""
    limit = f"{options.grammar_compile_memory >> 20} MiB (--grammar-compile-memory)"
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    return limit if hard == resource.RLIM_INFINITY else f"{limit}, or than the server's own limit leaves (ulimit -v)"


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
