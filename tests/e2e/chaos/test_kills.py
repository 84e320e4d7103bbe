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
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.chaos.crowd import Ask, Heard, calm, characters, crowd, play
from tests.e2e.chaos.leftovers import Holding, at_rest, ended, holdings, nothing_kept
from tests.e2e.server import FAULTY, Server, command_line, descendants, serving

STREAMS = 32
KILLS = 1  # of each kind in the ordinary run
LONG_KILLS = 20
LONG_STOPS = 5
PORTION = 4
PROCESSES = ("--tokenizer-processes", "2", "--api-processes", "2", "--max-num-seqs", "64")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("chaos"), *PROCESSES, entry=FAULTY) as server:
        yield server


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return crowd(STREAMS)


@pytest.fixture(scope="module")
def undisturbed(server: Server, asks: list[Ask]) -> list[Heard]:
    return calm(server.url, asks)


def pids(server: Server, role: str) -> list[int]:
    """Of the processes of a role, in the order of their indices."""
    found = [(command_line(pid), pid) for pid in descendants(server.process.pid)]
    return [pid for words, pid in sorted(found) if role.encode() in words[:4]]


class Strike:
    """Kills, or stops, one process of a role when it is called."""

    def __init__(self, server: Server, role: str, number: int, blow: signal.Signals = signal.SIGKILL) -> None:
        self._server, self._role, self._number, self._blow = server, role, number, blow
        self.done = False

    def __call__(self) -> None:
        alive = pids(self._server, self._role)
        os.kill(alive[self._number % len(alive)], self._blow)
        self.done = True


def moment(role: str, seed: int, undisturbed: list[Heard], share: float = 0.6) -> int:
    """After how many characters the blow falls, within this share of all."""
    return random.Random(f"{role} {seed}").randint(1, int(characters(undisturbed) * share))


def portions(total: int) -> list[list[int]]:
    """Seeds, as many together as one server bears: five deaths of a process in a minute are the end of hope."""
    return [list(range(total))[first : first + PORTION] for first in range(0, total, PORTION)]


def settled(server: Server, asks: list[Ask], undisturbed: list[Heard]) -> dict[int, Holding]:
    """What a server has that has answered the crowd once, the same as any other."""
    assert asyncio.run(play(server.url, asks, {})) == undisturbed
    at_rest(server)
    return holdings(server)


def check(server: Server, asks: list[Ask], undisturbed: list[Heard], moments: dict[int, Strike]) -> None:
    at_rest(server)
    found = asyncio.run(play(server.url, asks, moments))
    assert all(strike.done for strike in moments.values())
    for request, heard, expected in zip(asks, found, undisturbed, strict=True):
        assert heard == expected, request
    at_rest(server)


def check_api(server: Server, asks: list[Ask], undisturbed: list[Heard], seed: int) -> None:
    """Connections of its clients break; the others hear everything, and what was computed for it ends. What the kernel
    has of an answer arrives also from a dead process: until it dies, the engine is slow."""
    at_rest(server)
    strike, slow = Strike(server, "api", seed), ExitStack()

    def strike_within() -> None:
        with slow:
            strike()

    slow.enter_context(server.slow())
    found = asyncio.run(play(server.url, asks, {moment("api", seed, undisturbed, 0.1): strike_within}))
    assert strike.done
    broken = [heard for heard in found if heard.error is not None]
    assert 0 < len(broken) < len(found)
    assert all(isinstance(heard.error, str) for heard in broken), "a connection that broke, no answer"
    for request, heard, expected in zip(asks, found, undisturbed, strict=True):
        assert heard.error is not None or heard == expected, request
    at_rest(server)


@pytest.mark.parametrize("seed", range(KILLS))
@pytest.mark.parametrize("role", ["scheduler", "tokenizer"])
def test_nothing_is_lost_or_said_twice(
    server: Server, asks: list[Ask], undisturbed: list[Heard], role: str, seed: int
) -> None:
    check(server, asks, undisturbed, {moment(role, seed, undisturbed): Strike(server, role, seed)})


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_dead_api_process_takes_its_own_clients_alone(
    server: Server, asks: list[Ask], undisturbed: list[Heard], seed: int
) -> None:
    check_api(server, asks, undisturbed, seed)


def test_afterwards_nothing_is_left(server: Server, undisturbed: list[Heard]) -> None:
    """The last one with this server: also of those before it."""
    at_rest(server)
    ended(server)


@pytest.mark.long
@pytest.mark.parametrize("seeds", portions(LONG_KILLS))
@pytest.mark.parametrize("role", ["scheduler", "tokenizer", "api"])
def test_twenty_kills(tmp_path: Path, asks: list[Ask], undisturbed: list[Heard], role: str, seeds: list[int]) -> None:
    with serving(tmp_path, *PROCESSES, entry=FAULTY) as server:
        before = settled(server, asks, undisturbed)
        for seed in seeds:
            if role == "api":
                check_api(server, asks, undisturbed, seed)
            else:
                check(server, asks, undisturbed, {moment(role, seed, undisturbed): Strike(server, role, seed)})
        nothing_kept(server, before)
        ended(server)


@pytest.mark.long
@pytest.mark.parametrize("seeds", portions(LONG_STOPS))
@pytest.mark.parametrize("role", ["scheduler", "tokenizer"])
def test_one_that_is_stopped_is_replaced(
    tmp_path: Path, asks: list[Ask], undisturbed: list[Heard], role: str, seeds: list[int]
) -> None:
    """By its silence; the launcher ends it."""
    with serving(tmp_path, *PROCESSES, entry=FAULTY) as server:
        before = settled(server, asks, undisturbed)
        for seed in seeds:
            strike = Strike(server, role, seed, signal.SIGSTOP)
            check(server, asks, undisturbed, {moment(role, seed, undisturbed): strike})
        nothing_kept(server, before)
        ended(server)


@pytest.mark.long
@pytest.mark.parametrize("seeds", portions(LONG_STOPS))
def test_a_tokenizer_and_the_scheduler_at_once(
    tmp_path: Path, asks: list[Ask], undisturbed: list[Heard], seeds: list[int]
) -> None:
    with serving(tmp_path, *PROCESSES, entry=FAULTY) as server:
        before = settled(server, asks, undisturbed)
        for seed in seeds:
            first = moment("both", seed, undisturbed)
            kills = {first: Strike(server, "tokenizer", seed), first + 1: Strike(server, "scheduler", 0)}
            check(server, asks, undisturbed, kills)
        nothing_kept(server, before)
        ended(server)
