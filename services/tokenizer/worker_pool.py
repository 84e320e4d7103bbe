"""Compile workers that are warm: one more than are at work, so that nobody waits for one to start.

The first is there before the server is ready; when one is ended, or one more is needed, the next has started already.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from penstock.protocol.config import TokenizerConfig
from penstock.protocol.errors import EngineFailure
from penstock.services.supervisor import logs
from penstock.services.tokenizer.compile_process import NICE, Worker, begin

log = logging.getLogger(__name__)


class Stock:
    """Owner of the workers. Lives on one asyncio loop."""

    def __init__(self, folder: Path, options: TokenizerConfig) -> None:
        self._folder = folder
        self._options = options
        self.workers: set[Worker] = set()  # that have started and not ended
        self._idle: list[Worker] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._wanting: list[asyncio.Future[Worker]] = []  # who waits for a worker, in order
        self._nice = 0  # the first one has the cores while the server starts

    def fill(self) -> None:
        """Start what is missing. Beyond those at work there is one, whatever limits how many work at once."""
        missing = max(1, len(self._wanting)) - len(self._idle) - len(self._starting)
        for _ in range(missing):
            task = asyncio.get_running_loop().create_task(self._start())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def warm(self) -> None:
        """Wait until there is a worker, or none can be started, which the log has said."""
        while self._starting and not self.workers:
            await asyncio.wait(set(self._starting))
        for worker in self.workers:
            worker.defer(NICE)
        self._nice = NICE

    async def take(self) -> Worker:
        """A worker for one compilation. Raises EngineFailure where none starts."""
        self._nice = NICE  # streams come first
        if self._idle:
            worker = self._idle.pop()
        else:
            wanted: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
            self._wanting.append(wanted)
            self.fill()
            try:
                worker = await wanted
            finally:
                if wanted in self._wanting:
                    self._wanting.remove(wanted)
        self.fill()
        return worker

    def give_back(self, worker: Worker) -> None:
        """It has done its work."""
        while self._wanting:
            wanted = self._wanting.pop(0)
            if not wanted.done():
                wanted.set_result(worker)
                return
        self._idle.append(worker)

    def discard(self, worker: Worker) -> None:
        """It has ended."""
        self.workers.discard(worker)
        self.fill()

    def close(self) -> None:
        """End them all."""
        for task in self._starting:
            task.cancel()
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.bury()

    async def _start(self) -> None:
        try:
            worker = await Worker.start(begin(self._folder, self._options), self._nice)
        except (EngineFailure, OSError) as error:
            failure = error if isinstance(error, EngineFailure) else EngineFailure("a compile worker does not start")
            if isinstance(error, OSError):
                logs.error(log, "worker_failed", reason=str(error))
            if len(self._starting) == 1 and not self.workers:  # nobody else can serve those who wait
                for wanted in self._wanting:
                    if not wanted.done():
                        wanted.set_exception(failure.with_traceback(None))
            return
        self.workers.add(worker)
        self.give_back(worker)
