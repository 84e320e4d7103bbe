"""Which models are asked to load and to leave, from heartbeats and answers; what is not known counts as taken."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from penstock.engine_core.placement.residency import LINGER, State
from penstock.protocol.control import Controlled, EngineStatus, SleepEngine, WakeEngine
from penstock.protocol.errors import Unavailable
from penstock.protocol.message import Message
from penstock.services.client.engine_client import EngineClient
from penstock.services.client.model_switcher import GRACE, ModelSwitcher, state_of
from tests.services.client.fake_engine import LIMIT, FakeLink, status

ASLEEP: dict[str, Any] = {"sleeping": True, "asleep": True, "loaded": False, "running": 0}
LOADED: dict[str, Any] = {"loaded": True, "running": 0}


class Engine:
    """A model's scheduler: it answers what it is asked once a test says so."""

    def __init__(self, replicas: int = 1) -> None:
        self.link = FakeLink(self._take)
        self.asked: list[Message] = []
        self.client = EngineClient([self.link], 0, 1, 8, LIMIT, processes=1, replicas=replicas)
        self.link.deliver = lambda arrivals: self.client.receive(arrivals, time.monotonic())

    def _take(self, link: FakeLink, message: Message) -> None:
        self.asked.append(message)

    def tells(self, **changes: Any) -> None:
        self.link.arrive(status(**changes))

    def answers(self, error: str = "") -> None:
        message = self.asked.pop(0)
        assert isinstance(message, SleepEngine | WakeEngine)
        self.link.arrive(Controlled(message.id, error))


class Pair:
    """Two models that do not fit together, and a clock that tests turn."""

    def __init__(self, replicas: int = 1) -> None:
        self.engines = Engine(replicas), Engine()
        self.broken: set[str] = set()
        clients = {name: each.client for name, each in zip("ab", self.engines, strict=True)}
        self.switcher = ModelSwitcher(clients, [{0: 0.9}, {0: 0.9}], 30.0, self.broken.__contains__)
        self.now = 1000.0

    async def look(self, seconds: float = 0.05) -> tuple[list[Message], list[Message]]:
        """What the models have been asked and have not answered."""
        self.now += seconds
        self.switcher.look(self.now)
        for _ in range(5):
            await asyncio.sleep(0)
        return self.engines[0].asked, self.engines[1].asked

    async def started(self) -> None:
        for engine in self.engines:
            engine.tells(**ASLEEP)
        await self.look()
        self.engines[0].answers()
        await self.look()
        self.engines[0].tells(**LOADED)
        await self.look()


def kinds(asked: tuple[list[Message], list[Message]]) -> list[list[type]]:
    return [[type(message) for message in each] for each in asked]


async def test_the_first_that_fit_are_loaded_before_the_server_is_ready() -> None:
    pair = Pair()
    assert kinds(await pair.look()) == [[], []], "nobody was heard of: all memory may be taken"
    pair.engines[0].tells(**ASLEEP)
    assert kinds(await pair.look()) == [[], []], "the other one may have it"
    pair.engines[1].tells(**ASLEEP)
    assert kinds(await pair.look()) == [[WakeEngine], []]
    assert not pair.switcher.settled
    pair.engines[0].answers()
    await pair.look()
    await pair.look()
    assert pair.switcher.settled


@pytest.mark.parametrize("slept", [0, 1])
async def test_a_new_process_has_nothing_loaded_that_nobody_asks_for(slept: int) -> None:
    """Whatever has been loaded once sleeps because of an idle time, the operator or another model."""
    pair = Pair()
    pair.engines[slept].tells(**ASLEEP, load_seconds=5.0)
    pair.engines[1 - slept].tells(**ASLEEP)
    assert kinds(await pair.look()) == [[], []]
    assert pair.switcher.settled
    pair.engines[0].tells(**ASLEEP, demand=1)
    assert kinds(await pair.look()) == [[WakeEngine], []]


