"""The api process: `run` serves HTTP until it is told to end."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import logging
import math
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
import uvloop
import zmq
from starlette.types import ASGIApp

from penstock.engine_core.histogram import Histogram
from penstock.protocol.config import Config
from penstock.protocol.engine_config import PRIORITY
from penstock.protocol.errors import Unavailable
from penstock.protocol.links import TEXT, Role, new_incarnation, shared_hash
from penstock.protocol.served_models import engines, several, shares
from penstock.services.client.engine_client import EngineClient
from penstock.services.client.model_info import ModelInfo, read_model_info
from penstock.services.client.model_switcher import ModelSwitcher
from penstock.services.http.connection import Connection, ConnectionLimits
from penstock.services.http.security import OPERATOR, Keys
from penstock.services.http.server import (
    ConnectionLimiter,
    Server,
    Socket,
    accept,
    admin_options,
    connection_limit,
    listen,
    listen_for_metrics,
    listen_for_operator,
    raise_descriptor_limit,
    remove_file,
    tls,
    url_of,
)
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Link
from penstock.services.links.tcp import network_of
from penstock.services.metrics.definitions import LAG
from penstock.services.metrics.exporter import Exporter, collect_api, keep_exporting
from penstock.services.metrics.requests import Traffic
from penstock.services.openai import errors
from penstock.services.openai.app_state import AppState
from penstock.services.openai.health import broken, hopeless
from penstock.services.openai.media_fetcher import MediaFetcher
from penstock.services.openai.responses.endpoint import BackgroundWork
from penstock.services.openai.responses.store import ResponseStore
from penstock.services.openai.routes import application, metrics_application, operator_application
from penstock.services.supervisor import logs, process
from penstock.services.supervisor.banner import engine_facts
from penstock.services.supervisor.options import sized, usable_cores
from penstock.services.supervisor.process import ExitCode, StartupPhases, background_task
from penstock.services.supervisor.sd_notify import Heartbeat, notify, send_heartbeats
from penstock.services.tracing.startup import Start, tracer_of
from penstock.services.tracing.tracer import Operations, Tracer

log = logging.getLogger(__name__)

WAITING = "waiting for the engine"
LAST_WORDS = 2.0  # seconds beyond the drain limit for errors to reach the clients
BACKLOG = 2048
OPERATORS_PROCESS = 0  # index of the api process that listens at --admin-address
TICK = 0.25  # seconds between looks at what is owed and at the end
EAGER = 0.02  # seconds between looks until requests are taken
KEYS_TICK = 1.0  # seconds between looks at the file of API keys
GC_THRESHOLD = 50_000  # allocations between collections: a request's parts hold few cycles
MIN_SILENCE = 5.0  # seconds without a heartbeat after which the engine counts as hung; a busy machine may cost some
HEARTBEATS_MISSED = 10  # or so many of them, if that is longer


class Listener(NamedTuple):
    """A bound socket, and what it serves."""

    socket: Socket
    encryption: ssl.SSLContext | None
    application: Callable[[AppState], ASGIApp]


def run(config: Config, index: int) -> int:
    """Serve until SIGTERM or SIGINT; running requests are finished first, up to the drain limit. The exit code.

    A second signal ends them at once, and so does the end of a launcher that was killed, whose other processes have
    ended with it. Raises PenstockError for a wrong model folder, address or option, and when a tokenizer refuses
    us.
    """
    return uvloop.run(serve(config, index))


async def serve(config: Config, index: int) -> ExitCode:
    """The process's whole life; its exit code. Raises as `run` does."""
    raise_descriptor_limit()
    stages = StartupPhases()
    configs = [sized(each, usable_cores()) for each in engines(config)]
    infos = [read_model_info(each) for each in configs]
    keys = Keys(config.api)
    operators = Keys(config.api, OPERATOR) if config.api.admin_address else None
    encryption = tls(config.api)
    listeners = [Listener(listen(config.api), encryption, application)]
    if (monitoring := listen_for_metrics(config.api)) is not None:
        listeners.append(Listener(monitoring, None, metrics_application))
    if index == OPERATORS_PROCESS and (admin := listen_for_operator(config.api)) is not None:
        on_file = admin.family == socket.AF_UNIX
        listeners.append(Listener(admin, None if on_file else encryption, operator_application))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    network = network_of(context, config.links)
    incarnation = new_incarnation()
    tracer = tracer_of(config.trace, Role.API, index)
    start = Start(tracer, f"{Role.API}-{index}", stages)
    watches = [
        [
            AsyncLink(Link.connect(context, TEXT, identity_of(each, index, incarnation), Path(each.run.run_dir), number,
                                   network))
            for number in range(each.tokenizer.tokenizer_processes)
        ]
        for each in configs
    ]  # fmt: skip
    every = [watch for found in watches for watch in found]
    clients = [
        client_of(each, info, found, index, incarnation, tracer)
        for each, info, found in zip(configs, infos, watches, strict=True)
    ]
    run_dir = Path(config.run.run_dir)
    responses = ResponseStore(run_dir, index, config.api.api_processes, config.api)
    limiter = ConnectionLimiter(connection_limit(config.api.max_connections, len(every)))
    traffic = Traffic()
    media = MediaFetcher(config.api, config.tokenizer.media_timeout, traffic.images)
    collector = functools.partial(collect_api, clients, every, traffic, limiter, responses)
    me = identity_of(config, index, incarnation)
    exporter = Exporter(me, run_dir, Histogram(LAG), collector, tracer, remote=clients[0].remote)
    app = AppState(
        config, index, infos[0], clients[0], traffic, exporter, keys, responses, BackgroundWork(traffic), media, tracer,
        operators, limiter,
    )  # fmt: skip
    if several(config):
        app = with_models(app, configs, infos, clients)
    # To look through all that was imported takes 30 ms, in which no stream goes on.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    gc.enable()
    try:
        return await answer(app, listeners, start)
    finally:
        for options in (config.api, admin_options(config.api) if index == OPERATORS_PROCESS else None):
            if options is not None:
                remove_file(options)
        exporter.close()
        responses.close()
        for watch in every:
            watch.close()
        context.term()
        tracer.close()


