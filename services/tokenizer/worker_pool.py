"""The owner's end of worker processes: starts them, sends them requests, and replaces those that end.

A pool may keep a spare, one idle worker more than are at work, so that no request waits for a start. The first one
starts before the server is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import fcntl
import logging
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.protocol.errors import EngineFailure
from penstock.services.supervisor import logs
from penstock.services.tokenizer.worker_protocol import HEAD, PIPE, TIME_SIGNAL, Limits, Refusal, enlarge

log = logging.getLogger(__name__)

ROOT = Path(__file__).absolute().parents[3]
NICE = 10  # streams come first
START_LIMIT = 60.0  # seconds until a worker is ready
LAST_WORDS = 64 << 10  # bytes that a worker wrote to stderr: as many as a pipe holds
LONGEST_LINE = 400  # characters
PATIENCE = 5  # times its CPU limit that a worker may take in real time, on a busy machine
ATTEMPTS = 3
MOST_WAITING = 1024  # requests for one kind of worker; more are refused with 429

FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # no worker takes pages from its owner
KEPT = 4 << 20  # bytes of shared memory that a worker keeps between answers: pages that are there are not cleared anew

# Exit codes of a process whose memory (abort, MemoryError) or stack (segmentation fault) ran out.
OUT_OF_MEMORY = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, os.EX_UNAVAILABLE)


class End(enum.Enum):
    """Why a worker ended during a request."""

    TIME = "time"
    MEMORY = "memory"
    OTHER = "other"  # not because of the request


class Reply(NamedTuple):
    """A worker's answer to one frame."""

    body: bytes
    shared: bytes = b""  # what it wrote to the shared memory


class WorkerKind(msgspec.Struct, frozen=True):
    """The workers of one pool."""

    name: str  # in logs and errors
    unanswered: str  # the error after ATTEMPTS of them died
    module: str
    limits: Limits
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    greeting: bytes = b""  # the first frame for each
    spare: int = 0
    complains: bool = False  # its stderr is read and logged
    shared: int = 0  # most bytes of memory that each shares with its owner; the descriptor is its last argument


