"""The engine's state, from its replicas' heartbeats: it serves while one of them does, and its counters add up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.engine_core.kv.block_layout import capacity_tokens
from penstock.protocol.control import EngineStatus
from penstock.protocol.links import Role
from penstock.services.metrics.definitions import STATUS
from penstock.services.metrics.snapshot import Snapshot

UNHEARD = "the engine has not reported yet"
SUMS = (
    *("step", "running", "waiting", "demand", "blocks", "blocks_free", "blocks_idle", "max_num_seqs", "prompt_tokens"),
    *("cached_tokens", "output_tokens", "finished", "aborted", "failed", "preemptions", "drain_rate", "drafts"),
    *("draft_tokens", "accepted_tokens", "kept_weight_bytes", "adapter_places", "adapters_placed", "adapters_held"),
    *("encoder_rows", "encoder_rows_held", "images_encoded", "image_hits"),
    *("state_places", "state_snapshots", "state_host_places", "state_host_snapshots"),
    *("host_blocks", "host_blocks_held", "disk_blocks", "disk_blocks_held"),
)  # fields of EngineStatus that add up


class ReplicaHealth(msgspec.Struct, frozen=True):
    """One replica in the body of GET /health. `status` is "ok" or why it does not serve; ages are in seconds."""

    replica: int
    role: str  # mixed, or with --prefill-replicas prefill or decode
    status: str
    ready: bool
    last_step_age: float | None
    heartbeat_age: float | None
    running: int
    waiting: int
    tokens: int  # capacity of its KV cache
    tokens_free: int
    prompt_tokens: int
    cached_tokens: int
    weight_version: str


class ReplicaSet:
    """The newest heartbeat of each replica. `limit`: seconds of silence after which a replica counts as lost."""

    def __init__(self, replicas: int, limit: float) -> None:
        assert replicas > 0
        self.limit = limit
        self._replicas = replicas
        self._statuses: dict[int, tuple[EngineStatus, float]] = {}  # and its arrival, in monotonic seconds

    def report(self, status: EngineStatus, now: float) -> None:
        """Record a heartbeat that arrived at `now`."""
        if 0 <= status.replica < self._replicas:
            self._statuses[status.replica] = status, now

    def refresh(self, snapshots: Iterable[Snapshot]) -> None:
        """Update schedulers' snapshots, which are taken once a second, with heartbeats, which follow a change of the
        running and waiting requests within 50 ms."""
        for snapshot in snapshots:
            status, _ = self._statuses.get(snapshot.index, (None, 0.0))
            if snapshot.role == Role.SCHEDULER and status is not None and status.time > snapshot.time:
                snapshot.collect(STATUS, status)

    @property
    def status(self) -> EngineStatus | None:
        """All replicas as one: counters add up, any replica makes it ready, the oldest step gives its age."""
        statuses = [status for status, _ in self._statuses.values()]
        if len(statuses) <= 1:
            return statuses[0] if statuses else None
        return total(statuses)

    @property
    def whole(self) -> EngineStatus | None:
        """The same, once each replica has been heard of; its time is that of the oldest heartbeat."""
        statuses = [status for status, _ in self._statuses.values()]
        if len(statuses) < self._replicas:
            return None
        return msgspec.structs.replace(total(statuses), time=min(status.time for status in statuses))

    @property
    def needed(self) -> bool:
        """Whether one that sleeps has requests, while another one is awake."""
        statuses = [status for status, _ in self._statuses.values()]
        return any(status.sleeping and status.demand for status in statuses) and any(
            not status.sleeping for status in statuses
        )

    @property
    def first(self) -> EngineStatus | None:
        """The heartbeat of a ready replica; all have the same capacity."""
        return next((status for status, _ in self._statuses.values() if status.ready), None)

    @property
    def time(self) -> float:
        """Arrival of the latest heartbeat, of any replica."""
        return max((time for _, time in self._statuses.values()), default=0.0)

    @property
    def open_until(self) -> float:
        """When the heartbeat of the last replica that serves will be missing; minus infinity when none serves."""
        times = (time for status, time in self._statuses.values() if status.ready and not status.draining)
        return max(times, default=-math.inf) + self.limit

    def trouble(self, now: float) -> str:
        """Why no replica serves; empty when one does."""
        troubles = self._troubles(now)
        if "" in troubles:
            return ""
        if len(set(troubles)) == 1:
            return troubles[0]
        return "no replica serves: " + described(troubles)

    def degraded(self, now: float, lost: Mapping[int, str]) -> str:
        """Which replicas do not serve while others do, and why; `lost`: why some will not come back."""
        troubles = [trouble and lost.get(replica, trouble) for replica, trouble in enumerate(self._troubles(now))]
        return described(troubles) if "" in troubles else ""

    def each(self, now: float, lost: Mapping[int, str]) -> tuple[ReplicaHealth, ...]:
        """Every configured replica; `lost` as above."""
        found = []
        for replica, trouble in enumerate(self._troubles(now)):
            status, time = self._statuses.get(replica, (None, 0.0))
            free = status.blocks_free + status.blocks_idle if status else 0
            found.append(
                ReplicaHealth(
                    replica=replica,
                    role=status.role if status else "",
                    status=(trouble and lost.get(replica, trouble)) or "ok",
                    ready=not trouble,
                    last_step_age=status.step_age if status else None,
                    heartbeat_age=now - time if status else None,
                    running=status.running if status else 0,
                    waiting=status.waiting if status else 0,
                    tokens=status_tokens(status, status.blocks) if status else 0,
                    tokens_free=status_tokens(status, free) if status else 0,
                    prompt_tokens=status.prompt_tokens if status else 0,
                    cached_tokens=status.cached_tokens if status else 0,
                    weight_version=status.weight_version if status else "",
                )
            )
        return tuple(found)

    def _troubles(self, now: float) -> list[str]:
        return [self._trouble(replica, now) for replica in range(self._replicas)]

    def _trouble(self, replica: int, now: float) -> str:
        found = self._statuses.get(replica)
        if found is None:
            return UNHEARD
        status, time = found
        if now - time > self.limit:
            return "the engine's heartbeat is missing"
        if status.draining:
            return "the engine is shutting down"
        return "" if status.ready else "the engine is not ready"


def described(troubles: Sequence[str]) -> str:
    """The replicas that do not serve, and why."""
    return "; ".join(f"replica {replica}: {trouble}" for replica, trouble in enumerate(troubles) if trouble)


def total(statuses: Sequence[EngineStatus]) -> EngineStatus:
    """The heartbeats of several replicas as one."""
    ready = [status for status in statuses if status.ready]
    positions = max(len(status.accepted_at) for status in statuses)
    accepted = [status.accepted_at + (0,) * (positions - len(status.accepted_at)) for status in statuses]
    sums = {name: sum(getattr(status, name) for status in statuses) for name in SUMS}
    return msgspec.structs.replace(
        (ready or list(statuses))[0],
        **sums,
        time=max(status.time for status in statuses),
        epoch=max(status.epoch for status in statuses),
        ready=bool(ready),
        draining=all(status.draining for status in statuses),
        sleeping=all(status.sleeping for status in statuses),
        asleep=all(status.asleep for status in statuses),
        loaded=any(status.loaded for status in statuses),
        load_seconds=max(status.load_seconds for status in statuses),
        paused=next((status.paused for status in statuses), "") if all(status.paused for status in statuses) else "",
        step_age=max(status.step_age for status in statuses),
        accepted_at=tuple(map(sum, zip(*accepted, strict=True))),
        replica=0,
    )


def status_tokens(status: EngineStatus, blocks: int) -> int:
    """Tokens of requests of full length in so many KV blocks of an engine."""
    return capacity_tokens(blocks, status.block_size, status.windows, status.max_model_len)
