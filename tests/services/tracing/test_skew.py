"""Clocks of other machines, artificially ahead and behind: handshakes correct them until spans nest."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from penstock.protocol.links import TEXT, TOKENS, Link, Role, new_incarnation
from penstock.services.links.link import HELLO_INTERVAL, Port, Self
from penstock.services.tracing.clock import Clock, found_offset, machine

SECOND = 10**9
LIMIT = 60.0  # seconds, after which something has hung


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


def me(role: Role, clock: Clock | None, index: int = 0) -> Self:
    return Self(role, index, new_incarnation(), 0, clock=clock)


class Hosts:
    """A scheduler, a tokenizer and an api process on machines whose clocks say what they like."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, *clocks: Clock | None) -> None:
        scheduler, tokenizer, api = clocks
        self.ports = [
            Port.bind(context, TOKENS, me(Role.SCHEDULER, scheduler), run_dir),
            Port.connect(context, TOKENS, me(Role.TOKENIZER, tokenizer), run_dir),
            Port.bind(context, TEXT, me(Role.TOKENIZER, tokenizer), run_dir),
            Port.connect(context, TEXT, me(Role.API, api), run_dir),
        ]
        self.now = 0.0

    def turn(self, rounds: int = 3, *corrected: Clock | None) -> None:
        """Hellos and welcomes all around, so many times, and as often again as these clocks are left uncorrected."""
        limit = time.monotonic() + LIMIT
        while rounds > 0 or not all(clock is None or clock.correction for clock in corrected):
            assert time.monotonic() < limit, "nobody was told of the time"
            rounds -= 1
            self.now += HELLO_INTERVAL + 0.1
            for port in self.ports:
                port.tick(self.now)
            deadline = time.monotonic() + 0.2
            while time.monotonic() < deadline:
                for port in self.ports:
                    port.receive()

    def close(self) -> None:
        for port in self.ports:
            port.close()


def test_spans_nest_over_machines_whose_clocks_differ(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    true = found_offset()
    scheduler = Clock(true, place=1, leads=True)
    tokenizer, api = Clock(true - 5 * SECOND, place=2), Clock(true + 3 * SECOND, place=3)
    hosts = Hosts(context, tmp_path, scheduler, tokenizer, api)
    hosts.turn(6, tokenizer, api)
    hosts.close()
    clocks = (api, tokenizer, scheduler)
    moment = 100.0
    told = [clock.nanoseconds(moment) for clock in clocks]
    unknown = tokenizer.uncertainty + api.uncertainty
    assert tokenizer.correction
    assert api.correction
    assert max(told) - min(told) <= 2 * unknown, "the skew was seconds"
    apart = 2 * unknown / 1e9
    outer = [(api.nanoseconds(moment - 2 * apart), api.nanoseconds(moment + 2 * apart))]
    outer.append((tokenizer.nanoseconds(moment - apart), tokenizer.nanoseconds(moment + apart)))
    outer.append((scheduler.nanoseconds(moment), scheduler.nanoseconds(moment)))
    for (before, after), (begin, end) in itertools.pairwise(outer):
        assert before <= begin <= end <= after


def test_clocks_of_one_machine_are_left_alone(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    """What a handshake could tell them would be worse than what they have."""
    clocks = [Clock(found_offset(), machine(), leads=number == 0) for number in range(3)]
    hosts = Hosts(context, tmp_path, *clocks)
    hosts.turn()
    hosts.close()
    assert [clock.correction for clock in clocks] == [0, 0, 0]


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_who_tells_no_traces_tells_no_times(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, silent: int
) -> None:
    clocks: list[Clock | None] = [
        Clock(found_offset() + skew * SECOND, place=1 + skew, leads=not skew) for skew in range(3)
    ]
    clocks[silent] = None
    expected = {0: [False, False, False], 1: [False, False, False], 2: [False, True, False]}[silent]
    hosts = Hosts(context, tmp_path, *clocks)
    hosts.turn(3, *(clock for clock, told in zip(clocks, expected, strict=True) if told))
    hosts.close()
    assert [clock is not None and clock.correction != 0 for clock in clocks] == expected


def test_links_say_who_goes_by_whom() -> None:
    """Every chain of connectors ends at a scheduler, so all go by its clock."""
    upward: dict[Role, Role] = {}
    links: tuple[Link, ...] = (TEXT, TOKENS)
    for link in links:
        upward[link.connector] = link.binder
    assert upward[upward[Role.API]] == Role.SCHEDULER
