"""kill -9 of a scheduler, of tokenizers and of an api process, in the middle of a crowd of streams.

Whoever's api process lives hears exactly what it hears undisturbed: no token lost, none said twice. Afterwards nothing
is left of anybody's request.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.chaos.crowd import Ask, Heard, crowd, play
from tests.e2e.server import Server, descendants, serving

STREAMS = 64
KILLS = 2  # of each kind in the ordinary run
LONG_KILLS = 20
PROCESSES = ("--tokenizer-processes", "2", "--api-processes", "2", "--max-num-seqs", "64")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("chaos"), *PROCESSES) as server:
        yield server


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return crowd(STREAMS)


@pytest.fixture(scope="module")
def undisturbed(server: Server, asks: list[Ask]) -> list[Heard]:
    found = asyncio.run(play(server.url, asks, {}))
    assert all(heard.status == 200 and heard.error is None and heard.usage for heard in found)
    return found


def pids(server: Server, role: str) -> list[int]:
    """Of the processes of a role, in the order of their indices."""
    found = []
    for pid in descendants(server.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if role.encode() in words[:4]:
            found.append((words, pid))
    return [pid for _, pid in sorted(found)]


class Strike:
    """Kills, or stops, one process of a role when it is called."""

    def __init__(self, server: Server, role: str, number: int, blow: signal.Signals = signal.SIGKILL) -> None:
        self._server, self._role, self._number, self._blow = server, role, number, blow
        self.done = False

    def __call__(self) -> None:
        alive = pids(self._server, self._role)
        os.kill(alive[self._number % len(alive)], self._blow)
        self.done = True


def at_rest(server: Server) -> None:
    """No request is left, no block is held, every process is there again."""
    health = server.until("/health", lambda health: rests(health), limit=60)
    engine = health["engine"]
    assert engine["blocks_free"] + engine["blocks_idle"] == engine["blocks"]
    assert health["parts"]["tokenizer"]["connected"] == 2


def rests(health: dict) -> bool:  # type: ignore[type-arg]
    engine = health.get("engine")
    quiet = engine is not None and engine["running"] == engine["waiting"] == 0
    return bool(quiet and health["ready"] and health["parts"]["tokenizer"]["connected"] == 2)


def check(server: Server, asks: list[Ask], undisturbed: list[Heard], moments: dict[int, Strike]) -> None:
    at_rest(server)
    found = asyncio.run(play(server.url, asks, moments))
    assert all(strike.done for strike in moments.values())
    for request, heard, expected in zip(asks, found, undisturbed, strict=True):
        assert heard == expected, request
    at_rest(server)


def once(kills: int) -> object:
    """A parameter for each kill; those beyond the first few are for the long run."""
    return [pytest.param(seed, marks=() if seed < KILLS else pytest.mark.long) for seed in range(kills)]


@pytest.mark.parametrize("seed", once(LONG_KILLS))  # type: ignore[arg-type]
@pytest.mark.parametrize("role", ["scheduler", "tokenizer"])
def test_nothing_is_lost_or_said_twice(
    server: Server, asks: list[Ask], undisturbed: list[Heard], role: str, seed: int
) -> None:
    moment = random.Random(f"{role} {seed}").randint(1, 1500)
    check(server, asks, undisturbed, {moment: Strike(server, role, seed)})


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("role", ["scheduler", "tokenizer"])
def test_one_that_is_stopped_is_replaced(
    server: Server, asks: list[Ask], undisturbed: list[Heard], role: str, seed: int
) -> None:
    """By its silence; the launcher ends it."""
    moment = random.Random(f"{role} {seed}").randint(1, 1500)
    check(server, asks, undisturbed, {moment: Strike(server, role, seed, signal.SIGSTOP)})


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_a_tokenizer_and_the_scheduler_at_once(
    server: Server, asks: list[Ask], undisturbed: list[Heard], seed: int
) -> None:
    moment = random.Random(seed).randint(1, 1500)
    kills = {moment: Strike(server, "tokenizer", seed), moment + 1: Strike(server, "scheduler", 0)}
    check(server, asks, undisturbed, kills)


@pytest.mark.parametrize("seed", once(LONG_KILLS))  # type: ignore[arg-type]
def test_a_dead_api_process_takes_its_own_clients_alone(
    server: Server, asks: list[Ask], undisturbed: list[Heard], seed: int
) -> None:
    """Their connections break; the others hear everything, and what was computed for them ends."""
    at_rest(server)
    strike = Strike(server, "api", seed)
    found = asyncio.run(play(server.url, asks, {random.Random(seed).randint(1, 800): strike}))
    assert strike.done
    broken = [heard for heard in found if heard.error is not None]
    assert 0 < len(broken) < len(found)
    assert all(isinstance(heard.error, str) for heard in broken), "a connection that broke, no answer"
    for request, heard, expected in zip(asks, found, undisturbed, strict=True):
        assert heard.error is not None or heard == expected, request
    at_rest(server)
