"""A watched port: the end of a peer's process wakes it by itself, and nothing is left open."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from penstock.protocol.links import TOKENS, Role
from penstock.protocol.messages import Rejected
from penstock.services.links import async_link
from penstock.services.links.async_link import AsyncLink
from penstock.services.links.handshake import Identity
from penstock.services.links.link import UNREACHABLE, Arrival, Joined, Left, Link
from tests.services.links.network import Ends, Proxy, patient

LIMIT = 60.0  # seconds
PEER = """
import sys, time, zmq, pathlib
from penstock.protocol.links import TOKENS, Role
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Link
port = Link.connect(zmq.Context(), TOKENS, Identity(Role.TOKENIZER, 0, int(sys.argv[2]), 7), pathlib.Path(sys.argv[1]))
while True:
    port.tick(time.monotonic())
    port.receive()
    port.socket.poll(50)
"""


def peer(run_dir: Path, incarnation: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PEER, str(run_dir), str(incarnation)], cwd=Path(__file__).parents[3])


@asynccontextmanager
async def watched(run_dir: Path) -> AsyncIterator[tuple[AsyncLink, asyncio.Queue[Arrival]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    found = AsyncLink(Link.bind(context, TOKENS, Identity(Role.SCHEDULER, 0, 1, 7), run_dir))
    arrivals: asyncio.Queue[Arrival] = asyncio.Queue()

    def keep(batch: list[Arrival]) -> None:
        for arrival in batch:
            arrivals.put_nowait(arrival)

    found.start(keep)
    try:
        yield found, arrivals
    finally:
        found.close()
        context.destroy(linger=0)


def descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{fd}") + fd for fd in os.listdir("/proc/self/fd") if pidfd(fd)}


def pidfd(fd: str) -> bool:
    try:
        return "pidfd" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


async def test_the_end_of_a_process_is_heard_without_a_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_link, "TICK_WITH_PEERS", 1e6)
    child = peer(tmp_path, 5)
    before = descriptors()
    try:
        async with watched(tmp_path) as (_, arrivals):
            joined = await asyncio.wait_for(arrivals.get(), LIMIT)
            assert isinstance(joined.message, Joined)
            child.kill()
            left = await asyncio.wait_for(arrivals.get(), LIMIT)
            assert left == Arrival(joined.peer, Left(f"process {child.pid} ended"))
            assert descriptors() == before
            child.wait()
            child = peer(tmp_path, 6)  # its successor is watched as well
            again = await asyncio.wait_for(arrivals.get(), LIMIT)
            assert again.peer.incarnation == 6
            assert len(descriptors() - before) == 2  # the port's and the watch's
        assert descriptors() == before
    finally:
        child.kill()
        child.wait()


async def test_with_no_descriptor_left_a_peer_is_served_and_its_end_heard_at_a_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", exhausted)
    child = peer(tmp_path, 5)
    try:
        async with watched(tmp_path) as (_, arrivals):
            joined = await asyncio.wait_for(arrivals.get(), LIMIT)
            assert isinstance(joined.message, Joined)
            child.kill()
            left = await asyncio.wait_for(arrivals.get(), LIMIT)
            assert left == Arrival(joined.peer, Left(f"process {child.pid} ended"))
    finally:
        child.kill()
        child.wait()


async def test_a_port_alone_ticks_often(tmp_path: Path) -> None:
    async with watched(tmp_path) as (found, arrivals):
        assert found.peers == ()
        assert found._timer is not None
        assert found._timer.when() - asyncio.get_running_loop().time() <= async_link.TICK
        assert arrivals.empty()
        assert async_link.TICK < async_link.TICK_WITH_PEERS < TOKENS.silence / 3  # hellos come in time


async def test_a_connection_between_hosts_that_breaks_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has another descriptor, which the loop follows: messages wake it without a tick."""
    patient(monkeypatch)
    monkeypatch.setattr(async_link, "TICK_WITH_PEERS", 1e6)
    ends = Ends()
    port, number = ends.bind(TOKENS)
    proxy = Proxy(number)
    arrivals: asyncio.Queue[Arrival] = asyncio.Queue()

    def keep(batch: list[Arrival]) -> None:
        for arrival in batch:
            arrivals.put_nowait(arrival)

    binder, connector = AsyncLink(port), AsyncLink(ends.connect(TOKENS, proxy.port))
    monkeypatch.setattr(async_link, "TICK", 0.05)
    try:
        binder.start(lambda _: None)
        connector.start(keep)
        joined = await asyncio.wait_for(arrivals.get(), LIMIT)
        assert isinstance(joined.message, Joined)
        proxy.cut()
        left = await asyncio.wait_for(arrivals.get(), LIMIT)
        assert left == Arrival(joined.peer, Left(UNREACHABLE))
        again = await asyncio.wait_for(arrivals.get(), LIMIT)
        assert isinstance(again.message, Joined)
        (peer,) = binder.peers
        assert binder.send(peer, Rejected(id=1, status=400, message=""))
        heard = await asyncio.wait_for(arrivals.get(), LIMIT)
        assert heard == Arrival(again.peer, Rejected(id=1, status=400, message=""))
    finally:
        connector.close()
        binder.close()
        proxy.close()
        ends.end()
