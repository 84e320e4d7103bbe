"""One turn of the scheduler process: what arrived, the next plans, then what is to be delivered.

Nothing here decides: engine_core's scheduler does, and it owns every request. The ports and the time are passed in, so
tests drive the loop without sockets and without a clock.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.engine_core.histogram import Histogram
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.engine_core.scheduling.statistics import SchedulerStatistics
from penstock.protocol.config import Config
from penstock.protocol.errors import RequestError
from penstock.protocol.groups import answering, group_size, members
from penstock.protocol.links import Role
from penstock.protocol.messages import Abort, EngineStatus, Message, MetricsSnapshots, Rejected, StopHit, SubmitTokens
from penstock.protocol.steps import ExecutorReady, StepResult
from penstock.services.links.link import Arrival, Joined, Left, Peer
from penstock.services.metrics.definitions import LAG
from penstock.services.metrics.snapshot import RemoteSnapshots
from penstock.services.scheduler.bitmask_filler import BitmaskFiller, BitmaskStatistics
from penstock.services.scheduler.executor_group import ExecutorGroup
from penstock.services.scheduler.grammar_cache import GrammarQueue, GrammarStatistics, rejection
from penstock.services.scheduler.options import ModelFacts, depth, scheduling_options
from penstock.services.scheduler.step_times import StepTimes, StepTimeStatistics
from penstock.services.supervisor import logs
from penstock.services.supervisor.restart_policy import crash_loops
from penstock.services.tracing.scheduler import SchedulerTraces
from penstock.services.tracing.tracer import Tracer

log = logging.getLogger(__name__)

TICK = 0.2  # seconds between ticks of the ports
STATUS_DELAY = 0.05  # seconds for which what runs and waits may have changed without a heartbeat
CHECK_STEPS = 256  # steps between checks of the block accounts' sums; every block is checked whenever it rests
MISSING_LIMIT = 60.0  # seconds that requests wait for a lost executor to come back
IDLE_SECONDS = 1.0  # seconds without work after which there is time for what takes milliseconds
MASK_WAIT = 0.0003  # seconds that the next plan waits for masks, which go first; a crowd's are filled meanwhile
GC_SECONDS = 30.0  # between garbage collections while it never rests
NO_MASKS = "this server runs too many sequences at once (--max-num-seqs) to keep the masks of structured output"
PLACES = 32  # of a draft whose accepted tokens the heartbeat tells apart; forced runs may be far longer
LONG_STEP = 0.002  # seconds; the step behind one that took as long, or longer, does not wait for its successor's plan
OUT_OF_STEP = "its group is out of step"
STUCK = "others of its group do not become ready"
LOST = "the engine lost its executor and it did not come back"


class LinkPort(Protocol):
    """A binder's end of a link, as `services.links.link.Link` is one."""

    epoch: int

    @property
    def peers(self) -> tuple[Peer, ...]: ...

    def send(self, peer: Peer, message: Message) -> bool: ...

    def send_each(self, peers: Iterable[Peer], message: Message) -> bool: ...

    def give_up(self, peer: Peer, reason: str) -> None: ...

    def receive(self) -> list[Arrival]: ...

    def tick(self, now: float) -> None: ...


class LoopStatistics(msgspec.Struct, frozen=True):
    """Counters of the process around the scheduler."""

    turns: int
    plans: int
    results: int
    refused: int  # requests that came while nothing could serve them
    faults: int  # checks that found the block accounts wrong
    guides: GrammarStatistics
    masks: BitmaskStatistics
    times: StepTimeStatistics
    scheduler: SchedulerStatistics | None
    queued: int  # now: refusals, and tokenizers that tokens wait for


