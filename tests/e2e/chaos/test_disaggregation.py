"""A prefill replica and one that decodes behind one API: the words of a single replica, and all of them whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.samples import scrape, total
from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.memory_estimate import block_bytes
from penstock.engine_core.models.spec import read_spec
from tests.e2e.chaos.crowd import Ask, Heard, calm, characters, crowd, play
from tests.e2e.chaos.leftovers import at_rest, ended
from tests.e2e.chaos.test_kills import pids
from tests.e2e.chaos.test_replicas import heard_anew
from tests.e2e.server import Server, serving

STREAMS = 16
EACH = block_bytes(read_spec(demo_folder()), 4, 4)
PLAIN = ("--dtype", "float32", "--cpu-threads", "1", "--max-num-seqs", "32", "--block-size", "4")
OPTIONS = (
    *PLAIN, "--data-parallel-size", "2", "--prefill-replicas", "1", "--max-local-prefill-length", "0",
    "--kv-host-memory", str(2000 * EACH), "--max-num-batched-tokens", "64",
)  # fmt: skip


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return crowd(STREAMS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, asks: list[Ask]) -> list[Heard]:
    """What a single replica says."""
    with serving(tmp_path_factory.mktemp("alone"), *PLAIN) as server:
        return calm(server.url, asks)


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


def of_each(server: Server, name: str) -> list[float]:
    """A metric of the engine, by replica."""
    return [total(scrape(server.url), name, replica=str(replica)) for replica in (0, 1)]


def test_prompts_are_computed_at_one_and_outputs_at_the_other(
    server: Server, asks: list[Ask], undisturbed: list[Heard]
) -> None:
    server.logged("prefill_memory", 1)
    found = calm(server.url, asks)
    for request, heard, expected in zip(asks, found, undisturbed, strict=True):
        assert heard == expected, request
    back(server)
    for one in scrape(server.url):
        if any(w in one.name for w in ("transfer","handover","handed","local_pre","stale","engine_prompt_tokens","engine_finished","engine_failed","decode_seconds_count","prefill_seconds_count","time_per_output_token_seconds_count","engine_cached","queue_seconds_count","engine_ended","engine_host")):
            print(one)
    print(server.log.read_text()[-6000:])
    assert 0
