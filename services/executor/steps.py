"""The executor's side of the steps link: plans come in and are launched at once, results go out as the device finishes.

A plan with masked rows begins at once too, and is sampled when its masks have come. Later plans wait behind it, because
their positions follow from what it samples.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TypeVar

import msgspec

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.block_copies import BlockCopier, CopyStatistics
from penstock.engine_core.execution.model_runner import Begun, Runner
from penstock.engine_core.execution.step_output import Launched
from penstock.engine_core.histogram import Histogram, HistogramStatistics
from penstock.protocol.control import CheckWeights, MeetTrainer, SumWeights, WriteWeights
from penstock.protocol.images import EncodeImage
from penstock.protocol.message import Message
from penstock.protocol.step_columns import chunk_positions, integers
from penstock.protocol.steps import (
    CopyBlocks,
    DropAdapter,
    ExecutorReady,
    LoadAdapter,
    StepMasks,
    StepPlan,
    StepResult,
)
from penstock.protocol.storage_blocks import FindBlocks, ForgetBlocks, ListBlocks, MoveBlocks
from penstock.services.executor.adapter_loading import AdapterLoader
from penstock.services.executor.crash_report import Reports
from penstock.services.executor.image_encoding import ImageEncoding
from penstock.services.executor.peer_liveness import leave
from penstock.services.executor.watchdog import Watchdog
from penstock.services.executor.weight_updates import WeightUpdates
from penstock.services.links.link import Arrival, Joined, Left, Link, Peer, level_of
from penstock.services.metrics.definitions import PART
from penstock.services.supervisor import logs
from penstock.services.tracing.executor import ExecutorTraces
from penstock.services.tracing.tracer import Tracer

log = logging.getLogger(__name__)

MOST_IN_FLIGHT = 2  # steps: the newer one keeps the device busy while the older one's result goes out
LONG = 512  # positions of a step that takes so long that copies and messages must not wait for its end
UNWATCHED = -1  # positions of a step whose duration means nothing
PAUSE = 0.02  # seconds between steps in which requests are still decoded
Answer = TypeVar("Answer", bound=Message)


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    plans: int = 0
    results: int = 0
    dropped: int = 0
    stray_masks: int = 0


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step on the device, with what it took on the host, in seconds."""

    launched: Launched
    launching: float
    waited: float  # before and between its parts
    drafting: float  # behind the step before
    positions: int


@dataclass(slots=True)
class Served:
    """The scheduler whose plans are run."""

    peer: Peer | None = None
    last: int | None = None  # incarnation of the last one that joined
    epoch: int = 0  # of its last plan


@dataclass(slots=True)
class Watched:
    """The watchdog, and what it is told."""

    watchdog: Watchdog
    positions: int = 0  # of the plan begun last
    unwatched: int = 0  # plans from now on that may wait for masks that another member has

    def begin(self, positions: int) -> None:
        """The oldest step on the device has so many positions."""
        if positions == UNWATCHED:
            self.watchdog.rest()
        else:
            self.watchdog.begin(positions)


class LaunchTimes:
    """Times of launching, on this process's clock. Between two launches the device waits, or works ahead."""

    def __init__(self) -> None:
        self.launching = 0.0  # seconds, of the plan at hand
        self.drafting = 0.0  # seconds, of the last step
        self.ended = time.perf_counter()  # of the last launch
        self.histogram = Histogram(PART)

    def begin(self) -> tuple[float, float]:
        """A plan is about to be launched: now, and the seconds since the last launch."""
        now = time.perf_counter()
        self.launching = 0.0
        return now, now - self.ended

    def end(self, began: float) -> None:
        self.ended = time.perf_counter()
        self.launching += self.ended - began

    def end_draft(self) -> None:
        """The step's drafts have been launched; nothing else was since its last part."""
        now = time.perf_counter()
        self.drafting, self.ended = now - self.ended, now
        self.histogram.observe(self.launching)