def identity_of(config: Config, index: int, incarnation: int) -> Identity:
    """This process's, as the tokenizers of one model know it."""
    return Identity(Role.API, index, incarnation, shared_hash(config.model))


def client_of(
    config: Config, info: ModelInfo, watches: Sequence[AsyncLink], index: int, incarnation: int, tracer: Tracer
) -> EngineClient:
    """The client of one model's engine."""
    client = EngineClient(
        watches, index, incarnation, config.api.max_queued_requests,
        max(MIN_SILENCE, HEARTBEATS_MISSED * config.scheduler.status_interval), processes=config.api.api_processes,
        replicas=config.model.data_parallel_size, ordered=config.scheduler.scheduling_policy == PRIORITY,
        operations=Operations(tracer, info.name),
        unloaded=config.api.max_unloaded_requests if several(config) else None,
    )  # fmt: skip
    for watch in watches:
        watch.start(client.receive)
    return client


def with_models(
    app: AppState, configs: Sequence[Config], infos: Sequence[ModelInfo], clients: Sequence[EngineClient]
) -> AppState:
    """The state of a server of several models."""
    switcher = None
    if app.index == OPERATORS_PROCESS:
        by_name = {info.name: client for info, client in zip(infos, clients, strict=True)}
        directories = {info.name: Path(each.run.run_dir) for info, each in zip(infos, configs, strict=True)}
        switcher = ModelSwitcher(
            by_name, shares(app.config), app.config.api.model_turn, lambda name: broken(directories[name])
        )
    app = dataclasses.replace(app, switcher=switcher)
    models = tuple(
        dataclasses.replace(app, config=each, model=info, engine_client=client)
        for each, info, client in zip(configs, infos, clients, strict=True)
    )
    return dataclasses.replace(app, models=models)


