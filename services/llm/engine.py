"""The engine behind `LLM` and `AsyncLLM`: its processes, an engine client, and a bounded window of open requests.

It takes the place of the api process, with the same engine client, credits and aborts, but without HTTP.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import zmq

from penstock.engine_core import folder
from penstock.protocol.columns import pack, unpack
from penstock.protocol.config import Config, fields
from penstock.protocol.control import EngineStatus
from penstock.protocol.engine_config import PRIORITY
from penstock.protocol.errors import ConfigError, ModelError, Overloaded, PenstockError, RequestError, Unavailable
from penstock.protocol.links import TEXT, Role, new_incarnation, shared_hash
from penstock.protocol.messages import Detokenize, Detokenized, SubmitText, Tokenize, Tokenized, TraceContext
from penstock.protocol.option import Field
from penstock.services.client.engine_client import EngineClient
from penstock.services.client.model_info import ModelInfo, read_model_info
from penstock.services.client.output_collector import OutputCollector
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Arrival, Link
from penstock.services.links.tcp import network_of
from penstock.services.llm.launcher_process import LauncherProcess
from penstock.services.llm.outputs import OutputBuilder, RequestOutput
from penstock.services.llm.params import RequestOutputKind, SamplingParams
from penstock.services.llm.prompts import Request
from penstock.services.metrics.requests import Timings
from penstock.services.openai.completions import check_ids
from penstock.services.openai.embeddings import Vector, vectors_of
from penstock.services.openai.parameters import NEUTRAL
from penstock.services.supervisor.foreign_flags import did_you_mean, look_up, read_table
from penstock.services.supervisor.options import Given, merge, read_file, sized, usable_cores
from penstock.services.supervisor.preflight import resolved
from penstock.services.tracing.startup import environment, tracer_of
from penstock.services.tracing.tracer import Operations

log = logging.getLogger(__name__)

PROGRAM = "llm"  # this process's name in traces
INDEX = 0  # of this process, the engine's only client
SPARE = 64  # open requests beyond two full batches
LAST_WORDS = 3.0  # seconds that a failed engine gets to report why
RETRY = 0.005  # seconds between attempts while the link is full
ORIGIN = "keyword"
LOG_LEVEL = "warning"  # by default: the engine logs to the program's own stderr


# Of vLLM's classes, with what to do instead.
ABSENT: Mapping[str, str] = {
    "beam_search": "beams are not searched; `n` and a temperature give several choices",
    "reward": "reward models are not served",
    "abort": "leave the loop over the outputs, or cancel its task",
    "shutdown": "it is called `close`",
    "sleep": "close the engine, and make it again",
    "wake_up": "close the engine, and make it again",
    "reset_prefix_cache": "a prompt with a `cache_salt` of its own shares nothing",
    "set_tokenizer": "the tokenizer is that of the model's folder",
    "collective_rpc": "the engine's processes run no code of the program",
    "apply_model": "the engine's processes run no code of the program",
    "start_profile": "option `otlp_endpoint` sends traces of every step",
    "stop_profile": "option `otlp_endpoint` sends traces of every step",
    "get_metrics": "the property `status` has the engine's totals",
    "llm_engine": "the property `model` describes the model, `status` the engine",
}


class Engine:
    """The processes start at once. The links belong to the loop that awaits `start`, and are used only there. The
    options are those of `penstock serve`, by name."""

    def __init__(self, model: str, options: Mapping[str, object]) -> None:
        """Raises ConfigError and ModelError."""
        config = resolved(sized(configured(model, options), usable_cores()))
        self.model = read_model_info(config)
        self._tracer = tracer_of(config.trace, PROGRAM, INDEX)
        with contextlib.ExitStack() as failing:
            failing.callback(self._tracer.close)
            caller = self._tracer.current()  # the start of the processes is a part of the program's span
            self.launcher = LauncherProcess(config, environment=environment(caller) if caller.sampled else None)
            failing.pop_all()
        self.config = self.launcher.config
        slots = config.model.data_parallel_size * config.model.max_num_seqs
        self.window = min(2 * slots + SPARE, config.api.max_queued_requests)
        self._engine_client: EngineClient | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._watches: list[AsyncLink] = []
        self._timings = Timings()
        self._started: asyncio.Future[None] | None = None
        self._failed = asyncio.Event()
        self._room = asyncio.Semaphore(self.window)
        self._ended = False
        self._owner = os.getpid()

    @property
    def owned(self) -> bool:
        """Whether this is the process that started the engine."""
        return os.getpid() == self._owner

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child, where the parent's threads and sockets do not work."""
        if not self.owned:
            raise RuntimeError(
                f"this engine belongs to process {self._owner}, which started it, and this is a forked child "
                f"({os.getpid()}): make the LLM in the child, or start processes with `spawn`"
            )

    @functools.cached_property
    def tokenizer(self) -> Any:
        """As `load_tokenizer` makes it."""
        return load_tokenizer(self.config, self.model)

    @property
    def engine_client(self) -> EngineClient:
        assert self._engine_client is not None, "start() first"
        return self._engine_client

    async def start(self) -> None:
        """Wait until the engine is ready. Raises the error that ended a process."""
        self.check_process()
        if self._started is None:
            self._connect()
        assert self._started is not None
        await asyncio.shield(self._started)

    async def generate(
        self, request: Request, request_id: str, kind: RequestOutputKind, *, return_errors: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they grow, the last one `finished`; closing the generator early aborts the request.

        Raises RequestError, which `return_errors` puts into an output instead, and the error that ended a process.
        """
        async with self._open(request.submit, stream=kind is not RequestOutputKind.FINAL_ONLY) as collector:
            collector.name = request_id
            builder = OutputBuilder(collector, request, request_id, kind)
            finished = False
            while not finished:
                updated = await collector.get()
                if (failure := collector.failure) is not None:
                    error = await self._reason(failure)
                    del failure
                    if return_errors and isinstance(error, RequestError):
                        yield builder.failed(error)
                        return
                    try:
                        raise error
                    finally:
                        del error  # this frame, which the traceback holds, must not hold the error
                output = builder.take(updated)
                finished = output.finished
                yield output

    async def embed(self, submit: SubmitText) -> Vector:
        """The vector of one prompt. Raises as `generate` does."""
        async with self._open(submit, stream=False) as collector:
            await collector.get()
            if collector.error is not None:
                raise await self._reason(collector.error)
            (vector,) = vectors_of(collector)
            return vector

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        found = await self._ask(Tokenize(prompt=text, add_special_tokens=add_special_tokens))
        assert isinstance(found, Tokenized)
        return unpack("i", found.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        if not token_ids:
            return ""
        check_ids(list(token_ids), "token_ids", self.model)
        found = await self._ask(Detokenize(token_ids=pack("i", token_ids)))
        assert isinstance(found, Detokenized)
        return found.text

    async def close(self) -> None:
        """Disconnect and end every process. Does nothing in a forked child."""
        if not self.owned:
            return
        self.disconnect()
        await asyncio.get_running_loop().run_in_executor(None, self.end)

    def end(self) -> None:
        """End every process, and export the remaining traces. Safe to call twice. Does nothing in a forked child."""
        if not self.owned:
            return
        self._tracer.finish()  # while the processes do the same
        self.launcher.end()
        self._tracer.close()

    def disconnect(self) -> None:
        """Close the links; open requests end with an error. Called on the engine's loop."""
        if self._ended or self._engine_client is None:
            self._ended = True
            return
        self._ended = True
        self._fail(Unavailable("the engine was closed", code="closed"))
        loop = asyncio.get_running_loop()
        for descriptor in (self.launcher.notices.fileno(), self.launcher.pidfd):
            loop.remove_reader(descriptor)
        for watch in self._watches:
            watch.close()
        self._context.term()

    @asynccontextmanager
    async def _open(self, submit: SubmitText, *, stream: bool) -> AsyncIterator[OutputCollector]:
        """Submit a request once the window has room; aborted if the block is left early."""
        async with self._room:
            trace = submit.trace
            if self._tracer.enabled:
                trace = self._tracer.sample(trace if trace.traceparent else self._tracer.current()) or TraceContext()
            submit = msgspec.structs.replace(submit, stream=stream, trace=trace)
            collector = OutputCollector(1, submit.n, stream=stream, timings=self._timings, now=time.monotonic())
            while True:
                try:
                    self.engine_client.submit([submit], collector, time.monotonic())
                    break
                except Overloaded:
                    await asyncio.sleep(RETRY)
                except Unavailable as error:
                    raise await self._reason(error) from error
            try:
                yield collector
            finally:
                self.engine_client.abort(collector)
                if not collector.ended:
                    collector.disconnect()
                collector.end_trace(time.monotonic())

    async def _ask(self, call: Tokenize | Detokenize) -> Tokenized | Detokenized:
        while True:
            try:
                return await self.engine_client.call(call)
            except Overloaded:
                await asyncio.sleep(RETRY)

    async def _reason(self, error: PenstockError) -> PenstockError:
        """The cause of a request's error; an engine that lost a process reports it a moment later."""
        if isinstance(error, Unavailable) and not self._ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._failed.wait(), LAST_WORDS)
        return self.launcher.failure or error

    def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        # Retrieves the exception, so that asyncio does not warn of a failed start that is not awaited.
        self._started.add_done_callback(lambda started: started.cancelled() or started.exception())
        incarnation = new_incarnation()
        me = Identity(Role.API, INDEX, incarnation, shared_hash(self.config.model))
        network = network_of(self._context, self.config.links)
        self._watches = [
            AsyncLink(Link.connect(self._context, TEXT, me, self.launcher.directory, number, network))
            for number in range(self.config.tokenizer.tokenizer_processes)
        ]
        # A program may hold the interpreter for long, so a late heartbeat does not mean that the engine hangs.
        self._engine_client = EngineClient(
            self._watches, INDEX, incarnation, self.window, math.inf, processes=1,
            replicas=self.config.model.data_parallel_size,
            ordered=self.config.scheduler.scheduling_policy == PRIORITY,
            operations=Operations(self._tracer, self.model.name),
        )  # fmt: skip
        for watch in self._watches:
            watch.start(self._deliver)
        loop.add_reader(self.launcher.notices.fileno(), self._poll)
        loop.add_reader(self.launcher.pidfd, self._poll)
        self._poll()

    def _deliver(self, arrivals: list[Arrival]) -> None:
        now = time.monotonic()
        self.engine_client.receive(arrivals, now)
        assert self._started is not None
        if not self._started.done() and self.engine_client.ready(now):
            self._started.set_result(None)

    def _poll(self) -> None:
        """The launcher sent a notice, or ended."""
        self.launcher.poll()
        failure = self.launcher.failure
        if failure is None:
            return
        asyncio.get_running_loop().remove_reader(self.launcher.pidfd)
        self._failed.set()
        assert self._started is not None
        if not self._started.done():
            self._started.set_exception(failure)
        self._fail(Unavailable(str(failure), code="part_lost"))

    def _fail(self, error: Unavailable) -> None:
        self.engine_client.draining = True
        self.engine_client.fail_all(error)