class SchedulerLoop:
    """Owner of the scheduler, of the executor group's state and of the numbers that stand for tokenizers."""

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        tokens: LinkPort,
        steps: LinkPort,
        grammars: GrammarQueue,
        bitmasks: BitmaskFiller,
        now: float,
        replica: int = 0,
        traces: SchedulerTraces | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.executors = ExecutorGroup(group_size(config.model), steps.epoch, now, answering(0, config.model))
        self.draining = False
        self.remote = RemoteSnapshots()  # of executors on other hosts
        self.lag = Histogram(LAG)
        self._config = config
        self._replica = replica
        self._traces = traces if traces is not None else SchedulerTraces(Tracer())
        self._clock = clock  # monotonic seconds; None: a turn takes no time
        self._facts = facts
        self._tokens = tokens
        self._steps = steps
        self._grammars = grammars
        self._bitmasks = bitmasks
        self._depth = depth(config)
        self._scheduler: Scheduler | None = None  # from the first complete executor group on
        self._sources: dict[Peer, int] = {}  # tokenizer → its number in the scheduler
        self._joined = 0
        self._refusals: deque[tuple[Peer, Rejected]] = deque()  # not sent yet for want of credit
        self._next_tick = self._next_status = now
        self._status: EngineStatus | None = None  # as last sent
        self._status_at = now
        self._applied_at = now
        self._applied = 0  # last step whose result this epoch's executors sent
        self._busy = 0.0  # seconds of the last result's step on the device
        self._checked_step = 0
        self._crash_loop = ""  # why no executor will come, as the launcher says
        self._collected_at = now
        self._idle_done = True
        self._busy_at = now
        self._idle = True  # nobody had anything to do when the last turn ended
        self._times = StepTimes()
        self._turns = self._plans = self._results = self._refused = self._faults = 0

    @property
    def ready(self) -> bool:
        """Whether a request would run."""
        return self.executors.complete and not self.draining

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return 0 if self._scheduler is None else self._scheduler.unfinished + self._grammars.waiting

    @property
    def drained(self) -> bool:
        """Whether nobody waits for anything that could still come."""
        if self._scheduler is None:
            return not self._refusals
        running = self.unfinished > 0 and self.executors.complete
        return not (running or self._refusals or self._scheduler.undelivered())

    def iterate(self, now: float, wall: float) -> float:
        """Deal with everything that has arrived; returns the monotonic time by which the next turn is due.

        `now` is in monotonic seconds, `wall` in unix seconds. Order matters for latency: results and the masks that
        they make possible, then the next plans, then what tokenizers are waiting for. Behind a long step, with another
        one on the device, there is time: what was sampled, a first token perhaps, leaves before the next plan.
        """
        self._turns += 1
        if now >= self._next_tick:
            self.lag.observe(now - self._next_tick)
            self._next_tick = now + TICK
            self._tokens.tick(now)
            self._steps.tick(now)
            if self._scheduler is not None:
                self._scheduler.expire(now)
            self._crash_loop = self._crash_loop_reason()
            if self.executors.stuck(now):
                self._disband(STUCK)
        self._send_masks()
        results = self._results
        for arrival in self._steps.receive():
            self._step_arrival(arrival, now)
        if self._results > results:
            if self._scheduler is not None and self._long_step(self._scheduler):
                self._deliver(self._scheduler)
            if self._bitmasks.jobs.wait(MASK_WAIT):
                self._send_masks()
        if self._scheduler is not None:
            self._scheduler.tick(now)
        arrivals = self._tokens.receive()
        if self._clock is not None:  # a turn may have waited for masks, or for a processor: nothing came before it left
            now = max(now, self._clock())
        for arrival in arrivals:
            self._token_arrival(arrival, now)
        if self._scheduler is not None:
            self._admit(self._scheduler, now)
            if self._given_up(now) and self._scheduler.unfinished:
                logs.error(log, "gave_up", unfinished=self._scheduler.unfinished, reason=self._crash_loop or LOST)
                self._scheduler.fail(self._crash_loop or LOST)
            self._plan(self._scheduler, now)
            self._deliver(self._scheduler)
            self._traces.record(self._scheduler.stays())
        self._send_refusals()
        self._housekeeping(now)
        self._send_status(now, wall)
        return min(self._next_tick, self._next_status)

    def statistics(self) -> LoopStatistics:
        return LoopStatistics(
            self._turns,
            self._plans,
            self._results,
            self._refused,
            self._faults,
            self._grammars.statistics(),
            self._bitmasks.statistics(),
            self._times.statistics(),
            None if self._scheduler is None else self._scheduler.statistics(),
            len(self._refusals) + (0 if self._scheduler is None else len(self._scheduler.undelivered())),
        )

    def _step_arrival(self, arrival: Arrival, now: float) -> None:
        peer = arrival.peer
        match arrival.message:
            case StepResult() as result:
                if self._scheduler is None:
                    return  # meant for the scheduler before this one
                self._results += 1
                self._busy = result.busy
                self._applied_at = now
                if result.epoch == self._scheduler.epoch:
                    self._applied = result.step
                began = time.perf_counter()
                self._scheduler.follow(result)
                self._fill_masks(self._scheduler)  # while the rest of the result is dealt with
                self._scheduler.apply(result, now)
                self._times.applied(result, time.perf_counter() - began)
                self._traces.applied(result, now)
            case MetricsSnapshots() as snapshots:
                self.remote.receive(peer, snapshots)
            case ExecutorReady() as ready:
                broke = peer in self.executors.peers and self.executors.complete
                if self.executors.add(peer, ready, now) and not self.executors.in_step:
                    self._disband(OUT_OF_STEP)
                elif self.executors.complete:
                    self._begin(now)
                elif broke:
                    self._steps.epoch = self.executors.epoch
            case Left(reason):
                self.remote.remove(peer)
                logs.warning(log, "executor_left", executor=peer.index, pid=peer.pid, reason=reason)
                if self.executors.remove(peer, now):
                    self._steps.epoch = self.executors.epoch
            case Joined():
                logs.info(log, "executor_joined", executor=peer.index, pid=peer.pid)

    def _disband(self, reason: str) -> None:
        """Have the members of a group end, so that it begins another life."""
        for member in self.executors.peers:
            self._steps.give_up(member, reason)

    def _begin(self, now: float) -> None:
        """The executor group is complete: the first one brings the scheduler, a later one a new epoch for it."""
        epoch, blocks = self.executors.epoch, self.executors.blocks
        self._steps.epoch = epoch
        self._applied_at = now
        self._bitmasks.renew(self.executors.mask_places)
        if self._scheduler is not None:
            logs.warning(log, "epoch", epoch=epoch, unfinished=self._scheduler.unfinished)
            self._scheduler.restart(epoch, now, blocks)
            return
        options = scheduling_options(self._config, self._facts, self.executors, self._bitmasks.most)
        self._scheduler = Scheduler(msgspec.structs.replace(options, traced=self._traces.enabled))
        gc.collect()
        gc.freeze()
        gc.disable()

    def _token_arrival(self, arrival: Arrival, now: float) -> None:
        peer, scheduler = arrival.peer, self._scheduler
        match arrival.message:
            case SubmitTokens() as request:
                if scheduler is None or self.draining or self._given_up(now):
                    self._refuse(peer, request.id)
                elif request.automaton is not None and self._bitmasks.most < self._config.model.max_num_seqs:
                    self._refusals.append((peer, Rejected(id=request.id, status=400, message=NO_MASKS)))
                elif request.automaton is not None:
                    self._traces.wait(request, now)
                    self._grammars.take(peer, request)
                else:
                    scheduler.submit(request, self._sources[peer], now)
            case Abort(id=request):
                if scheduler is not None and not self._grammars.abort(request):
                    scheduler.abort(request)
            case StopHit() as hit:
                if scheduler is not None:
                    scheduler.stop_hit(hit)
            case Joined():
                logs.info(log, "tokenizer_joined", tokenizer=peer.index, pid=peer.pid)
                self._joined += 1
                self._sources[peer] = self._joined
                self._next_status = now
            case Left(reason):
                logs.info(log, "tokenizer_left", tokenizer=peer.index, pid=peer.pid, reason=reason)
                source = self._sources.pop(peer)
                self._grammars.forget(peer)
                if scheduler is not None:
                    scheduler.forget(source)

    def _admit(self, scheduler: Scheduler, now: float) -> None:
        """Requests whose automaton stands go to the scheduler; those aborted meanwhile end there, in order."""
        for admitted in self._grammars.admit():
            peer, request, guide = admitted.peer, admitted.request, admitted.guide
            self._traces.admit(request, now, guide.message if isinstance(guide, RequestError) else None)
            if isinstance(guide, RequestError):
                self._refusals.append((peer, rejection(admitted)))
                continue
            scheduler.submit(request, self._sources[peer], now, guide)
            if admitted.aborted:
                scheduler.abort(request.id)

    def _fill_masks(self, scheduler: Scheduler) -> None:
        """Start what the executors will wait for as early as it can be known."""
        while (work := scheduler.mask_work()) is not None:
            self._bitmasks.start(work, self._applied)

    def _send_masks(self) -> None:
        """Masks of an epoch that is over are for nobody."""
        for masks in self._bitmasks.finished():
            if self.executors.complete and masks.epoch == self.executors.epoch:
                self._steps.send_each(self.executors.answering, masks)

    def _refuse(self, peer: Peer, request: int) -> None:
        self._refused += 1
        why = "the server is shutting down" if self.draining else "the engine is not ready"
        self._refusals.append((peer, Rejected(id=request, status=503, message=why, code="not_ready")))

    def _given_up(self, now: float) -> bool:
        """Whether the executors have been missing for so long, or failed so often, that nobody should wait for them."""
        late = now - self.executors.missing_since >= MISSING_LIMIT
        return not self.executors.complete and (late or bool(self._crash_loop))

    def _crash_loop_reason(self) -> str:
        """What the launcher says of an executor that is beyond hope; under a supervisor nobody says anything."""
        if self.executors.complete or not self._config.run.run_dir:
            return ""
        found = crash_loops(Path(self._config.run.run_dir))
        group = members(self._replica, self._config.model)
        return next((one.reason for one in found if one.role == Role.EXECUTOR and one.index in group), "")

    def _plan(self, scheduler: Scheduler, now: float) -> None:
        """Keep `depth` steps in flight as long as there is work."""
        if not self.executors.complete:
            return
        while scheduler.in_flight < self._depth:
            began = time.perf_counter()
            plan = scheduler.plan(now)
            if plan is None:
                return
            planned = time.perf_counter()
            self._plans += 1
            if scheduler.traced and self._traces.due(now):
                plan = self._traces.planned(plan, scheduler.last_step(), now)
            if scheduler.in_flight == 1:
                self._applied_at = now  # idle until now: the step's age counts from its plan
            sent = self._steps.send_each(self.executors.peers, plan)
            self._times.planned(plan.step, planned - began, time.perf_counter() - planned, rested=self._idle)
            self._idle = False
            self._fill_masks(scheduler)
            if not sent:
                return  # an executor is gone: the link says `Left` next, and the new epoch recomputes this step

    def _long_step(self, scheduler: Scheduler) -> bool:
        """Whether the device has work for longer than a turn takes."""
        return self._busy >= LONG_STEP and scheduler.in_flight > 0 and not self._bitmasks.jobs.running

    def _deliver(self, scheduler: Scheduler) -> None:
        """Give each tokenizer what it has credit for; the rest waits in the scheduler and is merged there."""
        waiting = scheduler.undelivered()
        if not waiting:
            return
        began = time.perf_counter()
        for peer, source in self._sources.items():
            if peer.credit > 0 and source in waiting:
                for message in scheduler.outputs(source, peer.credit):
                    self._tokens.send(peer, message)  # refused only by a peer that is gone; `forget` follows
        self._times.delivered(time.perf_counter() - began)

    def _send_refusals(self) -> None:
        for _ in range(len(self._refusals)):
            peer, rejected = self._refusals.popleft()
            if peer in self._sources and not self._tokens.send(peer, rejected):
                self._refusals.append((peer, rejected))

    def _housekeeping(self, now: float) -> None:
        """What is done beside the steps: the block accounts are checked, garbage is collected."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        self._idle = not (scheduler.unfinished or scheduler.in_flight)
        if not self._idle:
            self._busy_at, self._idle_done = now, False
        # The next request often comes right after the last one ended, and must not wait for a look at every block.
        rests = not self._idle_done and now - self._busy_at >= IDLE_SECONDS
        self._idle_done |= rests
        if rests or self._plans - self._checked_step >= CHECK_STEPS:
            self._checked_step = self._plans
            self._check(scheduler, thorough=rests)
        if rests or now - self._collected_at >= GC_SECONDS:
            self._collected_at = now
            gc.collect(0)

    def _check(self, scheduler: Scheduler, *, thorough: bool) -> None:
        """Hold the block accounts against one another; block by block when there is time for it."""
        report = scheduler.check(thorough=thorough)
        if not report.ok:
            self._faults += 1
            logs.error(log, "block_accounts_wrong", faults="; ".join(report.faults), quarantined=len(report.blocks))

    def _send_status(self, now: float, wall: float) -> None:
        """The heartbeat, at its interval, at once when readiness changes, and soon when what runs and waits does."""
        before = self._status
        changed = before is not None and (before.ready, before.draining) != (self.ready, self.draining)
        counts = None if self._scheduler is None else self._scheduler.counts
        if before is not None and counts is not None and counts != (before.running, before.waiting):
            self._next_status = min(self._next_status, self._status_at + STATUS_DELAY)
        if now < self._next_status and not changed:
            return
        self._status_at = now
        self._next_status = now + self._config.scheduler.status_interval
        self._status = self.status(now, wall)
        self._tokens.send_each([peer for peer in self._sources if peer.credit > 0], self._status)

    def status(self, now: float, wall: float) -> EngineStatus:
        """The engine's state and totals, as every heartbeat carries them."""
        model = self._config.model
        first = self.executors.first if self.executors.complete else None
        common = EngineStatus(
            time=wall,
            epoch=self.executors.epoch,
            ready=self.ready,
            step=0,
            step_age=0.0,
            running=0,
            waiting=0,
            blocks=0,
            blocks_free=0,
            blocks_idle=0,
            block_size=model.block_size,
            max_model_len=self._facts.max_model_len,
            max_num_seqs=model.max_num_seqs,
            device=self.executors.devices if first else "",
            dtype=first.dtype if first else "",
            prompt_tokens=0,
            cached_tokens=0,
            output_tokens=0,
            finished=0,
            aborted=0,
            failed=0,
            preemptions=0,
            drain_rate=0.0,
            draining=self.draining,
            replica=self._replica,
        )
        if self._scheduler is None:
            return common
        found = self._scheduler.statistics()
        return msgspec.structs.replace(
            common,
            step=found.step,
            step_age=now - self._applied_at if found.in_flight else 0.0,
            running=found.running,
            waiting=found.waiting,
            blocks=found.pool.total,
            blocks_free=found.pool.free,
            blocks_idle=found.pool.idle,
            prompt_tokens=found.prompt_tokens,
            cached_tokens=found.cached_tokens,
            output_tokens=found.output_tokens,
            finished=found.finished,
            aborted=found.aborted,
            failed=found.failed,
            preemptions=found.preemptions,
            drain_rate=found.drain_rate,
            drafts=found.drafts,
            draft_tokens=found.draft_tokens,
            accepted_tokens=found.accepted_tokens,
            accepted_at=found.accepted_at[:PLACES],
        )
