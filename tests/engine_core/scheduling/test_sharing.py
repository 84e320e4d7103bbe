"""The engine is shared out: a flood of one client leaves others their slots and blocks, and one client alone sees
nothing of it."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from penstock.engine_core.scheduling.request_queue import LOOK, PATIENCE
from penstock.protocol.messages import Client, Finish, Sampling, SubmitTokens
from penstock.protocol.steps import StepPlan
from tests.sim.idle import is_idle
from tests.sim.lives import World, random_lives, random_world
from tests.sim.server import ROOMY, Server

STEP = 0.02  # seconds
SLOTS = replace(ROOMY, slots=8, depth=2, blocks=1000)
BLOCKS = replace(ROOMY, slots=24, depth=2, blocks=80)  # of which each choice takes 10 at its end
SOON = round((PATIENCE + LOOK) / STEP) + 6  # steps: up to three in flight, the prompt's, and one more


def turn(server: Server) -> None:
    """A step's time."""
    server.now += STEP
    while server.scheduler.in_flight < server.world.depth and server.plan() is not None:
        pass
    if server.results:
        server.apply()


def flood(server: Server, requests: int = 4, n: int = 16, **who: str) -> list[int]:
    numbers = [server.submit([3, 4, 5, k], n=n, max_tokens=36, **who) for k in range(requests)]
    for _ in range(6):
        turn(server)
    return numbers


def steps_until_first(server: Server, number: int, most: int = 10_000) -> int:
    for steps in range(most):
        if server.seen(number).tokens:
            return steps
        turn(server)
    raise AssertionError("it has no token")


def finish(server: Server) -> None:
    server.run(depth=2)
    for life in server.lives.values():
        server.record.verify(life, server.world, aborted=False, stopped=False)


@pytest.mark.parametrize("world", [SLOTS, replace(SLOTS, depth=3), BLOCKS])
@pytest.mark.parametrize(
    ("hog", "guest"),
    [
        ({}, {"client": "b"}),
        ({"client": "a", "tenant": "one"}, {"client": "a", "tenant": "other"}),
        ({"client": "a", "tenant": "one"}, {"client": "b", "tenant": "one"}),
    ],
)
def test_a_short_request_passes_a_flood(world: World, hog: dict[str, str], guest: dict[str, str]) -> None:
    server = Server(world)
    flood(server, **hog)
    assert server.scheduler.statistics().waiting > 0
    probe = server.submit([9, 8, 7], max_tokens=3, **guest)
    assert steps_until_first(server, probe) <= SOON
    statistics = server.scheduler.statistics()
    assert statistics.yielded == (0 if world is BLOCKS else 1), "there are blocks for a short one, if it goes first"
    assert statistics.waiting_clients == 1
    queue = server.scheduler._state.queue
    given_up = [choice for choice in queue if choice.last_step]
    assert len(given_up) == statistics.yielded
    assert not queue._levels[0].preempted, "what gave its slot up waits for its client's turn"
    finish(server)


def test_blocks_are_given_up_until_a_newcomer_fits() -> None:
    server = Server(BLOCKS)
    flood(server, client="a")
    running = server.scheduler.statistics().running
    probe = server.submit([9, 8, 7], max_tokens=58, client="b")  # 15 blocks, more than a choice of the flood frees
    assert steps_until_first(server, probe) <= 2 * SOON
    assert 1 <= server.scheduler.statistics().yielded < running
    finish(server)


@pytest.mark.parametrize("fairness", [True, False])
def test_without_fairness_and_within_one_client_a_short_request_waits_for_its_turn(fairness: bool) -> None:
    server = Server(replace(SLOTS, fairness=fairness))
    flood(server)
    probe = server.submit([9, 8, 7], max_tokens=3, client="" if fairness else "b")
    assert steps_until_first(server, probe) > 4 * SOON
    assert server.scheduler.statistics().yielded == 0
    finish(server)


def test_invented_clients_of_a_tenant_take_nothing_from_another() -> None:
    """A tenant with a client for each request holds all slots; another has one request after the other."""
    server = Server(SLOTS)
    for k in range(60):
        server.submit([3, 4, k % 30], max_tokens=30, client=f"invented-{k}", tenant="flood")
    for _ in range(6):
        turn(server)
    for _ in range(5):
        probe = server.submit([9, 8, 7], max_tokens=3, client="me", tenant="other")
        assert steps_until_first(server, probe) <= SOON
    finish(server)


def test_many_newcomers_share_what_one_held() -> None:
    server = Server(SLOTS)
    flood(server, client="flood")
    probes = [server.submit([9, 8, k], max_tokens=30, client=f"guest-{k}") for k in range(20)]
    for _ in range(SOON):
        turn(server)
    held = [choice.request.message.client.name for choice in server.scheduler._state.slots.sequences if choice]
    assert held.count("flood") == 1
    assert len(set(held)) == 8
    assert server.scheduler.statistics().yielded == 7
    finish(server)
    assert all(server.seen(number).finish == Finish.LENGTH for number in probes)