class EngineProperties:
    """What `LLM` and `AsyncLLM` both expose of their engine."""

    _engine: Engine

    @property
    def model(self) -> ModelInfo:
        """Names, sizes and defaults of the model."""
        return self._engine.model

    @property
    def status(self) -> EngineStatus | None:
        """The engine's last heartbeat, once it has started: running and waiting requests, blocks, totals."""
        return self._engine.engine_client.status

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters that begin with the model's own defaults, to be changed and used."""
        generation = self.model.generation
        own = {name: value for name in NEUTRAL if (value := getattr(generation, name)) is not None}
        return SamplingParams(**own)

    if not TYPE_CHECKING:  # it would hide mistakes from type checkers

        def __getattr__(self, name: str) -> NoReturn:
            """Say why what vLLM's class has is not there."""
            reason = f": {ABSENT[name]}" if name in ABSENT else ""
            message = f"{type(self).__name__!r} object has no attribute {name!r}{reason}"
            raise AttributeError(message, name=name, obj=self)


class Finalizer:
    """Calls `end` once: when called, when `owner` is collected, or at exit. `end` must not refer to `owner`.

    The garbage collector may run on any thread: on the engine's own loop, or under a lock that the loop needs. So it
    calls `end` on a new thread, for which the interpreter waits at exit.
    """

    def __init__(self, owner: object, end: Callable[[], None]) -> None:
        self._end = end
        self._finalizer = weakref.finalize(owner, self._collected)
        self._finalizer.atexit = False  # no thread can be started then
        atexit.register(self)

    @property
    def alive(self) -> bool:
        """Whether `end` has not been called yet."""
        return self._finalizer.alive

    def __call__(self) -> None:
        atexit.unregister(self)
        if self._finalizer.detach() is not None:
            self._end()

    def _collected(self) -> None:
        atexit.unregister(self)
        threading.Thread(target=self._end, name="penstock-end").start()


