"""What the operator has asked of this scheduler, until it is done: pauses, and changes that need the executors at rest.

Pauses and resumes take effect as they come; a pause is answered once it holds, unless another one or a resume came
meanwhile. Changes are made one after the other, in the order in which they came: the scheduler is frozen, the steps in
flight are applied, the change is made, and it goes on, whatever the operator's pause is.

Sleep and wake are done in their order, too, behind the changes. The loop does them, since the time that passes without
requests has executors sleep as well.

Executors say which weights they have when they are ready. A group that begins with others than it should have, because
an executor began anew, reads them before its first step. Where it cannot, it serves the weights that it started with.
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
    AbortAll,
    AskState,
    CheckWeights,
    Control,
    Controlled,
    FlushCache,
    Pause,
    Resume,
    SleepEngine,
    UpdateWeights,
    WakeEngine,
    WeightsAnswer,
    WriteWeights,
)
from penstock.services.links.link import Link, Peer
from penstock.services.scheduler.tokenizer_clients import TokenizerClients
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

NOT_READY = "the engine is not ready"
SUPERSEDED = "another pause, or a resume, came before it held"
LOST_BEFORE = "an executor ended before anything was written: the weights are what they were"
LOST_WITHIN = "an executor ended while the weights were written: the weights are what they were before"
GROUP_DIFFERS = "its weights are not its group's"
NOT_WOKEN = "the executors do not become ready"
REQUESTS = "{} requests have not ended: end them or hold them with POST /pause before"
INTERNAL = -1  # id of a change that nobody asked for


class Stage(enum.Enum):
    """Of a change."""

    NEW = "new"
    CHECKING = "checking"
    STOPPING = "stopping"
    WRITING = "writing"


@dataclass(slots=True)
class Change:
    """One change, and how far it has come."""

    peer: Peer | None  # who asked; None: nobody
    message: FlushCache | UpdateWeights
    stage: Stage = Stage.NEW
    number: int = 0  # of what executors were asked
    waits_for: set[Peer] = field(default_factory=set)  # executors
    error: str = ""


class OperatorQueue:
    """Owner of what was asked, and of which weights this replica is to have."""

    def __init__(self, clients: TokenizerClients, steps: Link) -> None:
        self._clients = clients
        self._steps = steps
        self._pauses: deque[tuple[Peer, Pause]] = deque()
        self._changes: deque[Change] = deque()
        self._number = 0
        self.path = ""  # of the folder whose weights are served; empty: the one that the server started with
        self.version = FIRST_VERSION
        self._adopted = False  # executors have said what they have
        self._rests: deque[tuple[Peer, SleepEngine | WakeEngine]] = deque()
        self._asleep = False

    @property
    def changing(self) -> bool:
        """Whether anything waits for executors that are awake."""
        return bool(self._changes)

    def take(self, peer: Peer, message: Control, scheduler: Scheduler | None, now: float) -> None:
        """A message of the operator's, perhaps for the second time by another way."""
        if scheduler is None:
            self._clients.answer(peer, Controlled(message.id, NOT_READY))
            return
        match message:
            case Pause():
                self._supersede(message.id)
                scheduler.pause(message.mode, now)
                self._pauses.append((peer, message))
            case Resume():
                self._supersede(message.id)
                scheduler.pause(None, now)
                self._answer(peer, message.id, scheduler)
            case AbortAll():
                scheduler.abort_all(now)
                self._answer(peer, message.id, scheduler)
            case AskState():
                self._answer(peer, message.id, scheduler)
            case SleepEngine() | WakeEngine():
                self._rests = deque(one for one in self._rests if one[1].id != message.id)
                self._rests.append((peer, message))
            case FlushCache() | UpdateWeights():
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
                self._answer(change.peer, change.message.id, scheduler, change.error)

    def rest(self, scheduler: Scheduler, executors: ExecutorGroup[Peer], unfinished: int, now: float) -> Rest | None:
        """Whether the executors are to sleep now, or to wake; what holds already is answered. `unfinished` requests
        have not ended. Called behind `advance`."""
        while self._rests and not self._changes:
            peer, message = self._rests[0]
            self._asleep, error = executors.rest is Rest.ASLEEP, ""
            if isinstance(message, SleepEngine) and not self._asleep:
                if not unfinished or scheduler.paused:
                    return None if scheduler.in_flight else Rest.ASLEEP
                error = REQUESTS.format(unfinished)
            elif isinstance(message, SleepEngine):
                if not executors.all_asleep:
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

    def answered(self, peer: Peer, message: WeightsAnswer) -> None:
        """An executor has looked at a folder, or read it."""
        if self._changes and message.number == self._changes[0].number:
            change = self._changes[0]
            change.waits_for.discard(peer)
            change.error = change.error or message.error

    def begin(self, scheduler: Scheduler, executors: ExecutorGroup[Peer]) -> None:
        """A group is complete; nothing has been planned for it."""
        held = {(ready.weights_path, ready.weight_version) for ready in executors.readies}
        if not self._adopted:
            self._adopted = True
            self.path, self.version = executors.first.weights_path, executors.first.weight_version
        if held != {(self.path, self.version)}:
            scheduler.freeze(frozen=True)
            self._changes.appendleft(Change(None, UpdateWeights(INTERNAL, self.path, self.version)))

    def lost(self, scheduler: Scheduler | None) -> None:
        """The group is no longer complete: what it was asked ends. What has not begun waits for the next one."""
        if not self._changes or self._changes[0].stage is Stage.NEW:
            return
        change = self._changes.popleft()
        assert scheduler is not None, "it has begun"
        scheduler.freeze(frozen=False)
        within = change.stage is Stage.WRITING
        if change.peer is not None:
            self._answer(change.peer, change.message.id, scheduler, LOST_WITHIN if within else LOST_BEFORE)
        elif within:  # the next ones might end of it as well
            logs.error(log, "weights_lost", path=self.path, reason=LOST_WITHIN)
            self.path, self.version = "", FIRST_VERSION

    def _answer(self, peer: Peer, number: int, scheduler: Scheduler, error: str = "") -> None:
        paused = (scheduler.pause_mode or "") if scheduler.paused else ""
        told = Controlled(number, error, scheduler.unfinished, paused, self.version, self._asleep)
        self._clients.answer(peer, told)

    def _supersede(self, number: int) -> None:
        """Answer the pauses that are awaited; one that came before with this number is the same."""
        for peer, pause in self._pauses:
            if pause.id != number:
                self._clients.answer(peer, Controlled(pause.id, SUPERSEDED))
        self._pauses.clear()

    def _step(self, change: Change, scheduler: Scheduler, executors: ExecutorGroup[Peer], now: float) -> bool:
        """Bring a change as far as it comes now; whether it has ended."""
        message = change.message
        if change.stage is Stage.NEW and isinstance(message, UpdateWeights):
            change.stage = Stage.CHECKING
            self._ask(change, executors, CheckWeights(self._next(change), message.path))
        elif change.stage is Stage.NEW:
            change.stage = Stage.STOPPING
            scheduler.freeze(frozen=True)
        if change.stage is Stage.CHECKING and not change.waits_for and isinstance(message, UpdateWeights):
            if change.error or message.check_only:
                self._refused(change, scheduler, executors)
                return True
            change.stage = Stage.STOPPING
            if message.abort:
                scheduler.abort_all(now)
            scheduler.freeze(frozen=True)
        if change.stage is Stage.STOPPING and scheduler.settled:
            if isinstance(message, FlushCache):
                scheduler.forget_computed(now)
                scheduler.freeze(frozen=False)
                return True
            change.stage = Stage.WRITING
            self._ask(change, executors, WriteWeights(self._next(change), message.path, message.version))
        if change.stage is Stage.WRITING and not change.waits_for and isinstance(message, UpdateWeights):
            scheduler.forget_computed(now, encoded=True)
            self.path, self.version = message.path, message.version
            scheduler.freeze(frozen=False)
            logs.info(log, "weights_updated", path=message.path, version=message.version)
            return True
        return False

    def _refused(self, change: Change, scheduler: Scheduler, executors: ExecutorGroup[Peer]) -> None:
        """Nothing was written. What a group should have had, and cannot read again, it is served without: by what all
        of its members began with."""
        if change.error:
            logs.warning(log, "weights_refused", reason=change.error)
        if change.message.id != INTERNAL:
            return
        self.path, self.version = "", FIRST_VERSION
        if {ready.weights_path for ready in executors.readies} == {""}:
            scheduler.freeze(frozen=False)
            return
        for member in executors.peers:
            self._steps.give_up(member, GROUP_DIFFERS)

    def _ask(self, change: Change, executors: ExecutorGroup[Peer], message: CheckWeights | WriteWeights) -> None:
        change.waits_for = set(executors.peers)
        self._steps.send_each(executors.peers, message)

    def _next(self, change: Change) -> int:
        self._number += 1
        change.number = self._number
        return self._number
