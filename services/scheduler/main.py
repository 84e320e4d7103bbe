"""The scheduler process: one thread that polls two ports and turns the loop."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import zmq

from engine_core import folder
from engine_core.models.spec import read_spec
from protocol.config import Config
from protocol.links import STEPS, TOKENS, Role, new_incarnation, shared_hash
from services import journal
from services.notify import notify
from services.process import Stop
from services.scheduler.loop import Loop, ModelFacts
from services.wire import Port, Self

log = logging.getLogger(__name__)


def run(config: Config, index: int) -> int:
    """Schedule until SIGTERM or SIGINT; running requests are finished first, up to the drain limit. The exit code.

    Raises ModelError or ConfigError when the model's folder and the options do not go together.
    """
    stop = Stop()
    model = folder.resolve(config.model.model, config.model.revision)
    spec = read_spec(model)
    facts = ModelFacts(folder.model_length(spec, config.model), spec.vocab_size)
    me = Self(Role.SCHEDULER, index, new_incarnation(), shared_hash(config.model))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    run_dir = Path(config.run.run_dir)
    tokens, steps = Port.bind(context, TOKENS, me, run_dir), Port.bind(context, STEPS, me, run_dir)
    # An epoch must differ from every one of this server's earlier schedulers: an executor may still answer to those.
    steps.epoch = int(time.time())
    try:
        turn_until_stopped(Loop(config, facts, tokens, steps, time.monotonic()), tokens, steps, stop, config)
    finally:
        tokens.close()
        steps.close()
        context.term()
    return 0


def turn_until_stopped(loop: Loop, tokens: Port, steps: Port, stop: Stop, config: Config) -> None:
    """Turn the loop whenever something arrives or is due. Sleeps in poll otherwise."""
    poller = zmq.Poller()
    poller.register(tokens.socket, zmq.POLLIN)
    poller.register(steps.socket, zmq.POLLIN)
    poller.register(stop.fileno(), zmq.POLLIN)
    told = False
    drained_by = float("inf")
    notify("STATUS=waiting for the executor")
    while True:
        now = time.monotonic()
        if stop.asked and not loop.draining:
            loop.draining = True
            drained_by = now + config.run.drain_timeout
            stop.drain()
            notify("STOPPING=1", "STATUS=draining")
            journal.info(log, "draining", unfinished=loop.unfinished)
        due = loop.turn(now, time.time())
        if loop.ready != told:
            told = loop.ready
            announce(loop, config, ready=told)
        if loop.draining and (loop.drained or now >= drained_by):
            journal.info(log, "ended", unfinished=loop.unfinished)
            return
        poller.poll(max(0, math.ceil((due - time.monotonic()) * 1000)))


def announce(loop: Loop, config: Config, *, ready: bool) -> None:
    """Tell the supervisor that requests would run now, or no longer."""
    if not ready:
        notify("STATUS=waiting for the executor")
        return
    status = loop.status(0.0, 0.0)
    notify(
        "READY=1",
        "STATUS=scheduling",
        f"X_PENSTOCK_BLOCKS={status.blocks}",
        f"X_PENSTOCK_BLOCK_SIZE={status.block_size}",
        f"X_PENSTOCK_DEVICE={status.device}",
        f"X_PENSTOCK_DTYPE={status.dtype}",
        f"X_PENSTOCK_MAX_MODEL_LEN={status.max_model_len}",
    )
    journal.info(log, "ready", epoch=status.epoch, blocks=status.blocks, overlap=config.scheduler.overlap)