def configured(model: str, keywords: Mapping[str, object]) -> Config:
    """The configuration from keywords. `config` names a file of options, which keywords override; JSON options may be
    dicts, and None leaves an option out. vLLM's keywords are taken, left out or refused as its flags are.

    Raises ConfigError for unknown options, wrong values, and options of the HTTP server.
    """
    known = {field.name: field for field in fields()}
    given = [Given(known["log_level"], LOG_LEVEL, ORIGIN)]
    rest = dict(keywords)
    file = rest.pop("config", None)
    if file is not None:
        given += read_file(Path(str(file)))
    if model:
        given.append(Given(known["model"], model, ORIGIN))
    without_effect = []
    for name, value in rest.items():
        field = known.get(name)
        if field is None:
            field, value = foreign_option(name, value, known)
        if field is None:
            without_effect.append(name)
        if field is None or value is None:
            continue
        if field.section == "api":
            raise ConfigError(name, value, "it is an option of the HTTP server, which the Python API does not start")
        given.append(Given(field, json.dumps(value) if isinstance(value, Mapping) else value, ORIGIN))
    if without_effect:
        log.warning("keywords without effect: %s", ", ".join(without_effect))
    return merge(given).config


def foreign_option(name: str, value: object, known: Mapping[str, Field]) -> tuple[Field | None, object]:
    """The option that a keyword of vLLM's means, and its value; no option where it has no effect.

    Raises ConfigError for a keyword that is refused, and for one that is nobody's.
    """
    found, _ = look_up("--" + name.replace("_", "-"), read_table())
    if found is None:
        raise ConfigError(name, value, "there is no such option" + did_you_mean(name, [*known, "config"]))
    own = found.option.removeprefix("--").replace("-", "_")
    if found.value:
        return (known[own], found.value) if value else (None, None)
    if own in known:
        return known[own], value
    if own:
        return known[own.removeprefix("no_")], not value
    if value and (why := found.why_not([] if value is True else [str(value)])):
        raise ConfigError(name, value, why)
    return None, None


def load_tokenizer(config: Config, model: ModelInfo) -> Any:
    """The model's tokenizer as transformers loads it, with the chat template that is in effect. Raises ModelError."""
    import transformers  # seconds, for those who ask

    path = folder.resolve(config.model.model, config.model.revision)
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ModelError(f"{path}: transformers cannot load its tokenizer: {error}") from error
    if (template := msgspec.json.decode(model.tokenizer).get("chat_template")) is not None:
        found.chat_template = template
    return found
