"""The executor's side of the steps link: plans in, launched at once; results out as the device finishes them.

A plan with masked rows begins at once too, and is sampled when its masks have come; later plans wait behind it, because
where they stand follows from what it samples.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.model_runner import Begun, Runner
from penstock.engine_core.execution.step_output import Launched
from penstock.engine_core.histogram import Histogram, HistogramStatistics
from penstock.protocol.steps import ExecutorReady, StepMasks, StepPlan, StepResult
from penstock.services.executor.crash_report import Reports
from penstock.services.executor.peer_liveness import leave
from penstock.services.executor.watchdog import Watchdog
from penstock.services.links.link import GOODBYE, Arrival, Joined, Left, Link, Peer, end_of
from penstock.services.metrics.definitions import PART
from penstock.services.supervisor import logs
from penstock.services.tracing.executor import ExecutorTraces
from penstock.services.tracing.tracer import Tracer

log = logging.getLogger(__name__)

UNWATCHED = -1  # positions of a step whose time says nothing


class StepsStatistics(msgspec.Struct, frozen=True):
    """Counters since the start."""

    plans: int
    results: int
    dropped: int  # results whose scheduler was gone
    stray_masks: int  # masks of no plan that waited for any
    schedulers: int  # that joined
    waiting: int  # now: results that wait to be sent
    launch: HistogramStatistics  # seconds of launching each plan


class Steps:
    """One executor's plans and results. A new scheduler, or a new epoch of the same, begins with empty slots.

    In a group every plan that has come is run to its end, whoever asked for it: the others may be in the midst of it. A
    scheduler that lost us and lives has planned for the others meanwhile, who may be in the midst of a step that never
    came here; the next collective would put two different steps together, so this life of the group is over. One member
    has the masks and answers; steps that wait for masks are its to watch.
    """

    def __init__(
        self,
        port: Link,
        runner: Runner,
        ready: ExecutorReady,
        watchdog: Watchdog,
        reports: Reports,
        group: Group = ALONE,
        traces: ExecutorTraces | None = None,
    ) -> None:
        self._port = port
        self._runner = runner
        self._ready = ready
        self._watchdog = watchdog
        self._reports = reports
        self._group = group
        self._traces = traces if traces is not None else ExecutorTraces(Tracer())
        self.decoding: set[int] = set()  # slots
        self._scheduler: Peer | None = None
        self._known: int | None = None  # incarnation of the last scheduler that joined
        self._epoch = 0
        self._plans: deque[StepPlan] = deque()
        self._masks: deque[StepMasks] = deque()  # of plans that have not been sampled, in their order
        self._begun: tuple[Begun, float] | None = None  # waits for its masks; with the seconds of waiting before it
        # With the seconds of launching, of waiting, and of drafting behind the step before; and its positions.
        self._launched: deque[tuple[Launched, float, float, float, int]] = deque()
        self._positions = 0  # of the plan begun last
        self._unsure = 0  # plans from now on that may wait for masks that another member has
        self._results: deque[StepResult] = deque()
        self._worked = 0.0  # seconds of launching the plan at hand
        self._launch = Histogram(PART)
        self._drafted = 0.0  # seconds of launching the last drafting
        self._ended = time.perf_counter()  # when the last launch returned
        self._taken = self._sent = self._dropped = self._stray = self._schedulers = 0

    @property
    def planned(self) -> bool:
        """Whether a turn has something to launch."""
        return bool(self._masks if self._begun is not None else self._plans)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do, or to wait for but arrivals."""
        return self.planned or bool(self._launched or self._results)

    @property
    def halved(self) -> bool:
        """Whether a plan has run its forward pass and waits for its masks."""
        return self._begun is not None

    @property
    def idle(self) -> bool:
        """Whether nobody's step is anywhere between its plan and its result."""
        return not (self.busy or self.halved or self._plans)

    def take(self, arrivals: Iterable[Arrival]) -> None:
        """Note what arrived."""
        for arrival in arrivals:
            match arrival.message:
                case StepPlan() as plan:
                    if self._begun is not None and self._begun[0].plan.epoch != plan.epoch:
                        self._give_up()
                    self._plans.append(plan)
                case StepMasks() as masks:
                    self._masks.append(masks)
                case Joined():
                    self._join(arrival.peer)
                case Left(reason):
                    if arrival.peer is self._scheduler:
                        # Who started a process here tells of its end, if that is worth a warning.
                        expected = reason in (GOODBYE, end_of(arrival.peer.pid))
                        write = logs.info if expected else logs.warning
                        write(log, "scheduler_left", pid=arrival.peer.pid, reason=reason)
                        self._scheduler = None
                        self._forget()

    def turn(self) -> None:
        """Launch what can be launched; then send the results that are there.

        With two steps on the device the older one is waited for: the newer one keeps the device busy meanwhile.
        """
        if self._begun is None and self._plans:
            self._begin(self._plans.popleft())
        elif self._begun is not None and self._masks:
            self._sample(self._masks.popleft())
        while self._launched and (len(self._launched) > 1 or self._launched[0][0].finished):
            self._collect()
        while self._results and self._scheduler is not None and self._port.send(self._scheduler, self._results[0]):
            self._results.popleft()
            self._sent += 1

    def tick(self, now: float) -> None:
        """Called a few times a second, at `now` in monotonic seconds."""
        self._traces.tick(now)

    def statistics(self) -> StepsStatistics:
        counts = self._taken, self._sent, self._dropped, self._stray, self._schedulers
        return StepsStatistics(*counts, len(self._results), self._launch.statistics())

    def _join(self, peer: Peer) -> None:
        if self._group.several and peer.incarnation == self._known:
            leave(reason="the scheduler lost us while it lived: the group is out of step")
        self._schedulers += 1
        self._scheduler, self._known = peer, peer.incarnation
        self._forget()
        logs.info(log, "scheduler_joined", pid=peer.pid, epoch=peer.epoch)
        ready = msgspec.structs.replace(self._ready, epoch=peer.epoch, plans=self._taken)
        sent = self._port.send(peer, ready)
        assert sent, "a peer that has just joined has credit"

    def _forget(self) -> None:
        """Nothing of the scheduler's requests is left here; steps on the device end unheard, in the time that the
        largest may take: other members may never have heard of them."""
        if self._group.several and not self.idle:
            self._watchdog.begin(self._ready.step_tokens)
        self._give_up()
        while self._plans and self._group.several:
            self._begin(self._plans.popleft())
            self._give_up()
        self._dropped += len(self._launched) + len(self._results)
        while self._launched:
            self._runner.collect(self._launched.popleft()[0])
        self._results.clear()
        self._plans.clear()
        self._masks.clear()
        self._watchdog.rest()
        self._reset()

    def _give_up(self) -> None:
        """The masks of the plan that waits will not come; others of a group may wait for what is sampled."""
        begun, self._begun = self._begun, None
        if begun is not None and self._group.several:
            self._finish(begun[0], None, time.perf_counter(), begun[1])

    def _reset(self) -> None:
        self._runner.reset()
        self.decoding.clear()
        self._traces.forget()

    def _begin(self, plan: StepPlan) -> None:
        if plan.epoch != self._epoch:
            self._reset()
            self._epoch = plan.epoch
        self._reports.plans.append(plan)
        self._positions = self._count(plan)
        if plan.masked and not self._group.answers:  # stages wait for what was sampled as many steps before
            self._unsure = 1 if self._group.stages == 1 else self._group.stages + 1
        if self._unsure:
            self._unsure -= 1
            self._positions = UNWATCHED  # it takes as long as the masks
        if not self._launched:
            self._watch(self._positions)
        self._traces.begin(plan, time.monotonic())
        began = time.perf_counter()
        waited, self._worked = began - self._ended, 0.0
        begun = self._runner.begin(plan)
        self._taken += 1
        if plan.masked and self._group.answers:
            self._begun = begun, waited
            self._pause(began)
            if not self._launched:
                self._watchdog.rest()
        else:
            self._finish(begun, None, began, waited)

    def _sample(self, masks: StepMasks) -> None:
        """Finish the plan that waits. Masks of any other are of a step that nobody asks about any more."""
        assert self._begun is not None
        begun, waited = self._begun
        if (masks.step, masks.epoch) != (begun.plan.step, begun.plan.epoch):
            self._stray += 1
            return
        self._begun = None
        if not self._launched:
            self._watch(self._positions)
        went_on = time.perf_counter()
        self._traces.masked(masks.step, went_on - self._ended)
        self._finish(begun, masks, went_on, waited + went_on - self._ended)

    def _finish(self, begun: Begun, masks: StepMasks | None, began: float, waited: float) -> None:
        launched = self._runner.finish(begun, masks)
        self._pause(began)
        ended, drafted = self._ended, self._drafted
        launched = self._runner.draft(launched)
        self._ended = time.perf_counter()
        self._drafted = self._ended - ended
        self._launch.observe(self._worked)
        self._launched.append((launched, self._worked, waited, drafted, self._positions))

    def _pause(self, began: float) -> None:
        self._ended = time.perf_counter()
        self._worked += self._ended - began

    def _collect(self) -> None:
        launched, busy, waited, drafting, positions = self._launched.popleft()
        result = self._runner.collect(launched)
        if launched.done is None:  # a CPU: its work is the launch itself
            result = msgspec.structs.replace(result, busy=busy, waited=waited, drafting=drafting)
        if self._group.answers:
            self._results.append(result)
        self._traces.collect(result, time.monotonic())
        if result.busy and positions != UNWATCHED:
            self._watchdog.tell(positions, result.busy)
        if self._launched:
            self._watch(self._launched[0][4])
        else:
            self._watchdog.rest()

    def _watch(self, positions: int) -> None:
        """The oldest step on the device has so many positions."""
        if positions == UNWATCHED:
            self._watchdog.rest()
        else:
            self._watchdog.begin(positions)

    def _count(self, plan: StepPlan) -> int:
        """Positions that the plan runs."""
        if plan.decode_on or plan.decode_off:
            self.decoding.update(np.frombuffer(plan.decode_on, np.int32).tolist())
            self.decoding.difference_update(np.frombuffer(plan.decode_off, np.int32).tolist())
        count = len(self.decoding) + len(plan.draft_ids) // 4
        return count + int(np.frombuffer(plan.chunks, np.int32)[2::4].sum()) if plan.chunks else count
