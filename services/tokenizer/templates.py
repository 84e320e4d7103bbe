"""Templates of requests are rendered in worker processes, with limits of CPU time and memory, and what a tokenizer may
have died of is tried there.

Workers are started when the first such request comes and stay. A request waits for requests of its kind alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys

import msgspec

from penstock.engine_core.text.rendering import Rendered, read_list
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.errors import EngineFailure, InvalidRequest, Overloaded
from penstock.protocol.messages import Detokenize, SubmitText, Tokenize
from penstock.services.supervisor import logs
from penstock.services.tokenizer.compile_process import ROOT, End, Worker
from penstock.services.tokenizer.grammar_compiler import ATTEMPTS, MOST_WAITING, PATIENCE
from penstock.services.tokenizer.template_protocol import ANSWER, Answer, Complaint, Order, Printed, Setting, Trial
from penstock.services.tokenizer.template_worker import TRIAL_SECONDS, environment, too_large, too_slow

log = logging.getLogger(__name__)

# Beside the rendering's own CPU time: compiling the template, and reading a long conversation and its text.
SLACK = 5.0

Question = SubmitText | Tokenize | Detokenize


class TemplateStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what stands now."""

    workers: int  # now
    waiting: int  # now: renderings without a worker
    remembered: int  # now: bytes of sources that workers keep compiled
    rendered: int
    refused: int
    ended: int  # renderings that passed a limit or died; some took their worker with them


class Templates:
    """Owner of the workers. Lives on one asyncio loop."""

    def __init__(self, setting: Setting, options: TokenizerConfig) -> None:
        self._options = options
        self._setting = msgspec.msgpack.encode(setting)
        self._idle: list[Worker] = []
        self._remembered: dict[Worker, int] = {}  # of all workers: bytes
        self._seats = asyncio.Semaphore(options.template_workers)
        self._waiting = self._rendered = self._refused = self._ended = 0

    async def render(self, request: SubmitText, now: float) -> Rendered:
        """The chat's text by the request's own template. `now` in unix seconds is what a template knows as the time.

        Raises InvalidRequest, Overloaded, EngineFailure.
        """
        if self._waiting >= MOST_WAITING:
            raise Overloaded("too many templates of requests wait to be rendered")
        self._waiting += 1
        try:
            await self._seats.acquire()
        finally:
            self._waiting -= 1
        try:
            body = msgspec.msgpack.encode(Order(request, now))
            answer = await self._answer(body, self._options.template_timeout)
        finally:
            self._seats.release()
        self._ended += answer.ended
        if isinstance(answer.outcome, Complaint):
            self._refused += 1
            raise InvalidRequest(answer.outcome.message, param=answer.outcome.param, code=answer.outcome.code)
        assert isinstance(answer.outcome, Printed)
        self._rendered += 1
        return msgspec.structs.replace(answer.outcome.rendered, tools=read_list(request.tools, "tools"))

    async def fatal(self, question: Question, now: float, rendered: Rendered | None) -> str:
        """How it is told that a process dies that does with it what a tokenizer does; empty: it does not."""
        async with self._seats:
            try:
                answer = await self._answer(msgspec.msgpack.encode(Trial(question, now, rendered)), TRIAL_SECONDS)
            except EngineFailure:  # nothing can be tried, so it goes on: its api process counts the deaths
                return ""
        return answer.outcome.message if isinstance(answer.outcome, Complaint) else ""

    def close(self) -> None:
        """End the workers."""
        for worker in self._remembered:
            worker.kill()
        for worker in self._remembered:
            worker.bury()

    def statistics(self) -> TemplateStatistics:
        """Counters for metrics and tests."""
        return TemplateStatistics(
            workers=len(self._remembered),
            waiting=self._waiting,
            remembered=sum(self._remembered.values()),
            rendered=self._rendered,
            refused=self._refused,
            ended=self._ended,
        )

    async def _answer(self, body: bytes, seconds: float) -> Answer:
        """What a worker says. One that a template ended is replaced; one that is killed costs time only."""
        options = self._options
        for _ in range(ATTEMPTS):
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                found = await worker.ask(body, seconds * PATIENCE + SLACK)
            except asyncio.CancelledError:  # an answer that nobody takes would be the next order's
                self._remembered.pop(worker, None)
                worker.kill()
                asyncio.get_running_loop().run_in_executor(None, worker.bury)
                raise
            if not isinstance(found, End):
                answer = ANSWER.decode(found)
                self._remembered[worker] = answer.remembered
                self._idle.append(worker)
                return answer
            self._remembered.pop(worker, None)
            logs.warning(log, "template_worker_ended", reason=found.value)
            if found is End.TIME:
                return Answer(too_slow(options.template_timeout), ended=True)
            if found is End.MEMORY:
                return Answer(too_large(options.template_memory), ended=True)
        raise EngineFailure("templates of requests cannot be rendered at this time")

    async def _start(self) -> Worker:
        try:
            worker = await Worker.start(begin())
        except OSError as error:
            logs.error(log, "worker_failed", reason=str(error))
            raise EngineFailure("a template worker does not start; the server's log says why") from error
        worker.tell(self._setting)
        self._remembered[worker] = 0
        return worker


def begin() -> subprocess.Popen[bytes]:
    """A worker's process. As compile workers begin: from this thread, since it ends with it, and past uvloop."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.services.tokenizer.template_worker", str(os.getpid())],
        bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**environment(os.environ), "PYTHONPATH": paths},
    )  # fmt: skip