def test_a_slot_that_comes_free_in_time_costs_nobody_his() -> None:
    """Sequences end one by one, as they mostly do: the newcomer's turn comes with the next end."""
    server = Server(SLOTS)
    for k in range(40):
        server.submit([3, k % 30], max_tokens=4 + 4 * (k % 8), client="flood")
    for _ in range(20):
        turn(server)
    assert server.scheduler.statistics().waiting > 0
    probe = server.submit([9, 8, 7], max_tokens=3, client="b")
    assert steps_until_first(server, probe) <= SOON
    assert server.scheduler.statistics().yielded == 0
    finish(server)


def test_a_promise_ends_with_its_request() -> None:
    server = Server(SLOTS)
    flood(server)
    probe = server.submit([9, 8, 7], max_tokens=3, client="b")
    while not server.scheduler._state.queue.promised():
        turn(server)
    server.scheduler.abort(probe)
    assert server.scheduler._state.queue.promised() == []
    server.run(depth=2)
    assert server.seen(probe).finish == Finish.ABORT


def test_a_new_scheduler_knows_the_clients_of_what_goes_on() -> None:
    """Requests that are submitted again say whose they are, and so do those of other replicas."""
    server = Server(SLOTS)
    flood(server, client="a")
    server.executor = server.new_executor(1)
    server.results.clear()
    server.desk.clear()
    server.scheduler.restart(1, server.now)
    probe = server.submit([9, 8, 7], max_tokens=3, client="b")
    assert steps_until_first(server, probe) <= SOON
    finish(server)


def plans_of(world: World, seed: int, *, apart: bool) -> list[StepPlan]:
    """Every plan of a run in which nothing but the world decides."""
    server, plans = Server(world), []
    for life in random_lives(random.Random(seed), world, 60):
        client = Client("", str(life.message.id) if apart else "the one")
        message = msgspec.structs.replace(life.message, client=client, automaton=None)
        server.lives[message.id] = life
        server.natures[message.sampling.seed] = life.nature
        server.scheduler.submit(message, life.source, server.now)
        turn(server)
    while server.scheduler.unfinished or server.results:
        server.now += STEP
        while server.scheduler.in_flight < world.depth and (plan := server.plan()) is not None:
            plans.append(plan)
        if server.results:
            server.apply()
    assert is_idle(server.scheduler)
    return plans


@pytest.mark.parametrize("seed", range(25))
def test_one_client_is_served_exactly_as_without_fairness(seed: int) -> None:
    world = replace(random_world(random.Random(seed)), guided=0.0, resumed=0.0)
    fair = plans_of(replace(world, fairness=True), seed, apart=False)
    assert fair == plans_of(replace(world, fairness=False), seed, apart=True)


@pytest.mark.parametrize("seed", range(10))
def test_clients_of_one_request_each_are_served_as_they_come(seed: int) -> None:
    """As those of most servers are; nobody holds two slots, so nobody gives one up."""
    server = Server(replace(SLOTS, budget=16))
    rng = random.Random(seed)
    for k in range(60):
        server.submit([rng.randrange(30) for _ in range(rng.randrange(1, 20))], max_tokens=rng.randrange(1, 30),
                      client=str(k))  # fmt: skip
        if rng.random() < 0.3:
            turn(server)
    entered: list[int] = []
    while server.scheduler.unfinished:
        turn(server)
        choices = [choice for choice in server.scheduler._state.slots.sequences if choice is not None]
        entered += sorted({choice.request.order for choice in choices} - set(entered))
    assert entered == sorted(entered)
    assert server.scheduler.statistics().yielded == 0


def test_the_share_of_each_client_under_load_is_the_same() -> None:
    """Three clients with work without end, whose requests differ tenfold: tokens are shared evenly."""
    server = Server(replace(SLOTS, slots=6, blocks=2000))
    lengths, tokens = {"a": 4, "b": 16, "c": 40}, dict.fromkeys("abc", 0)
    owner = {}
    for _ in range(1500):
        for client, length in lengths.items():
            waiting = sum(choice.request.message.client.name == client for choice in server.scheduler._state.queue)
            for _ in range(waiting, 8):
                owner[server.submit([3, 4], max_tokens=length, client=client)] = client
        turn(server)
    for number, client in owner.items():
        written = len(server.seen(number).tokens)
        tokens[client] += written + 2 * (written > 0)
    mean = sum(tokens.values()) / 3
    assert all(abs(got - mean) <= 0.1 * mean for got in tokens.values()), tokens


def test_pooled_and_resumed_requests_are_whose_they_say() -> None:
    message = SubmitTokens(
        id=1, token_ids=np.array([3], np.int32).tobytes(), sampling=Sampling(max_tokens=1), client=Client("t", "c")
    )
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=SubmitTokens)
    assert decoded.client == Client("t", "c")
