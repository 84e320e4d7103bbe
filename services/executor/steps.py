"""The executor's side of the steps link: plans in, launched at once; results out as the device finishes them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from engine_core.execution.results import Launched
from engine_core.execution.runner import Runner
from protocol.steps import ExecutorReady, StepPlan, StepResult
from services import journal
from services.wire import GOODBYE, Arrival, Joined, Left, Peer, Port

log = logging.getLogger(__name__)


class StepsStatistics(msgspec.Struct, frozen=True):
    """Counters since the start."""

    plans: int
    results: int
    dropped: int  # results whose scheduler was gone
    schedulers: int  # that joined


class Steps:
    """One executor's plans and results. A new scheduler, or a new epoch of the same, begins with empty slots."""

    def __init__(self, port: Port, runner: Runner, ready: ExecutorReady) -> None:
        self._port = port
        self._runner = runner
        self._ready = ready
        self._scheduler: Peer | None = None
        self._epoch = 0
        self._plans: deque[StepPlan] = deque()
        self._launched: deque[tuple[Launched, float, float]] = deque()  # with the seconds of launching and of waiting
        self._results: deque[StepResult] = deque()
        self._ended = time.perf_counter()  # when the last launch returned
        self._taken = self._sent = self._dropped = self._schedulers = 0

    @property
    def planned(self) -> bool:
        """Whether a plan waits to be launched."""
        return bool(self._plans)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do, or to wait for but arrivals."""
        return bool(self._plans or self._launched or self._results)

    def take(self, arrivals: Iterable[Arrival]) -> None:
        """Note what arrived."""
        for arrival in arrivals:
            match arrival.message:
                case StepPlan() as plan:
                    self._plans.append(plan)
                case Joined():
                    self._join(arrival.peer)
                case Left(reason):
                    if arrival.peer is self._scheduler:
                        write = journal.info if reason == GOODBYE else journal.warning
                        write(log, "scheduler_left", pid=arrival.peer.pid, reason=reason)
                        self._scheduler = None
                        self._forget()

    def turn(self) -> None:
        """Launch the next plan if there is one; then send the results that are there.

        With two steps on the device the older one is waited for: the newer one keeps the device busy meanwhile.
        """
        if self._plans:
            self._launch(self._plans.popleft())
        while self._launched and (len(self._launched) > 1 or self._launched[0][0].finished):
            self._collect()
        while self._results and self._scheduler is not None and self._port.send(self._scheduler, self._results[0]):
            self._results.popleft()
            self._sent += 1

    def statistics(self) -> StepsStatistics:
        return StepsStatistics(self._taken, self._sent, self._dropped, self._schedulers)

    def _join(self, peer: Peer) -> None:
        self._schedulers += 1
        self._scheduler = peer
        self._forget()
        journal.info(log, "scheduler_joined", pid=peer.pid, epoch=peer.epoch)
        sent = self._port.send(peer, msgspec.structs.replace(self._ready, epoch=peer.epoch))
        assert sent, "a peer that has just joined has credit"

    def _forget(self) -> None:
        """Nothing of the scheduler's requests is left here; steps on the device end unheard."""
        self._dropped += len(self._launched) + len(self._results)
        while self._launched:
            self._runner.collect(self._launched.popleft()[0])
        self._results.clear()
        self._plans.clear()
        self._runner.reset()

    def _launch(self, plan: StepPlan) -> None:
        if plan.epoch != self._epoch:
            self._runner.reset()
            self._epoch = plan.epoch
        began = time.perf_counter()
        launched = self._runner.launch(plan)
        waited, self._ended = began - self._ended, time.perf_counter()
        self._launched.append((launched, self._ended - began, waited))
        self._taken += 1

    def _collect(self) -> None:
        launched, busy, waited = self._launched.popleft()
        result = self._runner.collect(launched)
        if launched.done is None:  # a CPU: its work is the launch itself
            result = msgspec.structs.replace(result, busy=busy, waited=waited)
        self._results.append(result)
