"""Has the models of a server loaded and put to sleep, as engine_core/placement/residency.py decides.

One api process does it. What it knows are the heartbeats of each model's schedulers and the answers to what it asked
them, so a new one goes on where another ended. Until a model's executors have said that they sleep, its memory counts
as taken, and so does that of a model which has not been heard of.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from penstock.engine_core.placement.residency import ModelView, Residency, State
from penstock.protocol.control import Control, EngineStatus, SleepEngine, WakeEngine
from penstock.protocol.errors import RequestError, Unavailable
from penstock.services.client.engine_client import EngineClient
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

TICK = 0.05  # seconds between looks; heartbeats tell of changes within as many
GRACE = 10.0  # seconds that running requests of a model which leaves have to end in


def state_of(status: EngineStatus | None, *, broken: bool) -> State:
    """A model's state as its schedulers tell it, of all replicas together; None: not all have been heard of.
    `broken`: a process of its executors is in a crash loop."""
    if status is None:
        return State.LOADING
    if status.sleeping:
        return State.ASLEEP if status.asleep else State.FAILED if broken else State.LEAVING
    return State.LOADED if status.loaded else State.LOADING


class ModelSwitcher:
    """What each model has been asked to do, and until when that is all that is known of it."""

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        shares: Sequence[Mapping[int, float]],
        turn: float,
        broken: Callable[[str], bool],
    ) -> None:
        """`clients` and `shares` of each model, in the same order. `broken` tells whether one's executors are in a
        crash loop."""
        self._names = tuple(clients)
        self._clients = tuple(clients.values())
        self._residency = Residency(shares, turn)
        self._broken = broken
        self._wanted = {self._names[model] for model in self._residency.first()}  # until they are loaded
        self._begun = False  # all models have been heard of: what is wanted counts
        self._asked: dict[int, State] = {}  # what models are being asked to become
        self._tasks: set[asyncio.Task[None]] = set()
        self._known = [(State.LOADING, 0.0)] * len(self._names)  # after an answer: unix seconds until which it holds
        self._waiters: dict[str, list[asyncio.Future[str]]] = {}
        self.settled = False  # those that fit together at the start have been loaded

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        try:
            while True:
                self.look(time.monotonic())
                await asyncio.sleep(TICK)
        finally:
            for task in self._tasks:
                task.cancel()

    def look(self, now: float) -> None:
        """Ask models for what is to be done now."""
        if not self._begun:
            self._begin()
        views = [self._view(model, now) for model in range(len(self._names))]
        for model, view in enumerate(views):
            if view.state in (State.LOADED, State.FAILED):
                self._reached(self._names[model], "" if view.state is State.LOADED else "its executors do not start")
        self.settled = self.settled or not self._wanted
        decision = self._residency.decide(views, now)
        for model in decision.leave:
            logs.info(log, "model_leaves", model=self._names[model], requests=views[model].requests)
            self._ask(model, State.LEAVING, SleepEngine(0, GRACE if views[model].requests else 0.0))
        for model in decision.load:
            logs.info(log, "model_loads", model=self._names[model], waited=self._residency.waited(model, now))
            self._ask(model, State.LOADING, WakeEngine(0))
        for model, view in enumerate(views):
            if view.state is State.LOADED and model not in self._asked and self._clients[model].replicas.needed:
                self._ask(model, State.LOADED, WakeEngine(0))  # their share of the devices is taken by all replicas

    def _begin(self) -> None:
        """Once all models have been heard of, those that fit are to be loaded; not where any has been loaded before: a
        process before this one has seen to it, and what sleeps now does so by an idle time or the operator."""
        wholes = [client.replicas.whole for client in self._clients]
        self._begun = None not in wholes
        if self._begun and any(whole is not None and whole.load_seconds for whole in wholes):
            self._wanted.intersection_update(self._waiters)

    async def wake(self, name: str) -> None:
        """Have a model loaded as if a request came for it, and wait until it is. Raises Unavailable."""
        reached: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(name, []).append(reached)
        self._wanted.add(name)
        if error := await reached:
            raise Unavailable(error, code="not_done")

    def _view(self, model: int, now: float) -> ModelView:
        client, name = self._clients[model], self._names[model]
        whole = client.replicas.whole
        demand = 0 if whole is None else whole.demand
        if model in self._asked:
            state = self._asked[model]
        elif whole is None or whole.time < self._known[model][1]:
            state = self._known[model][0]
        else:
            state = state_of(whole, broken=whole.sleeping and not whole.asleep and self._broken(name))
            self._known[model] = state, 0.0
        return ModelView(state, demand + (name in self._wanted and (self._begun or name in self._waiters)))

    def _reached(self, name: str, error: str) -> None:
        self._wanted.discard(name)
        for waiter in self._waiters.pop(name, ()):
            if not waiter.done():
                waiter.set_result(error)

    def _ask(self, model: int, meanwhile: State, message: Control) -> None:
        self._asked[model] = meanwhile
        task = asyncio.create_task(self._call(model, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, model: int, message: Control) -> None:
        """Ask all schedulers of a model, and note what it is then, until they say something newer."""
        name, began, loads = self._names[model], time.monotonic(), isinstance(message, WakeEngine)
        try:
            error = (await self._clients[model].control(message)).error
        except RequestError as refused:
            error = str(refused)
        finally:
            del self._asked[model]
        state = State.LOADED if loads else State.ASLEEP
        if error:
            logs.warning(log, "model_not_switched", model=name, reason=error)
            state = State.LOADING if loads else State.LEAVING
        else:
            event = "model_loaded" if loads else "model_left"
            logs.info(log, event, model=name, seconds=time.monotonic() - began)
        self._known[model] = state, time.time()
        if error and loads:
            self._reached(name, error)
