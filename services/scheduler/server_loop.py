"""One iteration of the scheduler process: take what arrived, plan the next steps, deliver outputs.

Nothing here decides: engine_core's scheduler does, and it owns every request. The links and the time are passed in, so
tests drive the loop without sockets and without a clock.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from penstock.engine_core.histogram import Histogram
from penstock.engine_core.scheduling.executor_group import ExecutorGroup, Rest
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.engine_core.scheduling.statistics import SchedulerStatistics
from penstock.protocol.config import Config
from penstock.protocol.control import AbortAll, Control, EngineStatus, WeightsAnswer
from penstock.protocol.errors import RequestError, rejection
from penstock.protocol.groups import answering, group_size, members
from penstock.protocol.images import ImageEncoded
from penstock.protocol.links import Role
from penstock.protocol.messages import Abort, Rejected, ReleaseTransfer, StopHit, SubmitTokens
from penstock.protocol.served_models import several
from penstock.protocol.snapshots import MetricsSnapshots
from penstock.protocol.steps import (
    AdapterLoaded,
    BlocksCopied,
    ExecutorAsleep,
    ExecutorReady,
    Sleep,
    StepResult,
    Wake,
)
from penstock.protocol.storage_blocks import BlocksFound, BlocksListed, BlocksMoved
from penstock.services.links.link import Arrival, Joined, Left, Link, Peer, level_of
from penstock.services.metrics.definitions import LAG
from penstock.services.metrics.snapshot import RemoteSnapshots
from penstock.services.scheduler.bitmask_filler import BitmaskFiller, BitmaskStatistics
from penstock.services.scheduler.early_requests import EarlyRequests
from penstock.services.scheduler.engine_status import StatusTimer, group_status, with_statistics
from penstock.services.scheduler.grammar_queue import GrammarQueue, GrammarStatistics
from penstock.services.scheduler.housekeeping import Housekeeping
from penstock.services.scheduler.operator_queue import NOT_READY, OperatorQueue
from penstock.services.scheduler.options import ModelFacts, depth, scheduling_options
from penstock.services.scheduler.step_times import StepTimes, StepTimeStatistics
from penstock.services.scheduler.tokenizer_clients import TokenizerClients
from penstock.services.supervisor import logs
from penstock.services.supervisor.restart_policy import crash_loops
from penstock.services.tracing.scheduler import SchedulerTraces
from penstock.services.tracing.tracer import Tracer

log = logging.getLogger(__name__)

TICK = 0.2  # seconds between ticks of the links
RESERVED = 8  # messages on an executor's link that are kept for steps and masks
MASK_WAIT = 0.0003  # seconds that the next plan waits for masks, which go first
SHUTTING_DOWN = "the server is shutting down"
NO_MASKS = "this server runs too many sequences at once (--max-num-seqs) to keep the masks of structured output"
OUT_OF_STEP = "its group is out of step"
STUCK = "others of its group do not become ready"
LOST = "the engine lost its executor and it did not come back"
DEAF = "it could not be told to sleep"


class LoopStatistics(msgspec.Struct, frozen=True):
    """Counters of the process around the scheduler."""

    plans: int
    results: int
    refused: int  # requests that came while nothing could serve them
    faults: int  # checks that found the block accounts wrong
    grammars: GrammarStatistics
    masks: BitmaskStatistics
    times: StepTimeStatistics
    scheduler: SchedulerStatistics | None
    queued: int  # now: refusals, and tokenizers that tokens wait for


class SchedulerLoop:
    """Owner of the scheduler: it takes messages of executors and tokenizers to it, and its plans and outputs back."""

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        tokens: Link,
        steps: Link,
        grammars: GrammarQueue,
        bitmasks: BitmaskFiller,
        now: float,
        replica: int = 0,
        traces: SchedulerTraces | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.executors: ExecutorGroup[Peer] = ExecutorGroup(
            group_size(config.model), steps.epoch, now, answering(0, config.model), config.model.tensor_parallel_size,
            config.scheduler.idle_timeout, on_demand=several(config),
        )  # fmt: skip
        self.draining = False
        self.remote = RemoteSnapshots()  # of executors on other hosts
        self.lag = Histogram(LAG)
        self._config = config
        self._replica = replica
        self._traces = traces if traces is not None else SchedulerTraces(Tracer())
        self._clock = clock  # monotonic seconds; None: an iteration takes no time
        self._facts = facts
        self._clients = TokenizerClients(tokens)
        self._steps = steps
        self._grammars = grammars
        self._bitmasks = bitmasks
        self._operator = OperatorQueue(self._clients, steps, on_demand=several(config))
        self._scheduler: Scheduler | None = None  # from the first complete executor group on
        self._early = EarlyRequests(self._clients, config.scheduler.max_queue_time)  # that wait for it
        self._next_tick = now
        self._status = StatusTimer(config.scheduler.status_interval, now)
        self._housekeeping = Housekeeping(now)
        self._times = StepTimes(now)

    @property
    def ready(self) -> bool:
        return self.executors.serves and not self.draining

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        scheduled = 0 if self._scheduler is None else self._scheduler.unfinished + self._grammars.waiting
        return scheduled + len(self._early)

    @property
    def drained(self) -> bool:
        """Whether nothing that could still come is awaited."""
        if self._scheduler is None:
            return not self._clients.rejections
        running = self.unfinished > 0 and self.executors.serves
        return not (running or self._clients.rejections or self._scheduler.undelivered())

    def iterate(self, now: float, wall: float) -> float:
        """Deal with everything that has arrived; returns the monotonic time by which the next iteration is due.

        `now` is in monotonic seconds, `wall` in unix seconds. Order matters for latency: results and the masks that
        they make possible, then the next plans, then outputs. Behind a long step, with another one on the device, there
        is time: what was sampled, a first token perhaps, leaves before the next plan.
        """
        if now >= self._next_tick:
            self._tick(now)
        self._send_masks()
        results = self._times.results
        for arrival in self._steps.receive():
            self._step_arrival(arrival, now)
        if self._times.results > results:
            if self._scheduler is not None and self._device_has_time(self._scheduler):
                self._deliver(self._scheduler)
            if self._bitmasks.jobs.wait(MASK_WAIT):
                self._send_masks()
        if self._scheduler is not None:
            self._scheduler.tick(now)
        arrivals = self._clients.link.receive()
        if self._clock is not None:  # an iteration may have waited for masks or a processor; nothing came before it did
            now = max(now, self._clock())
        for arrival in arrivals:
            self._token_arrival(arrival, now)
        if self._scheduler is not None:
            self._admit(self._scheduler, now)
            if self.executors.given_up(now) and self._scheduler.unfinished:
                reason = self.executors.crash_loop or LOST
                logs.error(log, "gave_up", unfinished=self._scheduler.unfinished, reason=reason)
                self._scheduler.fail(reason)
            self._operator.advance(self._scheduler, self.executors, now)
        self._rest(self._scheduler, now)
        if self._scheduler is not None:
            self._plan(self._scheduler, now)
            self._deliver(self._scheduler)
            self._traces.record(self._scheduler.stays())
        self._clients.send_rejections()
        if self._scheduler is not None:
            self._housekeeping.run(self._scheduler, self._times.plans, now)
        self._send_status(now, wall)
        return min(self._next_tick, self._status.due)

    def statistics(self) -> LoopStatistics:
        scheduler = self._scheduler
        return LoopStatistics(
            self._times.plans,
            self._times.results,
            self._clients.refused,
            self._housekeeping.faults,
            self._grammars.statistics(),
            self._bitmasks.statistics(),
            self._times.statistics(),
            None if scheduler is None else scheduler.statistics(),
            self._clients.rejections + (0 if scheduler is None else len(scheduler.undelivered())),
        )

    def _tick(self, now: float) -> None:
        self.lag.observe(now - self._next_tick)
        self._next_tick = now + TICK
        self._clients.link.tick(now)
        self._steps.tick(now)
        self._early.expire(now)
        if self._scheduler is not None:
            self._scheduler.expire(now)
        self.executors.crash_loop = self._crash_loop_reason()
        if self.executors.stuck(now):
            self._disband(STUCK)
        if self.executors.given_up(now):
            if self.executors.rest is Rest.WAKING:
                self.executors.end_wake(now)
            if several(self._config) and self.executors.rest is not Rest.ASLEEP:
                self._release(now)

    def _release(self, now: float) -> None:
        """The executors do not come. Their memory is for other models: those that come after all wait to be asked."""
        self._early.refuse(self.executors.crash_loop or LOST)
        if self._scheduler is not None and self._scheduler.unfinished:
            self._scheduler.fail(self.executors.crash_loop or LOST)
        self._operator.not_woken(self._scheduler)
        self._sleep(now)

    def _step_arrival(self, arrival: Arrival, now: float) -> None:
        peer = arrival.peer
        match arrival.message:
            case StepResult() as result:
                if self._scheduler is None:
                    return  # meant for the scheduler before this one
                self._times.arrived(result, self._scheduler.epoch, now)
                began = time.perf_counter()
                self._scheduler.follow(result)
                self._fill_masks(self._scheduler)  # while the rest of the result is dealt with
                self._scheduler.apply(result, now)
                self._times.applied(result, time.perf_counter() - began)
                self._traces.applied(result, now)
            case AdapterLoaded() as loaded:
                if self._scheduler is not None and self.executors.complete:
                    failed = self._scheduler.adapter_loaded(loaded, peer.index, now)
                    if failed is not None:
                        told = {"executor": peer.index, "adapter": failed.name, "reason": loaded.error}
                        logs.write(log, logging.WARNING, "adapter_failed", told)
            case ImageEncoded() as encoded:
                if encoded.error:
                    logs.warning(log, "image_failed", executor=peer.index, number=encoded.number, reason=encoded.error)
                if self._scheduler is not None and self.executors.complete:
                    self._scheduler.image_encoded(encoded, now)
                    self._send_beside(self._scheduler)  # the next one, however long the steps in flight are
            case BlocksCopied() | BlocksMoved() | BlocksListed() | BlocksFound() as copied:
                if self._scheduler is not None and self.executors.complete:
                    self._scheduler.blocks_copied(copied, peer.index, now)
            case WeightsAnswer() as answer:
                self._operator.answered(peer, answer)
            case MetricsSnapshots() as snapshots:
                self.remote.receive(peer, snapshots)
            case ExecutorReady() as ready:
                logs.info(log, "executor_ready", executor=peer.index, blocks=ready.blocks, device=ready.device,
                             dtype=ready.dtype, load_seconds=ready.load_seconds)  # fmt: skip
                broke = peer in self.executors.peers and self.executors.complete
                if broke:
                    self._operator.lost(self._scheduler)
                self._steps.send_each(self.executors.adopt(now), Wake())
                if self.executors.rest is Rest.ASLEEP:  # it has been started again, or has not heard
                    self._send_to_sleep((peer,))
                elif self.executors.add(peer, ready, now) and not self.executors.in_step:
                    self._disband(OUT_OF_STEP)
                elif self.executors.complete:
                    self._begin(now)
                elif broke:
                    self._steps.epoch = self.executors.epoch
            case ExecutorAsleep(kept_bytes):
                if self.executors.fall_asleep(peer, kept_bytes):
                    self._steps.send(peer, Wake())
                elif kept_bytes and self.executors.discards:
                    self._steps.send(peer, Sleep(discard=True))
                elif self.executors.all_asleep:
                    self._status.due, kept = now, self.executors.kept_bytes
                    logs.info(log, "asleep", seconds=now - self.executors.rest_since, kept_weight_bytes=kept)
            case Left(reason):
                self.remote.remove(peer)
                level = logging.INFO if self.executors.rest is Rest.WAKING else level_of(peer, reason)  # it loads
                logs.write(log, level, "executor_left", {"executor": peer.index, "pid": peer.pid, "reason": reason})
                if self.executors.remove(peer, now):
                    self._steps.epoch = self.executors.epoch
                    self._operator.lost(self._scheduler)
            case Joined():
                logs.info(log, "executor_joined", executor=peer.index, pid=peer.pid)

    def _disband(self, reason: str) -> None:
        """Have the members of a group end, so that it begins another generation."""
        for member in self.executors.peers:
            self._steps.give_up(member, reason)

    def _rest(self, scheduler: Scheduler | None, now: float) -> None:
        """Have the executors sleep after a time without requests, or when the operator asks for it, and wake them for
        what comes. Requests that a pause holds wake nobody. Of several models none is woken but when it is asked for:
        the memory may be another one's."""
        asked = self._operator.rest(scheduler, self.executors, self.unfinished, now)
        in_flight = scheduler is not None and scheduler.in_flight > 0
        if self.unfinished or in_flight or self.draining or self._operator.changing or self._operator.fleeting:
            self.executors.busy(now)
        if asked is Rest.ASLEEP or self.executors.sleep_due(now):
            self._sleep(now, discard=asked is Rest.ASLEEP and self._operator.discards)
        asleep = self.executors.rest is Rest.ASLEEP
        if asleep and (asked is Rest.WAKING or (self._demand > 0 and not several(self._config))):
            self._wake(now)

    @property
    def _demand(self) -> int:
        """What executors are needed for: requests that no pause holds, and changes of the operator's."""
        held = self._scheduler is not None and self._scheduler.paused
        return (0 if held else self.unfinished) + self._operator.changing

    def _sleep(self, now: float, *, discard: bool = False) -> None:
        logs.info(log, "sleeping", idle_seconds=self.executors.idle_for(now), discard=discard)
        members = self.executors.sleep(now, discard=discard)
        self._steps.epoch, self._status.due = self.executors.epoch, now
        self._send_to_sleep(members)

    def _send_to_sleep(self, members: Iterable[Peer]) -> None:
        """One that cannot be told says that it is ready once more, and is told then."""
        for member in members:
            if not self._steps.send(member, Sleep(self.executors.discards)):
                self._steps.give_up(member, DEAF)

    def _wake(self, now: float) -> None:
        logs.info(log, "waking", slept_seconds=now - self.executors.rest_since)
        self._steps.send_each(self.executors.wake(now), Wake())
        self._status.due = now

    def _begin(self, now: float) -> None:
        """The executor group is complete: the first one brings the scheduler, a later one a new epoch for it."""
        epoch = self.executors.epoch
        self._steps.epoch, self._status.due = epoch, now
        self._times.restart(now)
        self._bitmasks.renew(self.executors.mask_slots)
        if self._scheduler is not None:
            fields: dict[str, object] = {"epoch": epoch, "unfinished": self._scheduler.unfinished}
            if self.executors.rest is Rest.WAKING:
                logs.info(log, "awake", seconds=now - self.executors.rest_since, **fields)
                self.executors.end_wake(now)
            else:
                logs.write(log, logging.WARNING, "epoch", fields)
            self._scheduler.restart(epoch, now, *self.executors.room)
            self._operator.begin(self._scheduler, self.executors)
            return
        options = scheduling_options(self._config, self._facts, self.executors, self._bitmasks.most, self._replica)
        self._scheduler = Scheduler(msgspec.structs.replace(options, traced=self._traces.enabled))
        if self.executors.rest is Rest.WAKING:
            logs.info(log, "awake", seconds=now - self.executors.rest_since, epoch=epoch, unfinished=len(self._early))
            self.executors.end_wake(now)
        self._operator.begin(self._scheduler, self.executors)
        for peer, request in self._early.take():
            self._submit(peer, request, self._scheduler, now)
        gc.collect()
        gc.freeze()
        gc.disable()

    def _token_arrival(self, arrival: Arrival, now: float) -> None:
        peer, scheduler = arrival.peer, self._scheduler
        match arrival.message:
            case SubmitTokens() as request:
                early = scheduler is None and self.executors.rest is not Rest.AWAKE
                if self.draining or self.executors.given_up(now) or (scheduler is None and not early):
                    self._clients.refuse(peer, request.id, SHUTTING_DOWN if self.draining else NOT_READY)
                elif scheduler is None:
                    self._early.add(peer, request, now)
                    self._status.due = now
                else:
                    self._submit(peer, request, scheduler, now)
            case Abort(id=request):
                if not self._early.abort(request) and scheduler is not None and not self._grammars.abort(request):
                    scheduler.abort(request)
            case StopHit() as hit:
                if scheduler is not None:
                    scheduler.stop_hit(hit)
            case ReleaseTransfer(id=request):
                if scheduler is not None:
                    scheduler.release_transfer(request)
            case asked if isinstance(asked, Control):
                if isinstance(asked, AbortAll):
                    self._early.abort_all(asked.rid)
                self._operator.take(peer, asked, scheduler, now)
                self._status.due = now
            case Joined():
                self._clients.join(peer)
                self._status.due = now
            case Left(reason):
                source = self._clients.leave(peer, reason)
                self._grammars.forget(peer)
                self._early.forget(peer)
                if scheduler is not None:
                    scheduler.forget(source)

    def _submit(self, peer: Peer, request: SubmitTokens, scheduler: Scheduler, now: float) -> None:
        if request.automaton is None:
            scheduler.submit(request, self._clients.source(peer), now)
        elif self._bitmasks.most < self._config.model.max_num_seqs:
            self._clients.reject(peer, Rejected(id=request.id, status=400, message=NO_MASKS, code="unsupported"))
        else:
            self._traces.wait(request, now)
            self._grammars.take(peer, request)

    def _admit(self, scheduler: Scheduler, now: float) -> None:
        """Submit requests whose automaton has been made. Those aborted meanwhile end in the scheduler, in order."""
        for admitted in self._grammars.admit():
            peer, request, guide = admitted.peer, admitted.request, admitted.guide
            assert guide is not None, "it no longer waits"
            self._traces.admit(request, now, guide.message if isinstance(guide, RequestError) else None)
            if isinstance(guide, RequestError):
                self._clients.reject(peer, rejection(request.id, guide))
                continue
            scheduler.submit(request, self._clients.source(peer), now, guide)
            if admitted.aborted:
                scheduler.abort(request.id)

    def _fill_masks(self, scheduler: Scheduler) -> None:
        """Start filling masks as early as the tokens before them are known; those that are there go out at once."""
        while (work := scheduler.mask_work()) is not None:
            self._bitmasks.start(work, self._times.last_step)
        self._bitmasks.prepare(scheduler.late_masks())
        self._send_masks()

    def _send_masks(self) -> None:
        """Send masks that are done; those of an earlier epoch are dropped."""
        for masks in self._bitmasks.finished():
            if self.executors.complete and masks.epoch == self.executors.epoch:
                self._steps.send_each(self.executors.answering, masks)

    def _crash_loop_reason(self) -> str:
        """Why the launcher has given an executor up; empty under another supervisor, which does not say."""
        if self.executors.complete or not self._config.run.run_dir:
            return ""
        found = crash_loops(Path(self._config.run.run_dir))
        group = members(self._replica, self._config.model)
        return next((one.reason for one in found if one.role == Role.EXECUTOR and one.index in group), "")

    def _plan(self, scheduler: Scheduler, now: float) -> None:
        """Keep `depth` steps in flight as long as there is work."""
        if not self.executors.complete:
            return
        most = depth(self._config)
        while scheduler.in_flight < most:
            began = time.perf_counter()
            plan = scheduler.plan(now)
            if plan is None:
                self._send_beside(scheduler)
                return
            planned = time.perf_counter()
            if scheduler.traced and self._traces.due(now):
                plan = self._traces.planned(plan, scheduler.last_step(), now)
            if scheduler.in_flight == 1:
                self._times.restart(now)  # idle until now: the step's age counts from its plan
            sent = self._steps.send_each(self.executors.peers, plan)
            encode = time.perf_counter() - planned
            self._times.planned(plan.step, planned - began, encode, after_idle=self._housekeeping.idle)
            self._housekeeping.idle = False
            self._send_beside(scheduler)
            self._fill_masks(scheduler)
            if not sent:
                return  # an executor is gone: the link says `Left` next, and the new epoch recomputes this step

    def _send_beside(self, scheduler: Scheduler) -> None:
        """Have executors do what is to be done beside the steps, as far as their links have room: copy blocks, read and
        forget adapters, and have each of the first stage encode its images."""
        copies, adapters, images = scheduler.copy_messages(), scheduler.adapter_messages(), scheduler.image_messages()
        for messages, peers in ((copies, self.executors.caching), (adapters, self.executors.peers)):
            while messages and min(peer.credit for peer in peers) > RESERVED:
                self._steps.send_each(peers, messages.pop(0))
        while images and (peer := self.executors.encoding[images[0].rank]).credit > RESERVED:
            self._steps.send_each((peer,), images.pop(0))

    def _device_has_time(self, scheduler: Scheduler) -> bool:
        """Whether the device has work for longer than an iteration takes."""
        return self._times.long and scheduler.in_flight > 0 and not self._bitmasks.jobs.running

    def _deliver(self, scheduler: Scheduler) -> None:
        if waiting := scheduler.undelivered():
            began = time.perf_counter()
            self._clients.deliver(scheduler, waiting)
            self._times.delivered(time.perf_counter() - began)

    def _send_status(self, now: float, wall: float) -> None:
        counts = None if self._scheduler is None else self._scheduler.counts
        if self._status.is_due(now, ready=self.ready, draining=self.draining, counts=counts):
            status = self.status(now, wall)
            self._status.note(status, now)
            self._clients.send_status(status)

    def status(self, now: float, wall: float) -> EngineStatus:
        """The engine's state and totals, as every heartbeat carries them."""
        status = group_status(
            self.executors, self._config.model, self._facts.max_model_len, self._replica, wall, self._demand,
            draining=self.draining,
        )  # fmt: skip
        if self._scheduler is None:
            return status
        paused, version = self._scheduler.pause_mode or "", self._operator.version
        status = msgspec.structs.replace(status, paused=paused, weight_version=version)
        return with_statistics(status, self._scheduler.statistics(), self._times.age(now))