class Worker:
    """One worker process. Used by one task at a time."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        answers: asyncio.StreamReader,
        pipes: tuple[asyncio.ReadTransport, asyncio.WriteTransport],
        shared: mmap.mmap | None = None,
    ) -> None:
        self._process = process
        self._shared = shared
        self._answers = answers
        self._pipes = pipes
        self.pid = process.pid
        self.last_words = ""  # its last line on stderr, once it has ended

    @classmethod
    async def start(cls, process: subprocess.Popen[bytes], nice: int = NICE, shared: mmap.mmap | None = None) -> Worker:
        """The worker once it is ready. It has `nice` from its first import on, which it could not set itself.

        Raises EngineFailure if it does not start."""
        assert process.stdin is not None
        assert process.stdout is not None
        lower_priority(process, nice)
        loop, answers = asyncio.get_running_loop(), asyncio.StreamReader(PIPE)
        outward, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), process.stdout)
        inward, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        worker = cls(process, answers, (outward, inward), shared)
        try:
            await asyncio.wait_for(worker._read(), START_LIMIT)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await worker.end()
            logs.error(log, "worker_failed", exit_code=process.returncode, reason=worker.last_words)
            message = f"a worker process does not start (exit code {process.returncode}); the server's log says why"
            raise EngineFailure(message) from error
        except asyncio.CancelledError:
            worker.kill()
            worker.reap()
            raise
        return worker

    def defer(self, nice: int) -> None:
        lower_priority(self._process, nice)

    def tell(self, body: bytes) -> None:
        self._pipes[1].writelines((HEAD.pack(len(body), 0), body))

    async def ask(self, body: bytes, seconds: float) -> Reply | End:
        """The answer to one frame, or why the worker ended."""
        try:
            self.tell(body)
            return await asyncio.wait_for(self._read(), seconds)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            return await self.end(late=isinstance(error, TimeoutError))

    async def end(self, *, late: bool = False) -> End:
        """End it, unless it has ended by itself. Why it ended; `late`: for its time."""
        loop = asyncio.get_running_loop()
        if not late:
            with contextlib.suppress(TimeoutError):  # its streams close a moment before the process is gone
                await asyncio.wait_for(loop.run_in_executor(None, self._process.wait), 1.0)
        code = self._process.poll()
        self.kill()
        await loop.run_in_executor(None, self.reap)
        if late or code == -TIME_SIGNAL:
            return End.TIME
        return End.MEMORY if code in OUT_OF_MEMORY else End.OTHER

    def kill(self) -> None:
        self._process.kill()
        for pipe in self._pipes:
            pipe.close()

    def reap(self) -> None:
        """Wait for the end of one that was killed."""
        self._process.wait()
        stream = self._process.stderr
        if stream is not None and not stream.closed:
            os.set_blocking(stream.fileno(), False)
            self.last_words = last_line(stream.read(LAST_WORDS) or b"")
            stream.close()

    async def _read(self) -> Reply:
        length, shared = HEAD.unpack(await self._answers.readexactly(HEAD.size))
        body = await self._answers.readexactly(length)
        if self._shared is None:
            return Reply(body)
        answer = Reply(body, self._shared[:shared])
        if shared > KEPT:
            self._shared.madvise(mmap.MADV_REMOVE, KEPT)
        return answer


class WorkerPool:
    """Owns the workers of one kind, of which `size` work at a time. Used on one asyncio loop."""

    def __init__(self, kind: WorkerKind, size: int) -> None:
        self._kind = kind
        self._semaphore = asyncio.Semaphore(size)
        self.workers: set[Worker] = set()  # that have started and not ended
        self.idle: list[Worker] = []
        self.waiting = 0  # requests without a worker
        self.replaced = 0  # workers that exceeded a limit or died
        self._starting: set[asyncio.Task[None]] = set()
        self._wanting: list[asyncio.Future[Worker]] = []  # requests that wait for a worker to start, in order
        self._nice = 0 if kind.spare else NICE  # the first spare starts at full priority, with the server

    def fill(self) -> None:
        """Start missing workers: one for each waiting request, and the spare."""
        missing = max(self._kind.spare, len(self._wanting)) - len(self.idle) - len(self._starting)
        for _ in range(missing):
            task = asyncio.get_running_loop().create_task(self._start())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def warm(self) -> None:
        """Wait until there is a worker, or none can be started, which is logged."""
        while self._starting and not self.workers:
            await asyncio.wait(set(self._starting))
        for worker in self.workers:
            worker.defer(NICE)
        self._nice = NICE

    async def ask(self, body: bytes, seconds: float) -> Reply | Refusal:
        """A worker's answer, or the limit that ended it. A worker that dies otherwise is replaced, and the request
        tried again.

        Raises EngineFailure if no worker starts, or ATTEMPTS of them died.
        """
        self.waiting += 1
        try:
            await self._semaphore.acquire()
        finally:
            self.waiting -= 1
        try:
            for _ in range(ATTEMPTS):
                found = await self._ask(body, seconds)
                if isinstance(found, Reply):
                    return found
                if found is not End.OTHER:
                    limits = self._kind.limits
                    return limits.too_slow if found is End.TIME else limits.too_large
        finally:
            self._semaphore.release()
        raise EngineFailure(self._kind.unanswered)

    def close(self) -> None:
        for task in self._starting:
            task.cancel()
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.reap()

    async def _ask(self, body: bytes, seconds: float) -> Reply | End:
        worker = await self._take()
        try:
            found = await worker.ask(body, seconds)
        except asyncio.CancelledError:  # its answer would be taken for the next request's
            self.workers.discard(worker)
            worker.kill()
            asyncio.get_running_loop().run_in_executor(None, worker.reap)
            raise
        if isinstance(found, End):
            self.workers.discard(worker)
            self.replaced += 1
            logs.warning(log, f"{self._kind.name}_worker_ended", reason=found.value, said=worker.last_words)
            self.fill()
        else:
            self._give(worker)
        return found

    async def _take(self) -> Worker:
        """A worker for one request. Raises EngineFailure if none starts."""
        self._nice = NICE  # streams come first
        if self.idle:
            worker = self.idle.pop()
            self.fill()
            return worker
        wanted: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._wanting.append(wanted)
        self.fill()
        try:
            worker = await wanted
        except asyncio.CancelledError:
            if wanted.done() and not wanted.cancelled() and wanted.exception() is None:
                self._give(wanted.result())
            raise
        finally:
            if wanted in self._wanting:
                self._wanting.remove(wanted)
        self.fill()
        return worker

    def _give(self, worker: Worker) -> None:
        """Give a worker to the request that has waited longest, or make it idle."""
        while self._wanting:
            wanted = self._wanting.pop(0)
            if not wanted.done():
                wanted.set_result(worker)
                return
        self.idle.append(worker)

    async def _start(self) -> None:
        try:
            process, shared = begin(self._kind)
            worker = await Worker.start(process, self._nice, shared)
        except (EngineFailure, OSError) as error:
            self._started()
            failure = error
            if isinstance(error, OSError):
                logs.error(log, "worker_failed", reason=str(error))
                failure = EngineFailure(f"a {self._kind.name} worker does not start; the server's log says why")
            if not self._starting and not self.workers:  # no other can serve the requests that wait
                for wanted in self._wanting:
                    if not wanted.done():
                        wanted.set_exception(failure.with_traceback(None))
            return
        self._started()
        if self._kind.greeting:
            worker.tell(self._kind.greeting)
        self.workers.add(worker)
        self._give(worker)

    def _started(self) -> None:
        """This task no longer starts a worker; called before any request resumes and counts those that do."""
        task = asyncio.current_task()
        assert task is not None
        self._starting.discard(task)


def begin(kind: WorkerKind) -> tuple[subprocess.Popen[bytes], mmap.mmap | None]:
    """A worker's process, and the memory that it shares. Started on this thread, because it ends with it, and not by
    uvloop, whose fork would stop every stream for 20 ms."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with contextlib.ExitStack() as closing:
        passed, shared = [], None
        if kind.shared:
            passed.append(os.memfd_create("penstock-answers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            closing.callback(os.close, passed[0])
            os.ftruncate(passed[0], kind.shared)
            fcntl.fcntl(passed[0], fcntl.F_ADD_SEALS, FIXED_SIZE)
            shared = mmap.mmap(passed[0], kind.shared)
        process = subprocess.Popen(
            [sys.executable, "-m", kind.module, *kind.arguments, *map(str, passed)],
            bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if kind.complains else subprocess.DEVNULL,
            env={**kind.environment, "PYTHONPATH": paths}, pass_fds=passed,
        )  # fmt: skip
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        enlarge(pipe.fileno())
    return process, shared


def lower_priority(process: subprocess.Popen[bytes], nice: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, as reading from it will show
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)


def last_line(text: bytes) -> str:
    """The last line of an error output, where Python and Rust write the error."""
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:LONGEST_LINE] if lines else ""
