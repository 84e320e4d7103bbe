"""Compiles grammars in worker processes and caches the outcomes. A request waits for its own grammar only.

A worker that exceeds a limit is replaced, and its grammar is refused from then on. The cache is bounded in entries and
in bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from functools import partial
from pathlib import Path

import msgspec

from penstock.engine_core.histogram import Histogram, HistogramStatistics
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.errors import invalid
from penstock.protocol.messages import Grammar
from penstock.services.tokenizer.outcome_cache import OutcomeCache
from penstock.services.tokenizer.worker_pool import ATTEMPTS, PATIENCE, WorkerKind, WorkerPool
from penstock.services.tokenizer.worker_protocol import COMPILED, Done, Limits, Refusal

ENTRY = 512  # bytes of a cache entry besides its texts
LONG = 16 << 10  # bytes of a source that takes 0.1 ms to hash
MOST_BYTES = 64 << 20  # of cached sources and refusals
COMPILE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


class GrammarCompilerStatistics(msgspec.Struct, frozen=True):
    """Counters since the start, and present numbers."""

    workers: int  # now
    remembered: int  # now: cached grammars, refused ones included
    bytes: int  # now: of the cache
    compiled: int
    refused: int
    hits: int  # requests whose grammar was cached or being compiled
    replaced: int  # workers that exceeded a limit or died
    seconds: HistogramStatistics  # of CPU, of completed compilations


class GrammarCompiler:
    """Owns the workers and the cache. Used on one asyncio loop."""

    def __init__(self, folder: Path, options: TokenizerConfig) -> None:
        self._options = options
        limits = Limits(
            options.grammar_compile_timeout, options.grammar_compile_memory, "compiling it", "--grammar-compile",
            "grammar_too_complex",
        )  # fmt: skip
        kind = WorkerKind(
            "compile", f"{ATTEMPTS} compile workers ended without an answer; the server's log says why",
            "penstock.services.tokenizer.compile_worker", limits,
            (str(folder), str(os.getpid()), str(limits.seconds), str(limits.memory)), os.environ,
            spare=1, complains=True,
        )  # fmt: skip
        self._pool = WorkerPool(kind, options.grammar_workers)
        self._cache: OutcomeCache[Done | Refusal] = OutcomeCache(
            self._pool, "grammars wait to be compiled", size_of, MOST_BYTES, options.grammar_cache_entries
        )
        self._compiled = self._refused = 0
        self._seconds = Histogram(COMPILE)

    def start(self) -> None:
        self._pool.fill()

    async def warm(self) -> None:
        """Wait until a worker is ready for the first grammar, or the log says why none is."""
        await self._pool.warm()

    async def compile(self, grammar: Grammar) -> Done:
        """Raises InvalidRequest with the grammar's field and the reason, Overloaded, EngineFailure."""
        most = self._options.grammar_max_bytes
        if len(grammar.source) + len(grammar.unread) + len(grammar.whitespace) > most:
            message = f"is longer than {most} characters (--grammar-max-bytes)"
            raise invalid(grammar.param, message, "grammar_too_complex")
        key = await self._key(grammar)
        found = await self._cache.get(key, partial(self._compile, key, grammar))
        if isinstance(found, Refusal):
            raise invalid(grammar.param, f": {found.message}", found.code)
        return found

    def close(self) -> None:
        self._cache.close()
        self._pool.close()

    def statistics(self) -> GrammarCompilerStatistics:
        return GrammarCompilerStatistics(
            workers=len(self._pool.workers),
            remembered=len(self._cache),
            bytes=self._cache.bytes,
            compiled=self._compiled,
            refused=self._refused,
            hits=self._cache.hits,
            replaced=self._pool.replaced,
            seconds=self._seconds.statistics(),
        )

    async def _key(self, grammar: Grammar) -> bytes:
        """The cache key; long sources are hashed in a thread, beside streams."""
        if len(grammar.unread) <= LONG:
            return content_key(grammar)
        return await asyncio.get_running_loop().run_in_executor(None, content_key, grammar)

    async def _compile(self, key: bytes, grammar: Grammar) -> Done | Refusal:
        seconds = self._options.grammar_compile_timeout * PATIENCE
        answer = await self._pool.ask(msgspec.msgpack.encode(grammar), seconds)
        found = answer if isinstance(answer, Refusal) else COMPILED.decode(answer.body)
        if isinstance(found, Done):
            self._compiled += 1
            self._seconds.observe(found.seconds)
        else:
            self._refused += 1
        self._cache.keep(key, found)
        return found


def content_key(grammar: Grammar) -> bytes:
    """The same for grammars with the same meaning, whichever field of a request they came in."""
    content = (grammar.kind, grammar.source, grammar.whitespace, grammar.lenient, len(grammar.unread))
    found = hashlib.sha256(msgspec.msgpack.encode(content))  # the fastest with hardware support
    found.update(grammar.unread)
    return found.digest()


def size_of(found: Done | Refusal) -> int:
    texts = (found.source, found.unique, *found.approximations) if isinstance(found, Done) else (found.message,)
    return ENTRY + sum(map(sys.getsizeof, texts))
