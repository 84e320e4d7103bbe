"""GET /health, /health/live, /health/ready, /version and /metrics: what operators and their tools ask.

Health is read from the heartbeat with its step counter, never from a generation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine_core.placement.residency import State
from penstock.protocol import groups
from penstock.protocol.control import EngineStatus
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import Unavailable
from penstock.protocol.links import Role
from penstock.protocol.version import VERSION
from penstock.services.client.model_switcher import state_of
from penstock.services.client.replicas import ReplicaHealth, status_tokens
from penstock.services.http.request_context import RequestContext
from penstock.services.metrics.exposition import ModelProcesses, ServerCollector
from penstock.services.metrics.snapshot import read_snapshots
from penstock.services.openai.app_state import AppState
from penstock.services.supervisor.restart_policy import CrashLoop, crash_loops


class TokenizerHealth(msgspec.Struct, frozen=True):
    """Tokenizer processes that are connected, of how many."""

    connected: int
    configured: int


class Parts(msgspec.Struct, frozen=True):
    """Which parts this api process can reach; `scheduler` and `executor` as the heartbeat says."""

    tokenizer: TokenizerHealth
    scheduler: bool
    executor: bool


class Capacity(msgspec.Struct, frozen=True):
    """What the KV cache holds, in tokens, and the requests of this api process against their bound."""

    tokens: int
    tokens_free: int
    unfinished_requests: int
    max_queued_requests: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Body of GET /health. `status` is "ok" or why requests cannot be served; ages are in seconds. `engine` and
    `capacity` are of all replicas together."""

    status: str
    ready: bool
    model: str
    version: str
    last_step_age: float | None
    heartbeat_age: float | None
    parts: Parts
    capacity: Capacity
    engine: dict[str, Any] | None
    replicas: tuple[ReplicaHealth, ...]
    degraded: str = ""  # which replicas do not serve while others do, and why
    input_modalities: tuple[str, ...]  # as in /v1/models
    paused: str  # mode of the operator's pause; empty: there is none
    adapters: int | None  # LoRA adapters that have been loaded by name; None without --enable-lora
    wrong_output: tuple[str, ...] = ()  # why what the server says is wrong: benchmarks' options
    models: tuple[ModelHealth, ...] | msgspec.UnsetType = msgspec.UNSET  # of several; the rest is the first one's


class ModelHealth(msgspec.Struct, frozen=True):
    """One of several models in the body of GET /health. `status` is "ok" or why its requests cannot be served."""

    model: str
    state: str  # as in /v1/models
    status: str
    ready: bool
    unfinished_requests: int
    load_seconds: float | None  # that its last load took; None before the first
    replicas: tuple[ReplicaHealth, ...]


class VersionAnswer(msgspec.Struct, frozen=True):
    """Body of GET /version."""

    version: str


class StatusAnswer(msgspec.Struct, frozen=True):
    """Body of GET /health/live and GET /health/ready."""

    status: str = "ok"


async def health(app: AppState, context: RequestContext) -> None:
    """Everything that is known, with 503 while requests cannot be served."""
    found = health_of(app, time.monotonic())
    await context.send_json(msgspec.json.encode(found), 200 if found.ready else 503)


async def live(app: AppState, context: RequestContext) -> None:
    """This process's loop turns."""
    await context.send_json(msgspec.json.encode(StatusAnswer()))


async def ready(app: AppState, context: RequestContext) -> None:
    """Whether requests are taken: false while loading, draining, or when a part is missing."""
    if trouble := trouble_of(app, time.monotonic()):
        raise Unavailable(trouble, code="not_ready")
    await context.send_json(msgspec.json.encode(StatusAnswer()))


async def version(app: AppState, context: RequestContext) -> None:
    """Penstock's version."""
    await context.send_json(msgspec.json.encode(VersionAnswer(VERSION)))


def processes_of_models(app: AppState) -> tuple[ModelProcesses, ...]:
    """What is known of the processes of each of several models."""
    found = []
    for each in app.models:
        snapshots = read_snapshots(Path(each.config.run.run_dir), time.time())
        each.engine_client.replicas.refresh(snapshots)
        found.append(ModelProcesses(each.model.name, each.config, model_state(each), snapshots))
    return tuple(found)


async def metrics(app: AppState, context: RequestContext) -> None:
    """Prometheus' text of all processes."""
    snapshots = app.exporter.snapshots(time.time())
    app.engine_client.replicas.refresh(snapshots)
    body = ServerCollector(app.config, snapshots, app.model.name, processes_of_models(app)).text()
    await context.send_body(body, b"text/plain; version=0.0.4; charset=utf-8")