async def test_a_replica_that_sleeps_is_woken_by_its_requests_while_another_is_busy() -> None:
    """The model is loaded, so nobody else has the memory."""
    pair = Pair(replicas=2)
    pair.engines[0].tells(**LOADED, load_seconds=5.0)
    pair.engines[0].tells(**ASLEEP, replica=1)
    pair.engines[1].tells(**ASLEEP)
    assert kinds(await pair.look()) == [[], []]
    pair.engines[0].tells(**ASLEEP, replica=1, demand=1)
    assert kinds(await pair.look()) == [[WakeEngine], []]
    assert kinds(await pair.look()) == [[WakeEngine], []], "asked once"
    pair.engines[0].tells(**LOADED, replica=1)
    pair.engines[0].answers()
    await pair.look()
    assert kinds(await pair.look()) == [[], []]


async def test_a_switch_goes_on_only_when_the_memory_is_back() -> None:
    pair = Pair()
    await pair.started()
    pair.engines[1].tells(**ASLEEP, demand=1)
    await pair.look()
    assert kinds(await pair.look(LINGER)) == [[SleepEngine], []]
    assert kinds(await pair.look(5.0)) == [[SleepEngine], []], "asked once"
    pair.engines[0].tells(sleeping=True, asleep=False)
    assert kinds(await pair.look()) == [[SleepEngine], []]
    pair.engines[0].answers()
    await pair.look()
    assert kinds(await pair.look()) == [[], [WakeEngine]]


async def test_a_heartbeat_from_before_an_answer_says_nothing() -> None:
    pair = Pair()
    await pair.started()
    pair.engines[1].tells(**ASLEEP, demand=1)
    await pair.look()
    await pair.look(LINGER)
    pair.engines[0].answers()
    await pair.look()
    assert kinds(await pair.look()) == [[], [WakeEngine]]
    pair.engines[1].answers()
    await pair.look()
    pair.engines[1].tells(**ASLEEP, demand=1, time=time.time() - 5.0)
    pair.engines[0].tells(**ASLEEP, demand=1)
    assert kinds(await pair.look()) == [[], []], "its memory is taken"


async def test_requests_that_run_have_time_to_end() -> None:
    pair = Pair()
    await pair.started()
    pair.engines[0].tells(loaded=True, demand=3)
    pair.engines[1].tells(**ASLEEP, demand=1)
    await pair.look()
    await pair.look(31.0)
    (message,) = pair.engines[0].asked
    assert isinstance(message, SleepEngine)
    assert message.grace == GRACE


async def test_what_was_not_done_is_asked_again() -> None:
    pair = Pair()
    await pair.started()
    pair.engines[1].tells(**ASLEEP, demand=1)
    await pair.look()
    await pair.look(LINGER)
    pair.engines[0].answers("replica 0 has no scheduler now")
    await pair.look()
    pair.engines[0].tells(**LOADED, time=time.time() + 1.0)
    await pair.look()
    assert kinds(await pair.look(LINGER)) == [[SleepEngine], []]


async def test_the_operator_waits_until_a_model_is_loaded() -> None:
    pair = Pair()
    await pair.started()
    waits = asyncio.create_task(pair.switcher.wake("b"))
    await pair.look()
    await pair.look()
    await pair.look(LINGER)
    pair.engines[0].answers()
    await pair.look()
    await pair.look()
    assert not waits.done()
    pair.engines[1].answers()
    await pair.look()
    await pair.look()
    await waits
    waits = asyncio.create_task(pair.switcher.wake("a"))
    pair.engines[0].tells(sleeping=True, asleep=False, time=time.time() + 1.0)
    pair.broken.add("a")
    await pair.look()
    await pair.look()
    with pytest.raises(Unavailable, match="do not start"):
        await waits


@pytest.mark.parametrize(
    ("told", "broken", "state"),
    [
        (None, False, State.LOADING),
        (status(**ASLEEP), False, State.ASLEEP),
        (status(**ASLEEP), True, State.ASLEEP),
        (status(sleeping=True), False, State.LEAVING),
        (status(sleeping=True), True, State.FAILED),
        (status(loaded=True), True, State.LOADED),
        (status(), False, State.LOADING),
    ],
)
def test_states(told: EngineStatus | None, broken: bool, state: State) -> None:
    assert state_of(told, broken=broken) is state
