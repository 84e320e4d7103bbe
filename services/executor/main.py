"""The executor process: loads a model, then runs the scheduler's plans until it is told to end, or to sleep."""

from __future__ import annotations

import gc
import logging
import math
import os
import select
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import msgspec
import zmq

from penstock.engine_core.histogram import Histogram
from penstock.protocol import groups
from penstock.protocol.config import Config
from penstock.protocol.control import PARTIAL
from penstock.protocol.errors import PenstockError
from penstock.protocol.links import STEPS, Role, new_incarnation, shared_hash
from penstock.protocol.served_models import several
from penstock.protocol.steps import Sleep
from penstock.services.executor.device import begin_device, gpu_number, is_device_error, is_group_error, set_timer_slack
from penstock.services.executor.kept_weights import KeptWeights
from penstock.services.executor.peer_liveness import PeerLiveness, leave
from penstock.services.executor.sleep import JOIN_TICK, beating, earlier_life, fall_asleep, sleeps, wait_for_wake
from penstock.services.executor.watchdog import WATCH_INTERVAL, Watchdog
from penstock.services.links.curve import read_keys
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Link
from penstock.services.links.tcp import network_of
from penstock.services.metrics.definitions import LAG
from penstock.services.metrics.exporter import Exporter, collect_executor
from penstock.services.supervisor import logs
from penstock.services.supervisor.process import ExitCode, StartupPhases, Stop
from penstock.services.supervisor.process import leave as leave_process
from penstock.services.supervisor.sd_notify import Heartbeat, notify
from penstock.services.tracing.executor import ExecutorTraces
from penstock.services.tracing.startup import Start, tracer_of

if TYPE_CHECKING:
    from penstock.services.executor.crash_report import Reports
    from penstock.services.executor.startup import Engine
    from penstock.services.executor.steps import Steps

log = logging.getLogger(__name__)

TICK = 0.2  # seconds between ticks of the link
PAUSE = 50e-6  # seconds between looks at a device that runs a step, unless something arrives
TIMER_SLACK = 1000  # nanoseconds by which the kernel may lengthen that
IDLE_SECONDS = 0.5  # without work, after which there is time for tasks of some milliseconds
LEAVE_SECONDS = 5.0  # without work, after which a process that was told to end does; a remote scheduler may be busy
COLLECT_SECONDS = 30.0  # between garbage collections while there is always work
BROKEN_SECONDS = 5.0  # between a failed step and the end of the member that caused it, which may write a report


def run(config: Config, index: int) -> int:
    """Execute plans until SIGTERM or SIGINT, and then until no plan runs, up to the drain limit: a scheduler on this
    host has drained before, one elsewhere may drain now. Returns the exit code. An executor that is told to sleep goes
    on as another image, which waits here first.

    Raises ModelError or ConfigError when the model cannot be served with these options, LinkError when the scheduler
    or the first member of the group refuses this process.
    """
    stop, done, phases, heartbeat = Stop(), threading.Event(), StartupPhases(), None
    waits, life = sleeps() or several(config), earlier_life()
    kept = KeptWeights(life.weights)
    if waits:  # another model may have the device: the scheduler says when to take it
        heartbeat = Heartbeat()
        if not wait_for_wake(config, index, stop, heartbeat, kept, life.kernels):
            return ExitCode.ORDERLY
        phases = StartupPhases(time.monotonic())
    with ExitStack() as loading:
        loading.enter_context(beating(heartbeat))
        if config.links.scheduler_address:
            read_keys(config.links.link_keys)  # a mistake shows now, not when the model is loaded
        if config.executor.device != "cpu":
            # Importing torch takes longer than opening the GPU's driver, and finds it open.
            Thread(target=begin_device, args=(gpu_number(config.executor, index),), daemon=True).start()
        generation, liveness = None, None
        if groups.group_size(config.model) > 1:
            from penstock.services.executor.rendezvous import choose, rendezvous

            generation = rendezvous(config, groups.place(index, config.model)).meet(stop)
            if generation is None:
                return ExitCode.ORDERLY
            liveness = generation.liveness
            if not choose(liveness.address):
                logs.warning(log, "no_interface", address=liveness.address)
            Thread(target=liveness.watch, args=(stop, done), name="liveness", daemon=True).start()
        from penstock.services.executor.startup import start

        gc.freeze()  # modules stay: what looks for garbage of the load need not look through torch
        if not waits:
            gc.enable()
        try:
            engine = start(config, index, generation, phases, life, kept)
            loading.close()
            asleep = serve(config, index, engine, stop, phases, liveness)
        except PenstockError:
            raise
        except Exception as error:
            end_with_group(error, liveness)
            logs.exception(log, "executor_failed")
            return ExitCode.DEVICE if is_device_error(error) else ExitCode.FAILED
        finally:
            done.set()
    leave_process(Role.EXECUTOR, index, config.run)
    if asleep:
        fall_asleep(stop, msgspec.structs.replace(engine.life, weights=kept.file))
    logging.shutdown()
    os._exit(ExitCode.ORDERLY)  # torch may wait for members that have ended