def trouble_of(app: AppState, now: float) -> str:
    """Why the server is not ready; a process that the launcher has given up is why before anything it leads to. One of
    several models that is served is enough."""
    if app.models and (reason := hopeless(app)):  # an api process
        return reason
    if app.switcher is not None and not app.switcher.settled:
        return "the models that fit together are being loaded"
    troubles = [hopeless(each) or each.engine_client.trouble(now) for each in app.each]
    return "" if "" in troubles else troubles[0]


def broken(run_dir: Path) -> bool:
    """Whether the launcher has given an executor up."""
    return any(failure.role == Role.EXECUTOR for failure in crash_loops(run_dir))


def model_state(app: AppState) -> State:
    """Of one of several models, as clients are told: one that leaves is as good as asleep."""
    found = state_of(app.engine_client.replicas.whole, broken=broken(Path(app.config.run.run_dir)))
    return State.ASLEEP if found is State.LEAVING else found


def hopeless(app: AppState) -> str:
    """Why the server, or one of several models, will not be served again by itself: processes that the launcher has
    given up. A replica's are none of these while there are others."""
    found = crash_loops(Path(app.config.run.run_dir))
    model = app.config.model
    lost = lost_replicas(found, model)
    whole = len(lost) < model.data_parallel_size
    return "; ".join(failure.reason for failure in found if not (whole and replica_of(failure, model) is not None))


def lost_replicas(found: Sequence[CrashLoop], model: ModelConfig) -> dict[int, str]:
    """Replicas that miss a process which the launcher has given up, and why."""
    lost: dict[int, str] = {}
    for failure in found:
        replica = replica_of(failure, model)
        if replica is not None:
            lost.setdefault(replica, failure.reason)
    return lost


def replica_of(failure: CrashLoop, model: ModelConfig) -> int | None:
    """The replica whose process failed; None for one that belongs to all."""
    match failure.role:
        case Role.SCHEDULER:
            return failure.index
        case Role.EXECUTOR:
            return groups.place(failure.index, model).replica
    return None


def health_of(app: AppState, now: float) -> Health:
    engine_client = app.engine_client
    status, statistics = engine_client.status, engine_client.statistics()
    trouble = trouble_of(app, now)
    replicas = engine_client.replicas
    age = None if status is None else now - replicas.time
    heard = age is not None and age <= replicas.limit
    lost = lost_replicas(crash_loops(Path(app.config.run.run_dir)), app.config.model)
    return Health(
        status=trouble or "ok",
        ready=not trouble,
        model=app.model.name,
        version=VERSION,
        last_step_age=None if status is None else status.step_age,
        heartbeat_age=age,
        parts=Parts(
            TokenizerHealth(statistics.tokenizers, app.config.tokenizer.tokenizer_processes),
            heard,
            heard and status is not None and status.ready,
        ),
        capacity=capacity_of(status, statistics.unfinished, app.config.api.max_queued_requests),
        engine=None if status is None else msgspec.structs.asdict(status),
        replicas=replicas.each(now, lost),
        degraded="" if trouble else replicas.degraded(now, lost),
        input_modalities=app.model.modalities,
        paused="" if status is None else status.paused,
        adapters=None if app.model.adapters is None else len(app.model.adapters.names()),
        wrong_output=app.model.wrong_output,
        models=tuple(model_health(each, now) for each in app.models) or msgspec.UNSET,
    )


def model_health(app: AppState, now: float) -> ModelHealth:
    """Of one of several models."""
    trouble = trouble_of(app, now)
    status = app.engine_client.status
    lost = lost_replicas(crash_loops(Path(app.config.run.run_dir)), app.config.model)
    return ModelHealth(
        model=app.model.name,
        state=model_state(app).value,
        status=trouble or "ok",
        ready=not trouble,
        unfinished_requests=app.engine_client.statistics().unfinished,
        load_seconds=None if status is None else status.load_seconds or None,
        replicas=app.engine_client.replicas.each(now, lost),
    )


def capacity_of(status: EngineStatus | None, unfinished: int, limit: int) -> Capacity:
    if status is None:
        return Capacity(0, 0, unfinished, limit)
    free = status.blocks_free + status.blocks_idle
    return Capacity(status_tokens(status, status.blocks), status_tokens(status, free), unfinished, limit)
