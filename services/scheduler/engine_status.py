"""The heartbeat of the scheduler process: what it says of the engine, and when it is due."""

from __future__ import annotations

import msgspec

from penstock.engine_core.kv.snapshots import SnapshotStatistics
from penstock.engine_core.scheduling.executor_group import ExecutorGroup, Rest
from penstock.engine_core.scheduling.statistics import SchedulerStatistics
from penstock.protocol.control import EngineStatus
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.groups import replica_role
from penstock.services.links.link import Peer

STATUS_DELAY = 0.05  # seconds for which the numbers of sequences may have changed without a heartbeat
PLACES = 32  # of a draft whose accepted tokens the heartbeat tells apart; jump-forward drafts may be far longer

SHARED = (
    "step", "running", "waiting", "prompt_tokens", "cached_tokens", "output_tokens", "finished", "aborted", "failed",
    "preemptions", "drain_rate", "drafts", "draft_tokens", "accepted_tokens",
)  # fmt: skip  # under the same names in both


class StatusTimer:
    """Heartbeats go out at their interval, at once when readiness changes, and soon after other numbers of sequences
    run or wait."""

    def __init__(self, interval: float, now: float) -> None:
        self.due = now  # monotonic seconds
        self._interval = interval
        self._sent: EngineStatus | None = None
        self._sent_at = now

    def is_due(self, now: float, *, ready: bool, draining: bool, counts: tuple[int, int] | None) -> bool:
        """`counts`: sequences that run and that wait; None: nothing has been loaded yet."""
        sent = self._sent
        if sent is None:
            return now >= self.due
        if counts is not None and counts != (sent.running, sent.waiting):
            self.due = min(self.due, self._sent_at + STATUS_DELAY)
        return now >= self.due or (sent.ready, sent.draining) != (ready, draining)

    def note(self, sent: EngineStatus, now: float) -> None:
        self._sent, self._sent_at, self.due = sent, now, now + self._interval


def group_status(
    executors: ExecutorGroup[Peer], model: ModelConfig, max_model_len: int, replica: int, wall: float, demand: int = 0,
    *, draining: bool,
) -> EngineStatus:  # fmt: skip
    """What there is to say before the first group of executors is complete. `wall`: unix seconds."""
    first = executors.known if executors.serves else None
    return EngineStatus(
        time=wall,
        epoch=executors.epoch,
        ready=executors.serves and not draining,
        sleeping=executors.rest is Rest.ASLEEP,
        asleep=executors.all_asleep,
        kept_weight_bytes=executors.kept_bytes,
        loaded=executors.complete,
        load_seconds=executors.wake_seconds,
        demand=demand,
        waiting=demand,
        draining=draining,
        replica=replica,
        role=replica_role(replica, model),
        block_size=model.block_size,
        max_model_len=max_model_len,
        max_num_seqs=model.max_num_seqs,
        device=executors.devices if first else "",
        dtype=first.dtype if first else "",
        kv_cache_dtype=first.kv_cache_dtype if first else "",
        windows=first.windows if first else (0,),
    )


def with_statistics(status: EngineStatus, found: SchedulerStatistics, step_age: float) -> EngineStatus:
    """The same with the scheduler's numbers and totals. `step_age`: seconds since the last result."""
    snapshots = found.snapshots or SnapshotStatistics(0, 0)
    return msgspec.structs.replace(
        status,
        **{name: getattr(found, name) for name in SHARED},
        step_age=step_age if found.in_flight else 0.0,
        blocks=found.pool.total,
        blocks_free=found.pool.free,
        blocks_idle=found.pool.idle,
        host_blocks=found.host_tier.total,
        host_blocks_held=found.host_tier.findable,
        disk_blocks=found.storage_tier.total,
        disk_blocks_held=found.storage_tier.findable,
        state_places=snapshots.total,
        state_snapshots=snapshots.held,
        state_host_places=snapshots.host_total,
        state_host_snapshots=snapshots.host_held,
        adapter_places=found.adapters.places,
        adapters_placed=found.adapters.placed,
        adapters_held=found.adapters.held,
        encoder_rows=found.encoder.rows,
        encoder_rows_held=found.encoder.held,
        images_encoded=found.encoder.encoded,
        image_hits=found.encoder.hits,
        group_blocks=found.group_blocks,
        accepted_at=tuple(found.accepted_at[:PLACES]),
    )