async def answer(app: AppState, listeners: Sequence[Listener], start: Start) -> ExitCode:
    """Run the HTTP server until a signal asks for the end and the drain is over; the exit code. The first of the
    listeners is the clients'."""
    options = app.config.api
    limits = ConnectionLimits.of(options)
    server = Server(
        uvicorn.Config(
            application(app),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(app.config.run.drain_timeout + LAST_WORDS),
        ),
        options.keep_alive_timeout,
    )
    make = functools.partial(
        Connection, server.config, server.server_state, {}, encode_error=errors.encode, limits=limits,
        limiter=app.limiter,
    )  # fmt: skip
    for listener in listeners:
        listener.socket.listen(BACKLOG)
    url = url_of(listeners[0].socket, options)
    logs.info(log, "listening", url=url, model=",".join(each.model.name for each in app.each))
    heartbeat = Heartbeat()
    heartbeat.tell(f"X_PENSTOCK_URL={url}", f"STATUS={WAITING}")
    start.phases.note(WAITING)
    # uvicorn takes these over while it serves.
    previous = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
    failures: list[Exception] = []

    def fail(failure: Exception) -> None:
        failures.append(failure)
        server.exit(force=True)

    def on_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What a watched port raises in a callback (a refused handshake, a bug of ours) ends the process."""
        failure = context.get("exception")
        if isinstance(failure, Exception) and "handle" in context:
            fail(failure)
        else:
            loop.default_exception_handler(context)

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(on_failure)
    launcher = process.parent()

    def on_orphaned() -> None:
        assert launcher is not None
        loop.remove_reader(launcher)
        server.exit(force=True)

    if launcher is not None:
        loop.add_reader(launcher, on_orphaned)
    loop.add_signal_handler(signal.SIGHUP, functools.partial(refresh_keys, app))
    attendance = attend(app, server, start, heartbeat)
    work = [attendance, send_heartbeats(heartbeat), keep_exporting(app.exporter)]
    if app.switcher is not None:
        work.append(app.switcher.run())
    tasks = [background_task(each, fail) for each in work]
    server.accepting = tuple([
        background_task(accept_at(listener, app, make, limits.head_seconds), fail) for listener in listeners
    ])  # fmt: skip
    try:
        await server.serve(sockets=[listener.socket for listener in listeners])
        # Clients are gone; responses in the background have until the drain limit, at which `attend` fails them.
        await app.background.ended(app.config.run.drain_timeout + LAST_WORDS)
    finally:
        for task in (*tasks, *server.accepting):
            task.cancel()
        for number, old in previous.items():
            signal.signal(number, old)
        if launcher is not None:
            loop.remove_reader(launcher)
            os.close(launcher)
    if failures:
        raise failures[0]
    logs.info(log, "ended", unfinished=unfinished(app))
    return ExitCode.FAILED if server.force_exit else ExitCode.ORDERLY


async def accept_at(listener: Listener, app: AppState, make: Callable[..., asyncio.Protocol], handshake: float) -> None:
    """Accept connections for what the listener serves, until cancelled."""
    if listener.application is operator_application:
        options = admin_options(app.config.api)
        assert options is not None, "it listens there"
        logs.info(log, "listening_for_operator", url=url_of(listener.socket, options))
    served = functools.partial(make, application=listener.application(app))
    await accept(listener.socket, app.limiter, served, listener.encryption, handshake)


def refresh_keys(app: AppState, *, always: bool = True) -> None:
    """Read the files of keys again if they have changed, or `always`."""
    for keys in (app.keys, app.operators):
        if keys is not None:
            keys.refresh(always=always)


async def attend(app: AppState, server: Server, start: Start, heartbeat: Heartbeat) -> None:
    """Say when requests are taken and when no more, and end those that outlast the drain limit."""
    announced = False
    clients = [each.engine_client for each in app.each]
    entered = float("-inf")
    while not server.should_exit:
        if (now := time.monotonic()) - entered >= KEYS_TICK:
            entered = now
            refresh_keys(app, always=False)
        settled = announced or app.switcher is None or app.switcher.settled
        ready = server.started and settled and any(client.ready(time.monotonic()) for client in clients)
        for each in app.each:
            each.engine_client.permanent_failure = "" if each.engine_client.ready(time.monotonic()) else hopeless(each)
        if ready and not announced:
            announced = True
            facts = next((engine_facts(first) for client in clients if (first := client.replicas.first)), ())
            heartbeat.tell("READY=1", "STATUS=serving", *facts)
            logs.info(log, "ready")
            start.ready(time.monotonic())
        for client in clients:
            client.tick(time.monotonic())
        await server.pause(TICK if announced else EAGER)
    for client in clients:
        client.draining = True
    notify("STOPPING=1", "STATUS=draining")
    logs.info(log, "draining", unfinished=unfinished(app))
    deadline = time.monotonic() + app.config.run.drain_timeout
    while time.monotonic() < deadline and not server.force_exit:
        for client in clients:
            client.tick(time.monotonic())
        await server.pause(TICK)
    if server.force_exit:
        logs.warning(log, "ending_at_once")
    for client in clients:
        client.fail_all(Unavailable("the server is shutting down", code="draining"))


def unfinished(app: AppState) -> int:
    return sum(each.engine_client.statistics().unfinished for each in app.each)
