"""What the operator has asked of this scheduler, until it is done: pauses, and changes that need the executors at rest.

Pauses and resumes take effect as they come; a pause is answered once it holds, unless another one or a resume came
meanwhile. Changes are made one after the other, in the order in which they came: the scheduler is frozen, the steps in
flight are applied, the change is made, and it goes on, whatever the operator's pause is.

Sleep and wake are done in their order, too, behind the changes. The loop does them, since the time that passes without
requests has executors sleep as well.

Executors say which weights they have when they are ready. A group that begins with others than it should have, because
an executor began anew, reads them before its first step. Where it cannot, it serves the weights that it started with.
Weights that a trainer gave are in no folder: a group that has lost them reads the last folder's.

An update of several parts holds the scheduler frozen from its beginning to its end. A trainer that does not come back
within HOLD_SECONDS has died: the last folder is read again, and requests go on.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import dataclass, field

from penstock.engine_core.scheduling.executor_group import ExecutorGroup, Rest
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.control import (
    FIRST_VERSION,
    IN_MEMORY,
    PARTIAL,
    AbortAll,
    AskDigests,
    Asked,
    AskState,
    CheckWeights,
    Control,
    Controlled,
    Digest,
    FlushCache,
    HoldWeights,
    JoinGroup,
    MeetTrainer,
    Pause,
    Resume,
    SleepEngine,
    SumWeights,
    UpdateWeights,
    WakeEngine,
    WeightsAnswer,
    WriteWeights,
)
from penstock.protocol.steps import Sleep
from penstock.services.links.link import Link, Peer
from penstock.services.scheduler.tokenizer_clients import TokenizerClients
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

NOT_READY = "the engine is not ready"
SUPERSEDED = "another pause, or a resume, came before it held"
LOST_BEFORE = "an executor ended before anything was written: the weights are what they were"
LOST_WITHIN = "an executor ended while the weights were written: the weights are those of version {} again"
NOT_HELD = "no update has begun: POST /start_weight_update before, and come back within {} seconds"
SUMS_DIFFER = "tensor {}: executors that should hold the same have different numbers"
GROUP_DIFFERS = "its weights are not its group's"
NOT_WOKEN = "the executors do not become ready"
UPDATING = "an update of the weights has begun, of which a sleep would lose parts: POST /finish_weight_update before"
REQUESTS = "{} requests have not ended: end them or hold them with POST /pause before"
FOLDERS_ONLY = "one of several models takes weights from folders alone: it would lose others when it leaves its GPU"
UNLOADED = AskState | SleepEngine | WakeEngine | FlushCache | Resume | AbortAll  # done before anything was loaded
INTERNAL = -1  # id of a change that nobody asked for
MASK = (1 << 64) - 1  # of sums
HOLD_SECONDS = 300.0  # between the parts of an update, after which the trainer has died


class Stage(enum.Enum):
    """Of a change."""

    NEW = "new"
    CHECKING = "checking"
    STOPPING = "stopping"
    WRITING = "writing"
    ASKING = "asking"  # for what changes no weights


@dataclass(slots=True)
class Change:
    """One change, and how far it has come."""

    peer: Peer | None  # who asked; None: nobody
    message: FlushCache | UpdateWeights | JoinGroup | HoldWeights | AskDigests
    stage: Stage = Stage.NEW
    number: int = 0  # of what executors were asked
    waits_for: set[Peer] = field(default_factory=set)  # executors
    error: str = ""
    digests: list[tuple[Digest, ...]] = field(default_factory=list)  # of each executor


@dataclass(slots=True)
class Hold:
    """An update of several parts."""

    since: float  # monotonic seconds of its last part
    written: bool = False  # weights are of no version


class OperatorQueue:
    """Owner of what was asked, and of which weights this replica is to have."""

    def __init__(self, clients: TokenizerClients, steps: Link, *, on_demand: bool = False) -> None:
        """on_demand: others share the executors' devices, and say when these sleep and wake, from the start on."""
        self._on_demand = on_demand
        self._clients = clients
        self._steps = steps
        self._pauses: deque[tuple[Peer, Pause]] = deque()
        self._changes: deque[Change] = deque()
        self._number = 0
        self.path = ""  # of the folder whose weights are served; empty: the one that the server started with
        self.version = FIRST_VERSION
        self._whole = "", FIRST_VERSION  # path and version of the last folder that was read
        self._hold: Hold | None = None
        self._adopted = False  # executors have said what they have
        self._rests: deque[tuple[Peer, SleepEngine | WakeEngine]] = deque()
        self._asleep = False
        self._leaves_at: float | None = None  # monotonic seconds; None: nothing is given time to end

    @property
    def changing(self) -> bool:
        """Whether anything waits for executors that are awake."""
        return bool(self._changes)

    @property
    def discards(self) -> bool:
        """Whether the sleep that is asked for is to keep no weights."""
        return bool(self._rests) and isinstance(self._rests[0][1], SleepEngine) and self._rests[0][1].discard

    @property
    def fleeting(self) -> bool:
        """Whether executors that sleep would lose weights that are in no folder."""
        return self.path == IN_MEMORY or self._hold is not None

    def take(self, peer: Peer, message: Control, scheduler: Scheduler | None, now: float) -> None:
        """A message of the operator's, perhaps for the second time by another way."""
        if scheduler is None and not (self._on_demand and isinstance(message, UNLOADED)):
            self._clients.answer(peer, Controlled(message.id, NOT_READY))
            return
        match message:
            case SleepEngine() | WakeEngine():
                self._rests = deque(one for one in self._rests if one[1].id != message.id)
                self._rests.append((peer, message))
            case AskState():
                self._answer(peer, message.id, scheduler)
            case _ if scheduler is None:  # there is nothing to flush, to resume, or to abort any more
                self._answer(peer, message.id, scheduler)
            case Pause():
                self._supersede(message.id)
                scheduler.pause(message.mode, now)
                self._pauses.append((peer, message))
            case Resume():
                self._supersede(message.id)
                scheduler.pause(None, now)
                self._answer(peer, message.id, scheduler)
            case AbortAll():
                scheduler.abort_all(now, message.rid)
                self._answer(peer, message.id, scheduler)
            case JoinGroup() | HoldWeights() if self._on_demand:
                self._answer(peer, message.id, scheduler, FOLDERS_ONLY)
            case FlushCache() | UpdateWeights() | JoinGroup() | HoldWeights() | AskDigests():
                again = next((change for change in self._changes if change.message.id == message.id), None)
                if again is not None:
                    again.peer = peer
                else:
                    self._changes.append(Change(peer, message))

    def advance(self, scheduler: Scheduler, executors: ExecutorGroup[Peer], now: float) -> None:
        """Do what can be done now, and answer what has been done. Called in every iteration, before a plan is made."""
        if self._pauses and scheduler.paused:
            for peer, message in self._pauses:
                self._answer(peer, message.id, scheduler)
            self._pauses.clear()
        self._asleep = executors.rest is Rest.ASLEEP
        while self._changes and self._asleep and isinstance(self._changes[0].message, FlushCache):
            flushed = self._changes.popleft()  # they hold nothing
            if flushed.peer is not None:
                self._answer(flushed.peer, flushed.message.id, scheduler)
        while self._changes and executors.complete and self._step(self._changes[0], scheduler, executors, now):
            change = self._changes.popleft()
            if change.peer is not None:
                self._answer(change.peer, change.message.id, scheduler, change.error, whole(change.digests))
        if self._hold is not None and not self._changes and now - self._hold.since >= HOLD_SECONDS:
            logs.warning(log, "trainer_gone", seconds=HOLD_SECONDS, weights_written=self._hold.written)
            self._give_up_hold(scheduler)

    def rest(
        self, scheduler: Scheduler | None, executors: ExecutorGroup[Peer], unfinished: int, now: float
    ) -> Rest | None:
        """Whether the executors are to sleep now, or to wake; what holds already is answered. `unfinished` requests
        have not ended. Called behind `advance`."""
        self._asleep = executors.rest is Rest.ASLEEP
        while self._rests and not self._changes:
            peer, message = self._rests[0]
            self._asleep, error = executors.rest is Rest.ASLEEP, ""
            if isinstance(message, SleepEngine) and not self._asleep:
                if self._hold is not None:
                    error = UPDATING
                elif message.grace is not None:
                    return Rest.ASLEEP if self._leaves(scheduler, message.grace, now) else None
                elif not unfinished or (scheduler is not None and scheduler.paused):
                    return None if scheduler is not None and scheduler.in_flight else Rest.ASLEEP
                else:
                    error = REQUESTS.format(unfinished)
            elif isinstance(message, SleepEngine):
                if message.discard:
                    self._steps.send_each(executors.discard(), Sleep(discard=True))
                if not executors.all_asleep or (message.discard and executors.kept_bytes):
                    return None
            elif self._asleep:
                return Rest.WAKING
            elif not executors.complete:
                if not executors.given_up(now):
                    return None
                error = NOT_WOKEN
            self._answer(peer, message.id, scheduler, error)
            self._rests.popleft()
        return None

    def _leaves(self, scheduler: Scheduler | None, grace: float, now: float) -> bool:
        """Whether nothing is in the way of sleep any more: what runs has ended, or had its time, and no step is in
        flight. What has not ended stays where it is."""
        if scheduler is None:
            return True
        if self._leaves_at is None:
            self._leaves_at = now + grace
            scheduler.close(closed=True)
        if scheduler.counts[0] and now < self._leaves_at and not scheduler.paused:
            return False
        scheduler.freeze(frozen=True)
        if scheduler.in_flight:
            return False
        self._stay(scheduler)
        return True

    def _stay(self, scheduler: Scheduler) -> None:
        """It leaves no more: requests begin and go on."""
        self._leaves_at = None
        scheduler.close(closed=False)
        scheduler.freeze(frozen=False)

    def not_woken(self, scheduler: Scheduler | None) -> None:
        """The executors have been given up: whoever wants them woken hears of it, or wants them to leave."""
        if self._leaves_at is not None and scheduler is not None:
            self._stay(scheduler)
        for peer, message in self._rests:
            self._answer(peer, message.id, scheduler, NOT_WOKEN)
        self._rests.clear()

    def answered(self, peer: Peer, message: WeightsAnswer) -> None:
        """An executor has looked at a folder, or read it."""
        if self._changes and message.number == self._changes[0].number:
            change = self._changes[0]
            change.waits_for.discard(peer)
            change.error = change.error or message.error
            change.digests.append(message.digests)

    def begin(self, scheduler: Scheduler, executors: ExecutorGroup[Peer]) -> None:
        """A group is complete; nothing has been planned for it."""
        held = {(ready.weights_path, ready.weight_version) for ready in executors.readies}
        if not self._adopted:
            self._adopted = True
            self.path, self.version = executors.first.weights_path, executors.first.weight_version
            if self.path == PARTIAL:  # a scheduler ended in the midst of an update
                self.path, self.version = self._whole
            elif self.path != IN_MEMORY:
                self._whole = self.path, self.version
        if self.path == IN_MEMORY and held != {(self.path, self.version)}:
            logs.warning(log, "weights_lost", version=self.version, instead=self._whole[1])
            self.path, self.version = self._whole
        scheduler.begin_with(self.version)
        if held != {(self.path, self.version)}:
            scheduler.freeze(frozen=True)
            self._changes.appendleft(Change(None, UpdateWeights(INTERNAL, self.path, self.version)))

    def lost(self, scheduler: Scheduler | None) -> None:
        """The group is no longer complete: what it was asked ends. What has not begun waits for the next one."""
        held, self._hold = self._hold is not None, None
        if held and scheduler is not None:
            scheduler.freeze(frozen=False)
        if not self._changes or self._changes[0].stage is Stage.NEW:
            return
        change = self._changes.popleft()
        assert scheduler is not None, "it has begun"
        scheduler.freeze(frozen=False)
        within = change.stage is Stage.WRITING
        if change.peer is not None:
            why = LOST_WITHIN.format(self._whole[1]) if within else LOST_BEFORE
            self._answer(change.peer, change.message.id, scheduler, why)
        elif within:  # the next ones might end of it as well
            logs.error(log, "weights_lost", path=self.path, reason=LOST_WITHIN.format(FIRST_VERSION))
            self.path, self.version = self._whole = "", FIRST_VERSION

    def _answer(
        self, peer: Peer, number: int, scheduler: Scheduler | None, error: str = "", digests: tuple[Digest, ...] = ()
    ) -> None:
        if scheduler is None:
            self._clients.answer(peer, Controlled(number, error, version=self.version, asleep=self._asleep))
            return
        paused = (scheduler.pause_mode or "") if scheduler.paused else ""
        told = Controlled(number, error, scheduler.unfinished, paused, self.version, self._asleep, digests)
        self._clients.answer(peer, told)

    def _supersede(self, number: int) -> None:
        """Answer the pauses that are awaited; one that came before with this number is the same."""
        for peer, pause in self._pauses:
            if pause.id != number:
                self._clients.answer(peer, Controlled(pause.id, SUPERSEDED))
        self._pauses.clear()

    def _step(self, change: Change, scheduler: Scheduler, executors: ExecutorGroup[Peer], now: float) -> bool:
        """Bring a change as far as it comes now; whether it has ended."""
        match change.message:
            case FlushCache():
                if not self._at_rest(change, scheduler):
                    return False
                scheduler.forget_computed(now)
                self._thaw(scheduler)
                return True
            case HoldWeights() as message:
                return self._step_hold(change, message, scheduler, executors, now)
            case UpdateWeights() as message:
                return self._step_update(change, message, scheduler, executors, now)
            case JoinGroup() as message:
                if change.stage is Stage.NEW:
                    change.stage = Stage.ASKING
                    self._ask(change, executors, MeetTrainer(self._next(change), message))
            case AskDigests():
                if change.stage is not Stage.ASKING and self._at_rest(change, scheduler):
                    change.stage = Stage.ASKING
                    self._ask(change, executors, SumWeights(self._next(change)))
                elif change.stage is Stage.ASKING and not change.waits_for:
                    self._thaw(scheduler)
                    change.error = difference(change.digests)
        return change.stage is Stage.ASKING and not change.waits_for

    def _at_rest(self, change: Change, scheduler: Scheduler) -> bool:
        """Have no step planned; whether no step and no copy is left."""
        if change.stage is Stage.NEW:
            change.stage = Stage.STOPPING
            scheduler.freeze(frozen=True)
        return scheduler.settled

    def _step_update(
        self, change: Change, message: UpdateWeights, scheduler: Scheduler, executors: ExecutorGroup[Peer], now: float
    ) -> bool:
        if change.stage is Stage.NEW:
            change.stage = Stage.CHECKING
            self._ask(change, executors, CheckWeights(self._next(change), message.path, message.tensors, message.group))
        if change.stage is Stage.CHECKING and not change.waits_for:
            if change.error or message.check_only:
                self._refused(change, scheduler, executors)
                return True
            change.stage = Stage.STOPPING
            if message.abort:
                scheduler.abort_all(now)
            scheduler.freeze(frozen=True)
        if change.stage is Stage.STOPPING and scheduler.settled:
            change.stage = Stage.WRITING
            path = PARTIAL if self._hold is not None and message.tensors else message.path
            order = WriteWeights(self._next(change), path, message.version, message.tensors, message.group)
            self._ask(change, executors, order)
        if change.stage is Stage.WRITING and not change.waits_for:
            if self._hold is not None and message.tensors:
                self._hold = Hold(now, written=True)
            else:
                self._written(message.path, message.version, scheduler, now)
            return True
        return False

    def _step_hold(
        self, change: Change, message: HoldWeights, scheduler: Scheduler, executors: ExecutorGroup[Peer], now: float
    ) -> bool:
        """Begin an update of several parts, or end it: executors are told what they have then."""
        if change.stage is Stage.NEW and message.version and self._hold is None:
            change.error = NOT_HELD.format(round(HOLD_SECONDS))
            return True
        if change.stage is not Stage.WRITING and not self._at_rest(change, scheduler):
            return False
        if not message.version:
            self._hold = Hold(now, written=self._hold is not None and self._hold.written)
            return True
        if change.stage is Stage.STOPPING:
            change.stage = Stage.WRITING
            self._ask(change, executors, WriteWeights(self._next(change), IN_MEMORY, message.version))
        if change.waits_for:
            return False
        self._hold = None
        self._written(IN_MEMORY, message.version, scheduler, now)
        return True

    def _written(self, path: str, version: str, scheduler: Scheduler, now: float) -> None:
        """All executors have these weights."""
        self.path, self.version = path, version
        if path != IN_MEMORY:
            self._whole = path, version
        if self._hold is None or not self._hold.written:
            scheduler.forget_computed(now, version)
        self._thaw(scheduler)
        logs.info(log, "weights_updated", path=path, version=version)

    def _thaw(self, scheduler: Scheduler) -> None:
        """Plan steps again, unless an update goes on."""
        scheduler.freeze(frozen=self._hold is not None)

    def _give_up_hold(self, scheduler: Scheduler) -> None:
        """An update will not end: weights of no version are replaced by the last folder's."""
        hold, self._hold = self._hold, None
        if hold is not None and hold.written:
            self._changes.appendleft(Change(None, UpdateWeights(INTERNAL, *self._whole)))
        else:
            self._thaw(scheduler)

    def _refused(self, change: Change, scheduler: Scheduler, executors: ExecutorGroup[Peer]) -> None:
        """Nothing was written. What a group should have had, and cannot read again, it is served without: by what all
        of its members began with."""
        if change.error:
            logs.warning(log, "weights_refused", reason=change.error)
        if change.message.id != INTERNAL:
            return
        self.path, self.version = self._whole = "", FIRST_VERSION
        if {ready.weights_path for ready in executors.readies} == {""}:
            scheduler.begin_with(self.version)
            scheduler.freeze(frozen=False)
            return
        for member in executors.peers:
            self._steps.give_up(member, GROUP_DIFFERS)

    def _ask(self, change: Change, executors: ExecutorGroup[Peer], message: Asked) -> None:
        change.waits_for = set(executors.peers)
        self._steps.send_each(executors.peers, message)

    def _next(self, change: Change) -> int:
        self._number += 1
        change.number = self._number
        return self._number


def whole(found: list[tuple[Digest, ...]]) -> tuple[Digest, ...]:
    """Sums of whole tensors, from those of every executor's slices; what several hold counts once."""
    slices = {(each.name, each.place): each for digests in found for each in digests}
    sums: dict[str, Digest] = {}
    for each in slices.values():
        value = (sums[each.name].value if each.name in sums else 0) + each.value
        sums[each.name] = Digest(each.name, each.dtype, each.offset, value & MASK)
    return tuple(sums.values())


def difference(found: list[tuple[Digest, ...]]) -> str:
    """A tensor of which executors hold the same slice with different numbers, in words; empty: there is none."""
    values: dict[tuple[str, str], int] = {}
    for each in (each for digests in found for each in digests):
        if values.setdefault((each.name, each.place), each.value) != each.value:
            return SUMS_DIFFER.format(each.name)
    return ""
