"""A day of several models on one GPU, on a virtual clock: nothing is lost, nobody starves, switches are bounded."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from penstock.engine_core.placement.residency import TOGETHER, ModelView, Residency, State

DAY = 24 * 3600.0
TURN, GRACE = 30.0, 10.0
LOAD, LEAVE = 8.0, 1.5  # seconds
LOOK = 0.5  # seconds between decisions while nothing happens and a model waits
SEATS = 16  # requests of one model that run at once


@dataclass
class Request:
    came: float
    left: float  # seconds of service to come
    began: float = -1.0


@dataclass
class Model:
    """A model's engine, as the decision knows it."""

    share: float
    state: State = State.ASLEEP
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    until: float = float("inf")  # when a load, a departure or a grace ends
    asked: float = float("inf")  # since when it has waited to be loaded
    longest: float = 0.0
    loads: int = 0

    @property
    def requests(self) -> int:
        return len(self.waiting) + len(self.running)


class Day:
    """Requests come, models load, serve and leave. Time goes from event to event."""

    def __init__(self, shares: list[float], seed: int, rates: list[float], service: float) -> None:
        self.random = random.Random(seed)
        self.models = [Model(share) for share in shares]
        self.residency = Residency([{0: share} for share in shares], TURN)
        self.rates, self.service = rates, service
        self.now, self.came, self.ended = 0.0, 0, 0
        self.arrivals = [(self.random.expovariate(rate), number) for number, rate in enumerate(rates) if rate]
        heapq.heapify(self.arrivals)

    def run(self, end: float) -> None:
        while True:
            times = [each.until for each in self.models]
            if any(each.waiting and each.state is State.ASLEEP for each in self.models):
                times.append(self.now + LOOK)
            times += [self.finish(each) for each in self.models]
            if self.arrivals:
                times.append(self.arrivals[0][0])
            then = min(times)
            if then == float("inf") or (not self.arrivals and not any(each.requests for each in self.models)):
                return
            self.advance(max(then, self.now), end)
            self.decide()

    def finish(self, model: Model) -> float:
        active = model.state in (State.LOADED, State.LEAVING) and model.running
        return self.now + min(each.left for each in model.running) if active else float("inf")

    def advance(self, then: float, end: float) -> None:
        for model in self.models:
            if model.state is State.LOADED or (model.state is State.LEAVING and model.running):
                for each in model.running:
                    each.left -= then - self.now
                done = [each for each in model.running if each.left <= 1e-9]
                self.ended += len(done)
                model.running = [each for each in model.running if each.left > 1e-9]
        self.now = then
        while self.arrivals and self.arrivals[0][0] <= then:
            _, number = heapq.heappop(self.arrivals)
            self.came += 1
            self.models[number].waiting.append(Request(then, self.random.expovariate(1 / self.service) + 0.01))
            if (following := then + self.random.expovariate(self.rates[number])) < end:
                heapq.heappush(self.arrivals, (following, number))
        for model in self.models:
            self.follow(model)

    def follow(self, model: Model) -> None:
        if model.until <= self.now:
            model.until = float("inf")
            if model.state is State.LOADING:
                model.state, model.loads = State.LOADED, model.loads + 1
                model.longest = max(model.longest, self.now - min(model.asked, self.now))
                model.asked = float("inf")
            elif model.running or model.state is State.LEAVING:
                model.waiting[:0], model.running = model.running, []  # kept: they go on when it is back
                model.state = State.ASLEEP
        if model.state is State.LOADED:
            while model.waiting and len(model.running) < SEATS:
                model.running.append(model.waiting.pop(0))
        if not model.requests:
            model.asked = float("inf")
        elif model.state in (State.ASLEEP, State.LEAVING):
            model.asked = min(model.asked, self.now)

    def decide(self) -> None:
        decision = self.residency.decide([ModelView(each.state, each.requests) for each in self.models], self.now)
        for number in decision.leave:
            model = self.models[number]
            assert model.state is State.LOADED
            model.state = State.LEAVING
            drain = min(GRACE, max((each.left for each in model.running), default=0.0))
            model.until = self.now + drain + LEAVE
        for number in decision.load:
            model = self.models[number]
            assert model.state is State.ASLEEP
            model.state, model.until = State.LOADING, self.now + LOAD
        held = [each.share for each in self.models if each.state is not State.ASLEEP]
        assert len(held) == 1 or sum(held) <= TOGETHER + 1e-9, "they fit together"


def lived(shares: list[float], seed: int, rates: list[float], service: float, end: float = DAY) -> Day:
    """A day whose requests have all ended, with its bounds checked."""
    day = Day(shares, seed, rates, service)
    day.run(end)
    assert day.came == day.ended, "no request is lost"
    worst = len(shares) * (TURN + GRACE + LEAVE + LOAD) + 1.0
    assert max(each.longest for each in day.models) <= worst, "nobody starves"
    loads = sum(each.loads for each in day.models)
    assert loads <= day.came + len(shares), "no load but for a request"
    return day


@pytest.mark.parametrize("seed", range(2))
def test_a_day_of_two_models_that_do_not_fit_together(seed: int) -> None:
    day = lived([0.9, 0.9], seed, [0.02, 0.03], 2.0)
    assert day.came > 3000


def test_two_models_that_are_always_busy_take_turns() -> None:
    day = lived([0.9, 0.9], 3, [2.0, 2.0], 3.0, end=3600.0)
    loads = sum(each.loads for each in day.models)
    assert loads <= 2 * 3600.0 / (TURN + LEAVE + LOAD) + 20, "no more often than every turn"
    assert all(each.loads > 20 for each in day.models)


@pytest.mark.parametrize("seed", range(2))
def test_a_chat_model_embeddings_and_two_that_come_and_go(seed: int) -> None:
    lived([0.6, 0.1, 0.5, 0.25], seed, [0.02, 0.05, 0.005, 0.01], 1.0, end=DAY / 3)


def test_models_that_fit_together_are_loaded_once() -> None:
    day = lived([0.5, 0.2, 0.2], 5, [0.01, 0.02, 0.01], 2.0)
    assert [each.loads for each in day.models] == [1, 1, 1]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_days_of_random_loads(seed: int) -> None:
    chance = random.Random(seed)
    shares = [chance.choice((0.05, 0.2, 0.45, 0.6, 0.9)) for _ in range(chance.randint(2, 6))]
    rates = [chance.choice((0.0, 0.001, 0.01, 0.1)) for _ in shares]
    rates[0] = 0.01
    lived(shares, seed, rates, chance.choice((0.2, 2.0, 20.0)))
