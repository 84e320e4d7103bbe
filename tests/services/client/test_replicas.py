"""Heartbeats of several replicas as one engine."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.protocol.control import EngineStatus
from penstock.protocol.links import Role
from penstock.services.client.replicas import UNHEARD, ReplicaSet, total
from penstock.services.metrics.snapshot import Snapshot
from tests.services.client.fake_engine import status

LIMIT = 2.0


def beat(replica: int, **fields: Any) -> EngineStatus:
    return msgspec.structs.replace(status(), replica=replica, **fields)


def engines(*beats: EngineStatus, replicas: int = 2) -> ReplicaSet:
    made = ReplicaSet(replicas, LIMIT)
    for each in beats:
        made.report(each, 10.0)
    return made


def test_one_replica_is_the_engine() -> None:
    made = ReplicaSet(1, LIMIT)
    assert (made.status, made.time, made.trouble(0.0)) == (None, 0.0, UNHEARD)
    made.report(only := status(), 10.0)
    assert made.status is only
    assert (made.time, made.trouble(10.0), made.degraded(10.0, {})) == (10.0, "", "")
    assert made.trouble(12.1) == "the engine's heartbeat is missing"
    made.report(status(ready=False), 13.0)
    assert made.trouble(13.0) == "the engine is not ready"
    made.report(status(ready=False, draining=True), 13.0)
    assert made.trouble(13.0) == "the engine is shutting down"


def test_one_of_several_is_enough() -> None:
    made = engines(beat(0, ready=False), beat(1))
    assert made.trouble(10.0) == ""
    assert made.degraded(10.0, {}) == "replica 0: the engine is not ready"
    assert made.degraded(10.0, {0: "executor-0 failed 5 times", 1: "not said of one that serves"}) == (
        "replica 0: executor-0 failed 5 times"
    )
    assert engines(beat(1)).degraded(10.0, {}) == f"replica 0: {UNHEARD}"
    assert engines(beat(0), beat(1)).degraded(10.0, {}) == ""


def test_none_of_several_is_trouble() -> None:
    made = engines(beat(0, ready=False), beat(1, ready=False, draining=True))
    assert made.trouble(10.0) == (
        "no replica serves: replica 0: the engine is not ready; replica 1: the engine is shutting down"
    )
    assert made.degraded(10.0, {}) == "", "it is more than that"
    assert engines(beat(0, ready=False), beat(1, ready=False)).trouble(10.0) == "the engine is not ready"
    assert engines(beat(0), beat(1)).trouble(13.0) == "the engine's heartbeat is missing"


def test_counts_add_up() -> None:
    first = beat(0, running=2, blocks=10, drain_rate=1.5, accepted_at=(3, 1), step_age=0.5, epoch=7)
    second = beat(1, running=3, blocks=20, drain_rate=0.5, accepted_at=(1,), ready=False)
    made = total([first, second])
    assert (made.running, made.blocks, made.drain_rate, made.accepted_at) == (5, 30, 2.0, (4, 1))
    assert (made.ready, made.draining, made.step_age, made.block_size) == (True, False, 0.5, first.block_size)
    assert (made.epoch, made.replica) == (7, 0)
    assert made.max_num_seqs == 2 * first.max_num_seqs
    loras = (beat(at, adapter_places=2, adapters_placed=1 + at, adapters_held=3) for at in range(2))
    both = total(list(loras))
    assert (both.adapter_places, both.adapters_placed, both.adapters_held) == (4, 3, 6)
    seen = (beat(at, encoder_rows=8, encoder_rows_held=at, images_encoded=2, image_hits=3 - at) for at in range(2))
    both = total(list(seen))
    assert (both.encoder_rows, both.encoder_rows_held, both.images_encoded, both.image_hits) == (16, 1, 4, 5)
    states = [
        beat(at, state_places=4, state_snapshots=1 + at, state_host_places=8, state_host_snapshots=2 * at)
        for at in range(2)
    ]
    both = total(states)
    assert (both.state_places, both.state_snapshots, both.state_host_places, both.state_host_snapshots) == (8, 3, 16, 2)
    assert engines(first, second).status == made


def test_each_replica_is_told_of() -> None:
    first, missing = engines(beat(0, running=2, blocks=10, blocks_free=3, blocks_idle=2)).each(11.0, {1: "gone"})
    assert (first.replica, first.status, first.ready, first.heartbeat_age) == (0, "ok", True, 1.0)
    assert (first.running, first.tokens, first.tokens_free) == (2, 10 * status().block_size, 5 * status().block_size)
    assert (missing.replica, missing.status, missing.ready, missing.heartbeat_age) == (1, "gone", False, None)
    assert (missing.running, missing.tokens, missing.last_step_age) == (0, 0, None)


def test_a_replica_that_should_not_be_is_none() -> None:
    assert engines(beat(5), replicas=1).status is None


def test_what_runs_and_waits_is_as_the_latest_heartbeat_says() -> None:
    """Snapshots are taken once a second, heartbeats sent soon after it changes."""
    numbers = {"engine_running": 3.0, "engine_waiting": 2.0, "engine_blocks": 9.0}
    told = [
        Snapshot(role, index, 1, 1, time, {name: {(): value} for name, value in numbers.items()})
        for role, index, time in ((Role.SCHEDULER, 0, 50.0), (Role.SCHEDULER, 1, 70.0), (Role.EXECUTOR, 0, 50.0))
    ]
    made = engines(beat(0, time=60.0, running=1, waiting=0), beat(1, time=60.0, running=1, waiting=0))
    made.refresh(told)
    found = [[each.values[name][()] for name in numbers] for each in told]
    assert found == [[1, 0, status().blocks], [3, 2, 9], [3, 2, 9]]
