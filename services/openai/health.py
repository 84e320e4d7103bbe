"""GET /health, /health/live, /health/ready, /version and /metrics: what operators and their tools ask.

Health is read from the heartbeat with its step counter, never from a generation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.protocol import groups
from penstock.protocol.config import ModelConfig
from penstock.protocol.errors import Unavailable
from penstock.protocol.links import Role
from penstock.protocol.messages import EngineStatus
from penstock.protocol.version import VERSION
from penstock.services.client.replicas import ReplicaHealth
from penstock.services.metrics.exposition import Scrape
from penstock.services.metrics.shared_files import Entry
from penstock.services.openai.app_state import Service
from penstock.services.openai.errors import send_json
from penstock.services.supervisor.restart_policy import Failure, failures


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
    wrong_output: tuple[str, ...] = ()  # why what the server says is wrong: benchmarks' options


class VersionAnswer(msgspec.Struct, frozen=True):
    """Body of GET /version."""

    version: str


class StatusAnswer(msgspec.Struct, frozen=True):
    """Body of GET /health/live and GET /health/ready."""

    status: str = "ok"


class HealthReport:
    """Everything that is known, with 503 while requests cannot be served."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        health = health_of(self._service, time.monotonic())
        await send_json(send, msgspec.json.encode(health), 200 if health.ready else 503)


class Liveness:
    """This process's loop turns."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, msgspec.json.encode(StatusAnswer()))


class Readiness:
    """Whether requests are taken: false while loading, draining, or when a part is missing."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if trouble := trouble_of(self._service, time.monotonic()):
            raise Unavailable(trouble, code="not_ready")
        await send_json(send, msgspec.json.encode(StatusAnswer()))


class Version:
    """Penstock's version."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, msgspec.json.encode(VersionAnswer(VERSION)))


class MetricsText:
    """Prometheus' text of all processes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        own = entry_of(service)
        entries = [own, *service.ledger.others(own.process.time)]
        body = Scrape(service.config, entries, service.pipeline.processes(), service.model.name).text()
        head = [
            (b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})


def entry_of(service: Service) -> Entry:
    """This process's numbers, as of now."""
    pipeline = service.pipeline.statistics()
    ready = service.pipeline.ready(time.monotonic())
    process = service.figures.own(pipeline, service.room.statistics(), time.time(), ready=ready)
    return Entry.of(service.index, service.traffic, pipeline, process)


def trouble_of(service: Service, now: float) -> str:
    """Why the server is not ready; a process that the launcher has given up is why before anything it leads to."""
    return hopeless(service) or service.pipeline.trouble(now)


def hopeless(service: Service) -> str:
    """Why the server will not serve again by itself: processes that the launcher has given up. A replica's are none of
    these while there are others."""
    found = failures(Path(service.config.run.run_dir))
    model = service.config.model
    lost = lost_replicas(found, model)
    whole = len(lost) < model.data_parallel_size
    return "; ".join(failure.reason for failure in found if not (whole and replica_of(failure, model) is not None))


def lost_replicas(found: Sequence[Failure], model: ModelConfig) -> dict[int, str]:
    """Replicas that miss a process which the launcher has given up, and why."""
    lost: dict[int, str] = {}
    for failure in found:
        replica = replica_of(failure, model)
        if replica is not None:
            lost.setdefault(replica, failure.reason)
    return lost


def replica_of(failure: Failure, model: ModelConfig) -> int | None:
    """The replica whose process failed; None for one that belongs to all."""
    match failure.role:
        case Role.SCHEDULER:
            return failure.index
        case Role.EXECUTOR:
            return groups.place(failure.index, model).replica
    return None


def health_of(service: Service, now: float) -> Health:
    pipeline = service.pipeline
    status, statistics = pipeline.status, pipeline.statistics()
    trouble = trouble_of(service, now)
    engines = pipeline.engines
    age = None if status is None else now - engines.time
    heard = age is not None and age <= engines.limit
    lost = lost_replicas(failures(Path(service.config.run.run_dir)), service.config.model)
    return Health(
        status=trouble or "ok",
        ready=not trouble,
        model=service.model.name,
        version=VERSION,
        last_step_age=None if status is None else status.step_age,
        heartbeat_age=age,
        parts=Parts(
            TokenizerHealth(statistics.tokenizers, service.config.tokenizer.tokenizer_processes),
            heard,
            heard and status is not None and status.ready,
        ),
        capacity=capacity_of(status, statistics.unfinished, service.config.api.max_queued_requests),
        engine=None if status is None else msgspec.structs.asdict(status),
        replicas=engines.each(now, lost),
        degraded="" if trouble else engines.degraded(now, lost),
        wrong_output=service.model.wrong_output,
    )


def capacity_of(status: EngineStatus | None, unfinished: int, limit: int) -> Capacity:
    if status is None:
        return Capacity(0, 0, unfinished, limit)
    free = status.blocks_free + status.blocks_idle
    return Capacity(status.blocks * status.block_size, free * status.block_size, unfinished, limit)