class StepsStatistics(msgspec.Struct, frozen=True):
    """Counters since the start."""

    plans: int
    results: int
    dropped: int  # results whose scheduler was gone
    stray_masks: int  # masks of no plan that waited for any
    waiting: int  # now: results that wait to be sent
    launch: HistogramStatistics  # seconds of launching each plan
    copies: CopyStatistics | None = None  # None: there is no host memory for KV blocks


class Steps:
    """One executor's plans and results. A new scheduler, or a new epoch of the same, begins with empty slots.

    In a group every plan that has come is run to its end, even when its scheduler is gone: other members may be in the
    midst of it. A scheduler that lost this member and lives has planned for the others meanwhile. They may be in a step
    that never came here, and the next collective would join two different steps, so the generation of the group ends.
    One member has the masks and answers; it alone watches the time of steps that wait for masks.
    """

    def __init__(
        self,
        link: Link,
        runner: Runner,
        ready: ExecutorReady,
        watchdog: Watchdog,
        reports: Reports,
        group: Group = ALONE,
        traces: ExecutorTraces | None = None,
        images: ImageEncoding | None = None,
        weights: WeightUpdates | None = None,
        copies: BlockCopier | None = None,
    ) -> None:
        self._link = link
        self._runner = runner
        self._ready = ready
        self._reports = reports
        self._group = group
        self._traces = traces if traces is not None else ExecutorTraces(Tracer())
        self.decoding: set[int] = set()  # slots
        self._served = Served()
        self._plans: deque[StepPlan] = deque()
        self._masks: deque[StepMasks] = deque()  # of plans that have not been sampled, in their order
        self._begun: tuple[Begun, float] | None = None  # waits for its masks; with the seconds waited before it
        self._in_flight: deque[InFlight] = deque()
        self._watched = Watched(watchdog)
        self._results: deque[StepResult] = deque()
        self.adapters = None if runner.adapters is None else AdapterLoader(runner.adapters)
        self._images = images  # required where ready has rows for them
        self._weights = weights  # required where a scheduler asks for others
        self._copies = copies  # required where ready has blocks in the host's memory
        self._times = LaunchTimes()
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        """Whether there is anything that can be launched."""
        if self._begun is not None:
            return bool(self._masks)
        return bool(self._plans) and len(self._in_flight) < MOST_IN_FLIGHT

    @property
    def busy(self) -> bool:
        """Whether anything is left to launch, collect or send."""
        return self.has_work or bool(
            self._in_flight
            or self._results
            or (self.adapters and self.adapters.answers)
            or (self._images and self._images.busy)
            or (self._copies and self._copies.busy)
            or (self._weights and self._weights.busy)
        )

    @property
    def awaits_masks(self) -> bool:
        """Whether a plan has run its forward pass and waits for its masks."""
        return self._begun is not None

    @property
    def idle(self) -> bool:
        """Whether no step is anywhere between its plan and its result."""
        return not (self.busy or self.awaits_masks or self._plans)

    def take(self, arrivals: Iterable[Arrival]) -> None:
        """Take what arrived on the link."""
        for arrival in arrivals:
            match arrival.message:
                case StepPlan() as plan:
                    if self._begun is not None and self._begun[0].plan.epoch != plan.epoch:
                        self._give_up()
                    self._plans.append(plan)
                case StepMasks() as masks:
                    self._masks.append(masks)
                case LoadAdapter() as asked:
                    assert self.adapters is not None, "ready said that there are places"
                    self.adapters.load(asked)
                case DropAdapter() as dropped:
                    assert self.adapters is not None, "ready said that there are places"
                    self.adapters.drop(dropped, self._counters.plans + len(self._plans))
                case CopyBlocks() | ListBlocks() | FindBlocks() | MoveBlocks() | ForgetBlocks() as copies:
                    assert self._copies is not None, "ready said that there are blocks in the host's memory"
                    self._copies.ask(copies)
                case CheckWeights() | WriteWeights() | MeetTrainer() | SumWeights() as asked:
                    assert self._weights is not None, "there is a model"
                    self._weights.ask(asked)
                case EncodeImage() as image:
                    assert self._images is not None, "ready said that there are rows"
                    self._images.ask(image)
                case Joined():
                    self._join(arrival.peer)
                case Left(reason):
                    if arrival.peer is self._served.peer:
                        level = level_of(arrival.peer, reason)
                        logs.write(log, level, "scheduler_left", {"pid": arrival.peer.pid, "reason": reason})
                        self._served.peer = None
                        self._forget()

    def iterate(self) -> None:
        """Launch the next plan or masks, collect finished steps, and send results.

        With two steps on the device this waits for the older one, unless that is long.
        """
        if self.has_work and self._begun is None:
            self._begin(self._plans.popleft())
        elif self.has_work:
            self._sample(self._masks.popleft())
        while self._in_flight and (self._in_flight[0].launched.finished or self._ends_soon):
            self._collect()
        self._counters.results += self._send(self._results)
        if self.adapters is not None:
            self.adapters.collect(self._counters.plans)
            self._send(self.adapters.answers)
        if self._weights is not None:
            resting = not (self._plans or self._in_flight or self.awaits_masks)
            if self._weights.run(resting=resting):
                self._renew()
            self._send(self._weights.answers)
        if self._copies is not None:
            self._copies.iterate(self._runner.drafting_ended)
            self._send(self._copies.answers)
        if self._images is not None:
            self._images.iterate(shared=self._decodes)
            self._send(self._images.answers)

    @property
    def _ends_soon(self) -> bool:
        """Whether to wait for the oldest step on the device: another one is behind it, and it is short."""
        return len(self._in_flight) == MOST_IN_FLIGHT and 0 <= self._in_flight[0].positions < LONG

    def _renew(self) -> None:
        """Weights were written: what was begun is of those before."""
        if self._images is not None:
            self._images.forget()
        if self._copies is not None and self._copies.storage is not None:
            self._copies.storage.renew()

    @property
    def wakers(self) -> tuple[int, ...]:
        """Descriptors that become readable when threads beside the steps have done something."""
        storage = None if self._copies is None else self._copies.storage
        return tuple([beside.fileno() for beside in (self.adapters, storage) if beside is not None])

    def tick(self, now: float) -> None:
        """Called a few times a second, at `now` in monotonic seconds."""
        self._traces.tick(now)

    def statistics(self) -> StepsStatistics:
        return StepsStatistics(
            **asdict(self._counters), waiting=len(self._results), launch=self._times.histogram.statistics(),
            copies=None if self._copies is None else self._copies.statistics(),
        )  # fmt: skip

    @property
    def _decodes(self) -> bool:
        """Whether requests are decoded. The scheduler need not say that the last one has ended."""
        running = self._in_flight or self._begun is not None or self._plans
        return bool(self.decoding) and (bool(running) or time.perf_counter() - self._times.ended < PAUSE)

    def _send(self, messages: deque[Answer]) -> int:
        """Send messages as far as there is credit. Returns how many."""
        count = 0
        while messages and self._served.peer is not None and self._link.send(self._served.peer, messages[0]):
            messages.popleft()
            count += 1
        return count

    def _join(self, peer: Peer) -> None:
        if self._group.several and peer.incarnation == self._served.last:
            leave(reason="the scheduler lost us while it lived: the group is out of step")
        self._served.peer, self._served.last = peer, peer.incarnation
        self._forget()
        logs.info(log, "scheduler_joined", pid=peer.pid, epoch=peer.epoch)
        ready = msgspec.structs.replace(self._ready, epoch=peer.epoch, plans=self._counters.plans)
        if self._weights is not None:
            path, version = self._weights.path, self._weights.version
            ready = msgspec.structs.replace(ready, weights_path=path, weight_version=version)
        sent = self._link.send(peer, ready)
        assert sent, "a peer that has just joined has credit"

    def _forget(self) -> None:
        """Drop all of the scheduler's requests. Results of steps on the device are dropped, too; they get the time that
        the largest step may take, because other members may never have received them."""
        if self._group.several and not self.idle:
            self._watched.watchdog.begin(self._ready.step_tokens)
        self._give_up()
        while self._plans and self._group.several:
            self._begin(self._plans.popleft())
            self._give_up()
        self._counters.dropped += len(self._in_flight) + len(self._results)
        while self._in_flight:
            self._runner.collect(self._in_flight.popleft().launched)
        self._results.clear()
        self._plans.clear()
        self._masks.clear()
        self._watched.watchdog.rest()
        self._reset()
        for beside in (self.adapters, self._images, self._weights, self._copies):
            if beside is not None:
                beside.forget()

    def _give_up(self) -> None:
        """The masks of the waiting plan will not come; other members of a group may wait for what it samples."""
        begun, self._begun = self._begun, None
        if begun is not None and self._group.several:
            self._finish(begun[0], None, time.perf_counter(), begun[1])

    def _reset(self) -> None:
        self._runner.reset()
        self.decoding.clear()
        self._traces.forget()

    def _begin(self, plan: StepPlan) -> None:
        if plan.epoch != self._served.epoch:
            self._reset()
            self._served.epoch = plan.epoch
        self._reports.plans.append(plan)
        self._watched.positions = self._count(plan)
        if plan.masked and not self._group.answers:  # a stage waits for the tokens sampled as many steps before
            self._watched.unwatched = 1 if self._group.stages == 1 else self._group.stages + 1
        if self._watched.unwatched:
            self._watched.unwatched -= 1
            self._watched.positions = UNWATCHED  # it takes as long as the masks
        if not self._in_flight:
            self._watched.begin(self._watched.positions)
        self._traces.begin(plan, time.monotonic())
        began, waited = self._times.begin()
        begun = self._runner.begin(plan)
        self._counters.plans += 1
        if plan.masked and self._group.answers:
            self._begun = begun, waited
            self._times.end(began)
            if not self._in_flight:
                self._watched.watchdog.rest()
        else:
            self._finish(begun, None, began, waited)

    def _sample(self, masks: StepMasks) -> None:
        """Finish the waiting plan. Masks of any other plan belong to a step that was given up."""
        assert self._begun is not None
        begun, waited = self._begun
        if (masks.step, masks.epoch) != (begun.plan.step, begun.plan.epoch):
            self._counters.stray_masks += 1
            return
        self._begun = None
        if not self._in_flight:
            self._watched.begin(self._watched.positions)
        began = time.perf_counter()
        masks_waited = began - self._times.ended
        self._traces.masked(masks.step, masks_waited)
        self._finish(begun, masks, began, waited + masks_waited)

    def _finish(self, begun: Begun, masks: StepMasks | None, began: float, waited: float) -> None:
        launched = self._runner.finish(begun, masks)
        times = self._times
        times.end(began)
        drafting = times.drafting
        launched = self._runner.draft(launched)
        times.end_draft()
        self._in_flight.append(InFlight(launched, times.launching, waited, drafting, self._watched.positions))

    def _collect(self) -> None:
        step = self._in_flight.popleft()
        result = self._runner.collect(step.launched)
        if step.launched.done is None:  # a CPU: its work is the launch itself
            result = msgspec.structs.replace(result, busy=step.launching, waited=step.waited, drafting=step.drafting)
        if self._group.answers:
            self._results.append(result)
        self._traces.collect(result, time.monotonic())
        if result.busy and step.positions != UNWATCHED:
            self._watched.watchdog.tell(step.positions, result.busy)
        if self._in_flight:
            self._watched.begin(self._in_flight[0].positions)
        else:
            self._watched.watchdog.rest()

    def _count(self, plan: StepPlan) -> int:
        if plan.decode_on or plan.decode_off:
            self.decoding.update(integers(plan.decode_on).tolist())
            self.decoding.difference_update(integers(plan.decode_off).tolist())
        count = len(self.decoding) + len(integers(plan.draft_ids))
        return count + chunk_positions(plan.chunks) if plan.chunks else count
