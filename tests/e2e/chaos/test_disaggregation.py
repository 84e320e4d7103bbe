"""A prefill replica and one that decodes behind one API: the words of a single replica, and all of them, whoever
dies."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Iterator

import pytest
from prometheus_client.samples import Sample

from benchmarks.samples import scrape, total
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.memory_estimate import block_bytes
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.links import Role
from penstock.services.metrics.snapshot import read_snapshots
from tests.e2e.chaos.conftest import PLAIN, STREAMS
from tests.e2e.chaos.crowd import Ask, Heard, calm, characters, play
from tests.e2e.chaos.leftovers import at_rest, ended
from tests.e2e.chaos.test_kills import pids
from tests.e2e.chaos.test_replicas import heard_anew
from tests.e2e.server import LIMIT, Server, serving

EACH = block_bytes(read_spec(demo_folder()), 4, 4)
OPTIONS = (
    *PLAIN, "--data-parallel-size", "2", "--prefill-replicas", "1", "--max-local-prefill-length", "0",
    "--kv-host-memory", str(2000 * EACH), "--max-num-batched-tokens", "64",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("apart"), *OPTIONS) as server:
        back(server)
        yield server


def back(server: Server) -> None:
    """Wait until nothing is left to do, and both replicas serve."""
    at_rest(server)
    heard_anew(server)
    server.until("/health", lambda health: not health["degraded"])


def counted(server: Server) -> list[Sample]:
    """The engine's metrics as of now: schedulers tell of theirs once a second."""
    asked = now = time.time()
    while any(told.time <= asked for told in read_snapshots(server.run_dir, now) if told.role == Role.SCHEDULER):
        assert now < asked + LIMIT, "a replica is silent"
        select.select([], [], [], 0.02)
        now = time.time()
    return scrape(server.url)


def of_each(found: list[Sample], name: str) -> list[int]:
    """A metric of the engine, by replica."""
    return [int(total(found, name, replica=str(replica))) for replica in (0, 1)]


def test_prompts_are_computed_at_one_and_outputs_at_the_other(
    server: Server, asks: list[Ask], undisturbed: list[Heard]
) -> None:
    server.logged("prefill_memory", 1)
    found = calm(server.url, asks)
    for request, heard, expected in zip(asks, found, undisturbed, strict=True):
        assert heard == expected, request
    back(server)
    server.until("/health", lambda health: health["replicas"][1]["prompt_tokens"] == 0)
    assert [replica["role"] for replica in server.get("/health")["replicas"]] == ["prefill", "decode"]
    told = counted(server)
    assert of_each(told, "engine_handovers_total") == [STREAMS, 0]
    assert of_each(told, "engine_transfers_total") == [0, STREAMS]
    assert of_each(told, "engine_handover_blocks_held") == [0, 0]
    finished, failed = of_each(told, "engine_finished_total"), of_each(told, "engine_failed_total")
    assert (finished[0], *failed) == (0, 0, 0)
    assert finished[1] == sum(heard.status == 200 for heard in found) + sum(len(heard.finish) - 1 for heard in found)


@pytest.mark.parametrize("role", ["executor", "scheduler"])
@pytest.mark.parametrize("replica", [0, 1])
def test_streams_go_on_whoever_is_killed(
    server: Server, asks: list[Ask], undisturbed: list[Heard], role: str, replica: int
) -> None:
    back(server)
    done: list[int] = []

    def strike() -> None:
        done.append(pids(server, role)[replica])
        os.kill(done[0], signal.SIGKILL)

    found = asyncio.run(play(server.url, asks, {characters(undisturbed) // 10: strike}))
    assert done
    for request, heard, expected in zip(asks, found, undisturbed, strict=True):
        assert heard == expected, request


def test_afterwards_they_work_together_again_and_nothing_is_left(
    server: Server, others: list[Ask], single: tuple[list[Heard], ...]
) -> None:
    """The last one with this server."""
    back(server)
    server.logged(" prefill_memory ", 3)  # a new executor of either side maps, or is mapped
    before = of_each(counted(server), "engine_transfers_total")[1]
    assert calm(server.url, others) == single[1]
    at_rest(server)
    told = counted(server)
    assert of_each(told, "engine_transfers_total")[1] == before + STREAMS
    assert of_each(told, "engine_handover_blocks_held") == [0, 0]
    assert not list(server.run_dir.glob("*.new"))
    ended(server)
