"""A prefill replica on another host than the one that decodes, which reads its blocks by NIXL: the words of a single
replica, whatever happens to either.

The two hosts are two launchers with run directories of their own on this machine. They meet at an address of its
loopback network that nothing else has.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from penstock.engine_core.distributed import nixl
from penstock.services.links.curve import new_keys, write_keys
from tests.e2e.chaos.conftest import STREAMS
from tests.e2e.chaos.crowd import Ask, Heard, calm, characters, crowd, play
from tests.e2e.chaos.leftovers import ended
from tests.e2e.chaos.test_disaggregation import OPTIONS, back, counted, of_each
from tests.e2e.hosts import Worker, working
from tests.e2e.server import ONE_EACH, Server, serving

pytestmark = pytest.mark.skipif(not nixl.installed(), reason=nixl.MISSING)

DECODING = "api,tokenizer,scheduler,executor:1"  # schedulers of both replicas are there
PREFILL = "executor:0"
MOST = 10  # crowds that are asked, at most, until blocks come in time


@dataclass
class Apart:
    server: Server  # whose executor decodes
    worker: Worker  # whose executor computes prompts


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    folder = tmp_path_factory.mktemp("apart")
    keys = folder / "link.keys"
    write_keys(keys, new_keys())
    options = (*OPTIONS, *ONE_EACH, "--device", "cpu", "--link-keys", str(keys), "--scheduler-address", address())
    with (
        working(None, folder / "b", *options, parts=PREFILL) as worker,
        serving(folder, *options, "--parts", DECODING) as server,
    ):
        back(server)
        yield Apart(server, worker)


def address() -> str:
    """Of this machine alone, with ports that nobody else asks for."""
    number = os.getpid()
    return f"tcp://127.{1 + number // (1 << 16) % 200}.{number // 256 % 256}.{1 + number % 250}:7000"


def transferred(server: Server) -> int:
    """Requests so far whose blocks came from the other host. On a slow machine some come too late, and are computed."""
    return of_each(counted(server), "engine_transfers_total")[1]


def ask_until_some_come(apart: Apart, before: int) -> None:
    """Others with prompts of their own, unless blocks have come since."""
    for number in range(MOST):
        if transferred(apart.server) > before:
            return
        calm(apart.server.url, crowd(STREAMS, f"The {number + 2}nd time, "))
    raise AssertionError(f"no blocks come:\n{apart.server.log.read_text()}")


def test_blocks_come_from_the_other_host(apart: Apart, asks: list[Ask], undisturbed: list[Heard]) -> None:
    found = calm(apart.server.url, asks)
    for request, heard, expected in zip(asks, found, undisturbed, strict=True):
        assert heard == expected, request
    back(apart.server)
    ask_until_some_come(apart, 0)
    back(apart.server)
    assert of_each(counted(apart.server), "engine_handover_blocks_held") == [0, 0]
    assert " prefill_memory replica=0 agent=executor-0-" in apart.server.log.read_text()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_streams_go_on_whichever_executor_is_killed(
    apart: Apart, asks: list[Ask], undisturbed: list[Heard], side: str
) -> None:
    back(apart.server)
    done: list[int] = []

    def strike() -> None:
        pid = apart.worker.executors()[0] if side == "prefill" else apart.server.children()["executor"]
        done.append(pid)
        os.kill(pid, signal.SIGKILL)

    found = asyncio.run(play(apart.server.url, asks, {characters(undisturbed) // 10: strike}))
    assert done
    for request, heard, expected in zip(asks, found, undisturbed, strict=True):
        assert heard == expected, request


def test_afterwards_they_work_together_again_and_nothing_is_left(
    apart: Apart, others: list[Ask], single: tuple[list[Heard], ...]
) -> None:
    """The last one with these. The executor that computes prompts is met by its new metadata."""
    back(apart.server)
    before = transferred(apart.server)
    assert calm(apart.server.url, others) == single[1]
    ask_until_some_come(apart, before)
    ended(apart.server)
    assert apart.worker.end() == 0
