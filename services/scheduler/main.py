"""The scheduler process: one thread that polls two links and runs the loop."""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zmq

from penstock.engine_core import folder
from penstock.engine_core.grammar.tokens import GrammarTokens, read_tokens
from penstock.engine_core.models.spec import read_spec
from penstock.engine_core.tokenizer.vocabulary import read_vocabulary
from penstock.protocol.config import Config
from penstock.protocol.errors import ModelError
from penstock.protocol.links import STEPS, TOKENS, Role, new_incarnation, shared_hash
from penstock.protocol.messages import Automaton
from penstock.protocol.speculation import read_speculative
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Link
from penstock.services.links.tcp import network_of
from penstock.services.metrics.exporter import Exporter, scheduler_collector
from penstock.services.scheduler.bitmask_filler import BitmaskFiller
from penstock.services.scheduler.grammar_queue import GrammarQueue, prepared
from penstock.services.scheduler.options import ModelFacts
from penstock.services.scheduler.server_loop import SchedulerLoop
from penstock.services.supervisor import logs
from penstock.services.supervisor.process import StartupPhases, Stop
from penstock.services.supervisor.sd_notify import Heartbeat, notify
from penstock.services.tracing.scheduler import SchedulerTraces
from penstock.services.tracing.startup import Start, tracer_of

log = logging.getLogger(__name__)

WAITING = "waiting for the executor"
USUAL = Automaton(source='{"grammars": [{"json_schema": {"type": "object"}}]}')  # fills tables that all automata share
GUIDE_THREADS = 2  # threads that make automata, so that a slow one does not hold up the next
GUIDE_NICE = 10  # of these threads, by which their core falls to streams; they hold the interpreter for moments alone
SWITCH = 0.0002  # seconds until a thread that has made masks gets the interpreter from the loop


def run(config: Config, index: int) -> int:
    """Schedule until SIGTERM or SIGINT; running requests are finished first, up to the drain limit. The exit code.

    Raises ModelError or ConfigError when the model's folder and the options do not go together.
    """
    stop, stages = Stop(), StartupPhases()
    sys.setswitchinterval(SWITCH)
    model = folder.resolve(config.model.model, config.model.revision)
    spec = read_spec(model, config.model.quantization)
    folder.check_prefill_replicas(spec, config.model)
    length, recurrent = folder.model_length(spec, config.model), bool(spec.recurrences)
    facts = ModelFacts(length, spec.vocab_size, spec.encoder, recurrent, spec.vision)
    grammar_tokens = None if spec.headless else tokens_of(model)
    fillers = config.scheduler.mask_threads or max(1, min(4, len(os.sched_getaffinity(0)) // 4))
    grammars = GrammarQueue(grammar_tokens, ThreadPoolExecutor(GUIDE_THREADS, "guide", os.nice, (GUIDE_NICE,)), fillers,
                    config.scheduler.grammar_cache_bytes)  # fmt: skip
    threads = ThreadPoolExecutor(1, "masks"), ThreadPoolExecutor(fillers, "late masks")
    bitmasks = BitmaskFiller(grammar_tokens, *threads, fillers)
    tracer = tracer_of(config.trace, Role.SCHEDULER, index)
    me = Identity(Role.SCHEDULER, index, new_incarnation(), shared_hash(config.model))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    run_dir = Path(config.run.run_dir)
    network = network_of(context, config.links)
    tokens, steps = (Link.bind(context, link, me, run_dir, network) for link in (TOKENS, STEPS))
    # An epoch must differ from every one of this server's earlier schedulers: an executor may still answer to those.
    steps.epoch = int(time.time())
    try:
        loop = SchedulerLoop(config, facts, tokens, steps, grammars, bitmasks, time.monotonic(), index,
                    SchedulerTraces(tracer), time.monotonic)  # fmt: skip
        descriptors = (tokens.socket, steps.socket, stop.fileno(), grammars.jobs.fileno(), bitmasks.jobs.fileno())
        collector = scheduler_collector(loop, tokens, steps, time.monotonic)
        other_host = tokens if network is not None and network.reaches(TOKENS) else None
        exporter = Exporter(me, run_dir, loop.lag, collector, tracer, remote=loop.remote, other_host=other_host)
        start = Start(tracer, f"{Role.SCHEDULER}-{index}", stages)
        gc.freeze()  # what collects once the executor is ready need not look through modules
        gc.enable()
        try:
            run_until_stopped(loop, descriptors, stop, config, exporter, start)
        finally:
            exporter.close()
    finally:
        grammars.jobs.close()
        bitmasks.jobs.close()
        bitmasks.beside.close()
        tokens.close()
        steps.close()
        context.term()
        tracer.close()
    return 0


def tokens_of(model: Path) -> GrammarTokens | None:
    """The vocabulary as structured output needs it; None, with a line in the log, where there is none."""
    try:
        found = read_tokens(model, read_vocabulary(model))
    except ModelError as error:  # the tokenizer process fails on it; what is given as token ids can be served
        logs.warning(log, "no_structured_output", reason=str(error))
        return None
    if found is not None:
        prepared(found, USUAL)  # while the executor loads, so that the first request does not wait for it
    return found


def run_until_stopped(
    loop: SchedulerLoop,
    descriptors: Iterable[zmq.Socket[bytes] | int],
    stop: Stop,
    config: Config,
    exporter: Exporter,
    start: Start,
) -> None:
    """Iterate whenever a message arrives, a job is done, or something is due. Sleep in poll otherwise."""
    poller = zmq.Poller()
    for descriptor in descriptors:
        poller.register(descriptor, zmq.POLLIN)
    told = False
    drained_by = float("inf")
    heartbeat = Heartbeat()
    notify(f"STATUS={WAITING}")
    start.phases.note(WAITING)
    while True:
        now = time.monotonic()
        heartbeat.tick(now)
        if stop.asked and not loop.draining:
            loop.draining = True
            drained_by = now + config.run.drain_timeout
            stop.drain()
            notify("STOPPING=1", "STATUS=draining")
            logs.info(log, "draining", unfinished=loop.unfinished)
        due = loop.iterate(now, time.time())
        exporter.tick(now, time.time())
        if loop.ready != told:
            told = loop.ready
            announce(loop, config, heartbeat, ready=told)
            if told:
                start.ready(time.monotonic())
        if loop.draining and (loop.drained or now >= drained_by):
            logs.info(log, "ended", unfinished=loop.unfinished)
            return
        poller.poll(max(0, math.ceil((due - time.monotonic()) * 1000)))


def announce(loop: SchedulerLoop, config: Config, heartbeat: Heartbeat, *, ready: bool) -> None:
    """Tell the supervisor that requests would run now, or no longer."""
    if not ready:
        notify(f"STATUS={WAITING}")
        return
    status = loop.status(0.0, 0.0)
    heartbeat.tell("READY=1", "STATUS=scheduling")
    logs.info(log, "ready", epoch=status.epoch, blocks=status.blocks, overlap=config.scheduler.overlap,
                 drafts=read_speculative(config.scheduler.speculative_config).method)  # fmt: skip
