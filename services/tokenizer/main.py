"""The tokenizer process: `run` serves the api processes' text and the scheduler's tokens until it is told to end."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop
import zmq

from penstock.engine_core import folder
from penstock.engine_core.histogram import Histogram
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.parsers.dialect import read_dialect
from penstock.engine_core.placement.placement import Placement
from penstock.engine_core.text.controls import read_controls
from penstock.engine_core.text.frontend import Frontend
from penstock.engine_core.text.prompts import Prompter, PromptLimits
from penstock.engine_core.text.template import read_template
from penstock.engine_core.tokenizer.vocabulary import Vocabulary, end_tokens, read_vocabulary
from penstock.protocol.config import Config
from penstock.protocol.links import TEXT, TOKENS, Role, new_incarnation, shared_hash
from penstock.protocol.media import image_limit
from penstock.protocol.validation import read_template_kwargs
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Link
from penstock.services.links.tcp import network_of
from penstock.services.metrics.definitions import LAG
from penstock.services.metrics.exporter import Exporter, collect_tokenizer, keep_exporting
from penstock.services.supervisor import logs
from penstock.services.supervisor.process import ExitCode, StartupPhases, background_task
from penstock.services.supervisor.sd_notify import Heartbeat, notify, send_heartbeats
from penstock.services.tokenizer.grammar_compiler import GrammarCompiler
from penstock.services.tokenizer.image_decoder import ImageDecoder
from penstock.services.tokenizer.server_loop import TokenizerLoop, Workers
from penstock.services.tokenizer.template_worker import TemplateSettings
from penstock.services.tokenizer.templates import Templates
from penstock.services.tracing.startup import Start, tracer_of
from penstock.services.tracing.tokenizer import TokenizerTraces

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MAX_THREADS = 4  # for encoding long prompts
SWITCH = 0.0002  # seconds until the loop, with a step's text, takes the interpreter from a thread that renders a chat
GC_THRESHOLD = 50_000  # allocations between collections: messages are frozen and hold no cycles


def run(config: Config, index: int) -> int:
    """Serve until SIGTERM or SIGINT; running requests are finished first, up to the drain limit. The exit code.

    Raises PenstockError for a wrong model folder, option or peer. A second signal ends the process at once.
    """
    sys.setswitchinterval(SWITCH)
    return uvloop.run(serve(config, index))


async def serve(config: Config, index: int) -> int:
    stages = StartupPhases()
    stages.begin("reading the tokenizer")
    path = folder.resolve(config.model.model, config.model.revision)
    compiler = GrammarCompiler(path, config.tokenizer)
    compiler.start()  # its first worker reads the same files in parallel
    vocabulary = read_vocabulary(path)
    frontend, settings = read_frontend(config, path, vocabulary)
    templates = Templates(settings, config.tokenizer)
    decoder = image_decoder(config, settings.limits)
    if decoder is not None:
        decoder.start()
    end = End()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tracer = tracer_of(config.trace, Role.TOKENIZER, index)
    me = Identity(Role.TOKENIZER, index, new_incarnation(), shared_hash(config.model))
    start = Start(tracer, f"{Role.TOKENIZER}-{index}", stages)
    run_dir = Path(config.run.run_dir)
    network = network_of(context, config.links)
    text = AsyncLink(Link.bind(context, TEXT, me, run_dir, network))
    replicas = range(config.model.data_parallel_size)
    tokens = [AsyncLink(Link.connect(context, TOKENS, me, run_dir, replica, network)) for replica in replicas]
    threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "encode")
    loop = TokenizerLoop(frontend, text, tokens, threads, Workers(compiler, templates, decoder),
                  TokenizerTraces(tracer))  # fmt: skip
    collector = functools.partial(collect_tokenizer, loop, compiler, templates, decoder, text, tokens)
    other_host = text if network is not None and network.reaches(TEXT) else None
    exporter = Exporter(me, run_dir, Histogram(LAG), collector, tracer, remote=loop.remote, other_host=other_host)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    gc.enable()
    heartbeat = Heartbeat()
    tasks = [background_task(each, end.fail) for each in (send_heartbeats(heartbeat), keep_exporting(exporter))]
    try:
        await compiler.warm()  # the first grammar does not wait for a process
        if decoder is not None:
            await decoder.warm()
        text.start(loop.from_apis)
        for replica, watch in enumerate(tokens):
            watch.start(functools.partial(loop.from_scheduler, replica))
        heartbeat.tell("READY=1", "STATUS=serving")
        start.ready(time.monotonic())
        await end.wait()
        notify("STOPPING=1", "STATUS=draining")
        await loop.drain(config.run.drain_timeout)
    finally:
        for task in tasks:
            task.cancel()
        exporter.close()
        loop.close()
        compiler.close()
        templates.close()
        if decoder is not None:
            decoder.close()
        text.close()
        for watch in tokens:
            watch.close()
        threads.shutdown(wait=False, cancel_futures=True)
        context.term()
        tracer.close()
    statistics = loop.statistics().frontend
    logs.info(log, "ended", submitted=statistics.submitted, output_tokens=statistics.output_tokens)
    return ExitCode.ORDERLY


def read_frontend(config: Config, path: Path, vocabulary: Vocabulary) -> tuple[Frontend, TemplateSettings]:
    """The frontend, read from the model's folder, and the settings of template workers.

    Raises ModelError and ConfigError.
    """
    spec = read_spec(path)
    options = config.tokenizer
    names = {**vocabulary.names, **read_template_kwargs(options.default_chat_template_kwargs)}
    template = read_template(path, names, options.chat_template)
    limits = PromptLimits(
        vocab_size=spec.vocab_size,
        max_model_len=folder.model_length(spec, config.model),
        eos_token_ids=end_tokens(path, vocabulary),
        headless=spec.headless,
        recurrent=bool(spec.recurrences),
        vision=spec.vision,
        remember=config.scheduler.enable_prefix_caching,
    )
    dialect = read_dialect(template.source, vocabulary, options.tool_call_parser, options.reasoning_parser)
    controls = read_controls(vocabulary, template.source, dialect) if options.split_special_tokens else None
    texts = None if controls is None else controls.texts
    settings = TemplateSettings(
        str(path), options.chat_template, limits, names, dialect, texts, options.template_timeout,
        options.template_memory,
    )  # fmt: skip
    prompter = Prompter(vocabulary, template, limits, dialect, controls)
    return Frontend(vocabulary, prompter, placement_of(config)), settings


def image_decoder(config: Config, limits: PromptLimits) -> ImageDecoder | None:
    """The decoder of a model that sees images; None for others, and where the operator allows no image."""
    most = image_limit(config.model)
    return ImageDecoder(limits.vision.processor, most, config.tokenizer) if limits.vision is not None and most else None


def placement_of(config: Config) -> Placement:
    """How requests are distributed among replicas. Without prefix caching, prefixes do not matter."""
    policy, model = config.tokenizer.placement, config.model
    if policy == "prefix" and not config.scheduler.enable_prefix_caching:
        policy = "least_loaded"
    return Placement(
        policy, model.data_parallel_size, model.block_size, model.prefill_replicas,
        config.tokenizer.max_local_prefill_length,
    )  # fmt: skip


class End:
    """The end of the process: by a signal, or by an error in a callback or background task, which `wait` raises."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._signalled)
        self._loop.set_exception_handler(self._failed)

    async def wait(self) -> None:
        await self._end

    def _signalled(self) -> None:
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)
        if not self._end.done():
            self._end.set_result(None)

    def fail(self, error: Exception) -> None:
        """Make `wait` raise `error`, unless it has returned."""
        if not self._end.done():
            self._end.set_exception(error)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception) and not self._end.done():
            self.fail(error)
        else:
            loop.default_exception_handler(context)
