"""A compile worker's process as its owner sees it: begun, asked, ended, and why it ended."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from penstock.protocol.config import TokenizerConfig
from penstock.protocol.errors import EngineFailure
from penstock.services.supervisor import logs
from penstock.services.tokenizer.compile_protocol import LENGTH, TIME_SIGNAL

log = logging.getLogger(__name__)

ROOT = Path(__file__).absolute().parents[3]
NICE = 10  # streams come first
START_LIMIT = 60.0  # seconds until a worker has read the model's tokens
LAST_WORDS = 64 << 10  # bytes of what a worker wrote to stderr, a pipe's full
LONGEST_LINE = 400  # characters

# Exit codes of a process whose memory (abort, MemoryError) or stack (segmentation fault) ran out.
OUT_OF_MEMORY = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, os.EX_UNAVAILABLE)


class End(enum.Enum):
    """Why a worker ended during a compilation."""

    TIME = "time"
    MEMORY = "memory"
    OTHER = "other"  # nothing that the grammar did


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
        self.last_words = ""  # what it wrote to stderr last, once it has ended

    @classmethod
    async def start(cls, process: subprocess.Popen[bytes], nice: int = NICE) -> Worker:
        """The worker that `process` becomes once it is ready; `nice` from its first import on, which it could not see
        to itself. Raises EngineFailure when it does not come up."""
        assert process.stdin is not None
        assert process.stdout is not None
        lower_priority(process, nice)
        loop, answers = asyncio.get_running_loop(), asyncio.StreamReader()
        outward, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(answers), process.stdout)
        inward, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        worker = cls(process, answers, (outward, inward))
        try:
            await asyncio.wait_for(worker._read(), START_LIMIT)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await worker.end()
            logs.error(log, "worker_failed", exit_code=process.returncode, reason=worker.last_words)
            message = f"a worker process does not start (exit code {process.returncode}); the server's log says why"
            raise EngineFailure(message) from error
        except asyncio.CancelledError:
            worker.kill()
            worker.bury()
            raise
        return worker

    def defer(self, nice: int) -> None:
        """Leave the cores to others from now on."""
        lower_priority(self._process, nice)

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
        stream = self._process.stderr
        if stream is not None and not stream.closed:
            os.set_blocking(stream.fileno(), False)
            self.last_words = last_line(stream.read(LAST_WORDS) or b"")
            stream.close()

    async def _read(self) -> bytes:
        head = await self._answers.readexactly(LENGTH.size)
        return await self._answers.readexactly(LENGTH.unpack(head)[0])


def begin(folder: Path, options: TokenizerConfig) -> subprocess.Popen[bytes]:
    """A worker's process. From this thread, since it ends with it; not as uvloop begins one, which copies the memory
    map of this process and keeps every stream waiting for 20 ms."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.services.tokenizer.compile_worker", str(folder), str(os.getpid()),
         str(options.grammar_compile_timeout), str(options.grammar_compile_memory)],
        bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def lower_priority(process: subprocess.Popen[bytes], nice: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended: reading from it tells
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)


def last_line(text: bytes) -> str:
    """The last line of a process's complaint, in which Python and Rust say what it was."""
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:LONGEST_LINE] if lines else ""