def serve(
    config: Config, index: int, engine: Engine, stop: Stop, phases: StartupPhases, liveness: PeerLiveness | None = None
) -> bool:
    """Connect to the scheduler, now or whenever it comes up, and run its plans. Whether it said to sleep."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tracer = tracer_of(config.trace, Role.EXECUTOR, index)
    me = Identity(Role.EXECUTOR, index, new_incarnation(), shared_hash(config.model))
    from penstock.services.executor.crash_report import Reports
    from penstock.services.executor.image_encoding import ImageEncoding
    from penstock.services.executor.kernel_compilers import log_compilations
    from penstock.services.executor.prefill_memory import PrefillMemory
    from penstock.services.executor.steps import Steps
    from penstock.services.executor.weight_updates import WeightUpdates

    replica = groups.place(index, config.model).replica
    network = network_of(context, config.links)
    link = Link.connect(context, STEPS, me, Path(config.run.run_dir), replica, network)
    watchdog = Watchdog()
    for positions, seconds in engine.warm:
        watchdog.tell(positions, seconds)
    reports = Reports(
        Path(config.run.run_dir), f"{Role.EXECUTOR}-{index}", engine.ready, prompts=config.run.report_prompts
    )
    encoder = engine.runner.options.encoder
    images = None if encoder is None else ImageEncoding(encoder, config.executor.mm_encoder_budget)
    group, traces = engine.runner.options.group, ExecutorTraces(tracer)
    loaded = engine.loaded
    updates = WeightUpdates(engine.weights, index, loaded.path, loaded.version, loaded.kept)
    steps = Steps(
        link, engine.runner, engine.ready, watchdog, reports, group, traces, images, updates, engine.copies
    )  # fmt: skip
    lag = Histogram(LAG)
    exporter = Exporter(
        me, Path(config.run.run_dir), lag, partial(collect_executor, steps, link, engine.ready), tracer,
        other_host=link if network is not None and network.reaches(STEPS) else None,
    )  # fmt: skip
    # Garbage is collected while idle, never within a step; objects that exist by now are left out of it.
    gc.collect()
    gc.freeze()
    gc.disable()
    heartbeat = Heartbeat()
    heartbeat.tell("READY=1", *engine.facts, "STATUS=serving")
    log_compilations(engine.runner.options.device)
    now = time.monotonic()
    logs.info(log, "ready", seconds=now - phases.all[0].began, stages=phases.durations(now))
    Start(tracer, f"{Role.EXECUTOR}-{index}", phases).ready(now)
    done = threading.Event()
    if config.model.prefill_replicas and engine.copies is not None:
        memory = PrefillMemory(engine.copies, config.model, index, Path(config.run.run_dir))
        Thread(target=memory.watch, args=(done,), name="prefill memory", daemon=True).start()
    if config.executor.keep_weights:
        loaded.reserve()
    Thread(target=watch, args=(watchdog, steps, reports, heartbeat, done), name="watchdog", daemon=True).start()
    try:
        asleep = run_until_stopped(steps, link, stop, exporter, lag, config.run.drain_timeout, liveness)
    except PenstockError:
        raise
    except Exception as error:
        end_with_group(error, liveness)
        reports.write("crashed", traceback.format_exc(), tuple(steps.decoding))
        raise
    finally:
        done.set()
        exporter.close()
        link.close()
        context.term()
        tracer.close()
    statistics, counted = engine.runner.statistics(), steps.statistics()
    logs.info(log, "ended", steps=statistics.steps, sampled=statistics.sampled, dropped=counted.dropped)
    if asleep is None:
        return False
    if asleep.discard or updates.path == PARTIAL:
        loaded.kept.drop()
    elif config.executor.keep_weights:
        with beating(heartbeat):
            loaded.keep(updates.path, updates.version)
    return True


def end_with_group(error: Exception, liveness: PeerLiveness | None) -> None:
    """End this process if the end of another member caused the error."""
    if liveness is not None and is_group_error(error) and liveness.broken(BROKEN_SECONDS):
        leave()


def watch(watchdog: Watchdog, steps: Steps, reports: Reports, heartbeat: Heartbeat, done: threading.Event) -> None:
    """Send heartbeats to the supervisor, and end this process when the main thread's step hangs.

    Heartbeats come from here and not from the loop, because a step may be long. A thread that hangs in native code can
    only be ended with its process.
    """
    before = time.monotonic()
    while not done.wait(WATCH_INTERVAL):
        now = time.monotonic()
        heartbeat.tick(now)
        if watchdog.tick(now - before):
            logs.error(log, "step_hangs", seconds=watchdog.elapsed, allowed=watchdog.allowed)
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            trace = "".join(traceback.format_stack(frame))
            reports.write("hung", trace, tuple(steps.decoding))
            os._exit(ExitCode.HUNG)
        before = now


def run_until_stopped(
    steps: Steps,
    link: Link,
    stop: Stop,
    exporter: Exporter,
    lag: Histogram,
    drain: float,
    liveness: PeerLiveness | None = None,
) -> Sleep | None:
    """The process's loop. Once told to stop, it ends when nothing runs, the scheduler has gone, or `drain` seconds have
    passed. Once told to sleep, by the scheduler or by another member that heard it, it ends and returns that.

    Without work it sleeps in poll; while the device runs or a step waits for its masks, it looks every few
    microseconds. Garbage is collected while idle, or now and then if there is always work.
    """
    poller, polled = zmq.Poller(), link.socket
    poller.register(polled, zmq.POLLIN)
    poller.register(stop.fileno(), zmq.POLLIN)
    for waker in steps.wakers:
        poller.register(waker, zmq.POLLIN)
    set_timer_slack(TIMER_SLACK)
    next_tick = time.monotonic()
    worked = collected = time.monotonic()
    end = float("inf")
    while True:
        now = time.monotonic()
        if stop.asked:
            if end == float("inf"):
                end = now + drain
                notify("STOPPING=1", "STATUS=draining")
            stop.drain()
            if not link.peers or now - worked >= LEAVE_SECONDS or now >= end:
                return None
        if now >= next_tick:
            lag.observe(now - next_tick)
            next_tick = now + (TICK if link.peers else JOIN_TICK)
            link.tick(now)
            if link.socket is not polled:  # another connection, to a scheduler on another host
                poller.unregister(polled)
                polled = link.socket
                poller.register(polled, zmq.POLLIN)
            if liveness is not None and liveness.asleep:
                liveness.say_sleep(discard=liveness.discards)
                return Sleep(liveness.discards)
            steps.tick(now)
            exporter.tick(now, time.time())
        arrivals = link.receive()
        if told := [arrival.message for arrival in arrivals if isinstance(arrival.message, Sleep)]:
            if liveness is not None:
                liveness.say_sleep(discard=told[-1].discard)
            return told[-1]
        steps.take(arrivals)
        if not steps.idle:  # before `iterate`, in which a CPU does all of a step
            worked = now
        steps.iterate()
        if collection_due(now, worked, collected):
            collected = now
            gc.collect()
        if not (steps.busy or steps.awaits_masks):
            poller.poll(max(0, math.ceil((next_tick - time.monotonic()) * 1000)))
        elif not steps.has_work:
            select.select([link.fileno(), stop.fileno()], [], [], PAUSE)


def collection_due(now: float, worked: float, collected: float) -> bool:
    """Once in every idle time, and every COLLECT_SECONDS without one."""
    if now - worked >= IDLE_SECONDS:
        return collected <= worked
    return now - collected >= COLLECT_SECONDS
