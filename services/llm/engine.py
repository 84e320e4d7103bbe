"""An engine as a coroutine sees it: its processes, the links to its tokenizers, and a bounded window of open requests.

This is the api's end of the pipeline without HTTP: the same tickets, credits and aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import zmq

from penstock.protocol.config import PRIORITY, Config
from penstock.protocol.errors import Overloaded, PenstockError, Unavailable
from penstock.protocol.links import TEXT, Role, new_incarnation, shared_hash
from penstock.protocol.messages import Detokenize, Detokenized, Tokenize, Tokenized, TraceContext
from penstock.services.client.engine_client import Pipeline, PipelineStatistics
from penstock.services.client.model_info import served_model
from penstock.services.client.output_collector import Reply
from penstock.services.links.async_link import Watch
from penstock.services.links.link import Arrival, Port, Self
from penstock.services.links.tcp import network_of
from penstock.services.llm.host import Host
from penstock.services.llm.outputs import Gathering
from penstock.services.llm.params import RequestOutputKind
from penstock.services.llm.prompts import Order
from penstock.services.metrics.requests import Timings
from penstock.services.supervisor.options import sized, usable_cores
from penstock.services.supervisor.preflight import resolved
from penstock.services.tracing.request import Operations
from penstock.services.tracing.startup import environment
from penstock.services.tracing.tracer import tracer_of

PROGRAM = "llm"  # as which a program tells its traces
INDEX = 0  # of the one api-role peer of an engine
SPARE = 64  # open requests beyond two full batches
LAST_WORDS = 3.0  # seconds that an engine which failed gets to say why
RETRY = 0.005  # seconds between attempts while the link takes no more


class Engine:
    """Started when it is made; its links belong to the loop that awaits `start`. Used from that loop alone."""

    def __init__(self, config: Config) -> None:
        config = resolved(sized(config, usable_cores()))
        self.model = served_model(config)
        self._tracer = tracer_of(config.trace, PROGRAM, INDEX)
        with contextlib.ExitStack() as failing:
            failing.callback(self._tracer.close)
            caller = self._tracer.current()  # the start of the engine's processes is a part of the program's span
            self.host = Host(config, more=environment(caller) if caller.sampled else None)
            failing.pop_all()
        self.config = self.host.config
        slots = config.model.data_parallel_size * config.model.max_num_seqs
        self.window = min(2 * slots + SPARE, config.api.max_queued_requests)
        self._pipeline: Pipeline | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._watches: list[Watch] = []
        self._timings = Timings()
        self._started: asyncio.Future[None] | None = None
        self._over = asyncio.Event()  # the engine has failed
        self._room = asyncio.Semaphore(self.window)
        self._ended = False
        self._owner = os.getpid()

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child: threads and sockets of the parent's engine do not work there."""
        if not self.owned():
            raise RuntimeError(
                f"this engine belongs to process {self._owner}, which started it, and this is a forked child "
                f"({os.getpid()}): make the LLM in the child, or start processes with `spawn`"
            )

    def owned(self) -> bool:
        """Whether this is the process that started the engine."""
        return os.getpid() == self._owner

    @property
    def pipeline(self) -> Pipeline:
        assert self._pipeline is not None, "start() first"
        return self._pipeline

    async def start(self) -> None:
        """Wait until requests are served. Raises the error that a process ended with."""
        self.check_process()
        if self._started is None:
            self._connect()
        assert self._started is not None
        await asyncio.shield(self._started)

    @asynccontextmanager
    async def request(self, order: Order, *, stream: bool = False) -> AsyncIterator[Reply]:
        """A reply that grows while inside, once the window has room; left early, the request is aborted.

        Raises RequestError when it is refused, and the error that a process ended with.
        """
        async with self._room:
            trace = order.submit.trace
            if self._tracer.enabled:
                parent = trace if trace.traceparent else self._tracer.current()
                trace = self._tracer.sample(parent) or TraceContext()
            submit = msgspec.structs.replace(order.submit, id=self.pipeline.new_id(), stream=stream, trace=trace)
            reply = Reply(1, submit.n, stream=stream, timings=self._timings, now=time.monotonic())
            while True:
                try:
                    self.pipeline.submit([submit], reply, time.monotonic())
                    break
                except Overloaded:
                    await asyncio.sleep(RETRY)
                except Unavailable as error:
                    raise await self.reason(error) from error
            try:
                yield reply
            finally:
                self.pipeline.drop(reply)
                if not reply.ended:
                    reply.leave()
                reply.told(time.monotonic())

    def gathering(self, reply: Reply, order: Order, name: str, kind: RequestOutputKind) -> Gathering:
        use = order.submit.tool_use
        return Gathering(
            reply, name, order.prompt, kind, logprobs=order.params.logprobs is not None, arrival=order.submit.arrival,
            customs=frozenset(custom.name for custom in use.customs) if use is not None else frozenset(),
        )  # fmt: skip

    async def ask(self, question: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """As `Pipeline.ask`; the question's id is filled here."""
        while True:
            try:
                return await self.pipeline.ask(msgspec.structs.replace(question, id=self.pipeline.new_id()))
            except Overloaded:
                await asyncio.sleep(RETRY)

    async def reason(self, error: PenstockError) -> PenstockError:
        """What is behind an error of a reply: an engine that lost a part ends, and says why a moment later."""
        if isinstance(error, Unavailable) and not self._ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), LAST_WORDS)
        return self.host.failure or error

    def statistics(self) -> PipelineStatistics:
        return self.pipeline.statistics()

    async def close(self) -> None:
        """Abort what runs, say goodbye, and end every process. Does nothing in a forked child."""
        if not self.owned():
            return
        self.disconnect()
        await asyncio.get_running_loop().run_in_executor(None, self.end)

    def end(self) -> None:
        """End every process, and tell the last traces. Safe to call twice. Does nothing in a forked child."""
        if not self.owned():
            return
        self._tracer.finish()  # beside the processes, which do the same
        self.host.end()
        self._tracer.close()

    def disconnect(self) -> None:
        """Close the links; what is open ends with an error. On the engine's loop."""
        if self._ended or self._pipeline is None:
            self._ended = True
            return
        self._ended = True
        self._fail(Unavailable("the engine was closed", code="closed"))
        loop = asyncio.get_running_loop()
        for descriptor in (self.host.notices.fileno(), self.host.pidfd):
            loop.remove_reader(descriptor)
        for watch in self._watches:
            watch.close()
        self._context.term()

    def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        self._started.add_done_callback(retrieve)
        incarnation = new_incarnation()
        me = Self(Role.API, INDEX, incarnation, shared_hash(self.config.model))
        network = network_of(self._context, self.config.links)
        self._watches = [
            Watch(Port.connect(self._context, TEXT, me, self.host.directory, number, network))
            for number in range(self.config.tokenizer.tokenizer_processes)
        ]
        # A program may hold its interpreter for long: a late heartbeat is no sign that the engine hangs.
        self._pipeline = Pipeline(
            self._watches, INDEX, incarnation, self.window, math.inf, processes=1,
            replicas=self.config.model.data_parallel_size,
            ordered=self.config.scheduler.scheduling_policy == PRIORITY,
            operations=Operations(self._tracer, self.model.name),
        )  # fmt: skip
        for watch in self._watches:
            watch.start(self._deliver)
        loop.add_reader(self.host.notices.fileno(), self._hear)
        loop.add_reader(self.host.pidfd, self._hear)
        self._hear()

    def _deliver(self, arrivals: list[Arrival]) -> None:
        now = time.monotonic()
        self.pipeline.receive(arrivals, now)
        assert self._started is not None
        if not self._started.done() and self.pipeline.ready(now):
            self._started.set_result(None)

    def _hear(self) -> None:
        """The engine said something, or ended."""
        self.host.hear()
        failure = self.host.failure
        if failure is None:
            return
        asyncio.get_running_loop().remove_reader(self.host.pidfd)
        self._over.set()
        assert self._started is not None
        if not self._started.done():
            self._started.set_exception(failure)
        self._fail(Unavailable(str(failure), code="part_lost"))

    def _fail(self, error: Unavailable) -> None:
        self.pipeline.draining = True
        self.pipeline.fail_all(error)


def retrieve(started: asyncio.Future[None]) -> None:
    """Nobody may ever await a start that failed; asyncio need not complain."""
    if not started.cancelled():
        started.exception()
