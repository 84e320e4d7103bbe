"""An executor's spans: what traced requests ran of prompts, how long they decoded, and the steps that have a span.

Decoding costs nothing per token: the executor's sums are noted when a slot begins to decode and when it ends.
"""

from __future__ import annotations

import array
from collections import deque
from dataclasses import dataclass, field

from penstock.protocol.messages import TraceContext
from penstock.protocol.steps import StepPlan, StepResult
from penstock.services.tracing import names
from penstock.services.tracing.span import Attributes, Span
from penstock.services.tracing.tracer import Tracer

CALM = 0.2  # seconds without work after which whoever still decodes does so no longer: nobody plans for it


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals over steps, of which the difference is what somebody's steps took. In seconds."""

    steps: int = 0
    busy: float = 0.0
    masks: float = 0.0

    def plus(self, now: Sums, before: Sums) -> Sums:
        """With what was added between two moments."""
        return Sums(self.steps + now.steps - before.steps, self.busy + now.busy - before.busy,
                    self.masks + now.masks - before.masks)  # fmt: skip


@dataclass(slots=True)
class Occupant:
    """A traced request in a slot, and its decoding since that was last told."""

    trace: TraceContext
    choice: int
    since: float | None = None  # when its first step began
    until: float = 0.0  # when its last step's result came, once it has paused
    before: Sums | None = None  # when it went on decoding; None: it does not decode
    taken: Sums = Sums()  # by what it decoded until it last paused

    def go_on(self, began: float, sums: Sums) -> None:
        if self.since is None:
            self.since = began
        self.before = sums

    def pause(self, now: float, sums: Sums) -> None:
        if self.before is not None:
            self.taken = self.taken.plus(sums, self.before)
            self.until, self.before = now, None


@dataclass(slots=True)
class Flight:
    """A step between its plan and its result, with what is to be noted once that has come."""

    step: int
    began: float
    plan: StepPlan
    chunks: list[tuple[Occupant, int, int]] = field(default_factory=list)  # start, count
    starts: list[Occupant] = field(default_factory=list)  # decode from it on
    pauses: list[Occupant] = field(default_factory=list)  # decode no more behind it
    waited: float = 0.0  # seconds for its masks


class ExecutionTraces:
    """What traced requests do in this executor's slots. Each plan is begun, and its result collected, in order.

    A slot that is taken out of the decode set may come back with the next plan, so its stretch is told when it has
    stood still for a moment, or belongs to somebody else.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._slots: dict[int, Occupant] = {}
        self._decoding: set[int] = set()  # of those slots
        self._flights: deque[Flight] = deque()
        self._sums = Sums()
        self._collected = 0.0  # when the last result came
        self._rested = False  # nothing was done for a while, and whoever decoded was told
        self._leaving: list[Occupant] = []  # their slots are somebody else's, their last step may be in flight

    def begin(self, plan: StepPlan, now: float) -> None:
        """A plan is about to be launched."""
        if not (self._slots or plan.starts or plan.trace):
            return
        flight = Flight(plan.step, now, plan)
        for slot in (*integers(plan.decode_off), *(start.slot for start in plan.starts)):
            if slot in self._decoding:
                self._decoding.discard(slot)
                self._pause(self._slots[slot])
        for start in plan.starts:
            occupant = self._slots.pop(start.slot, None)
            if occupant is not None:
                self._leaving.append(occupant)
            if start.trace.sampled:
                self._slots[start.slot] = Occupant(start.trace, start.choice)
        on = {slot for slot in integers(plan.decode_on) if slot in self._slots}
        self._decoding |= on
        flight.starts = [self._slots[slot] for slot in (self._decoding if self._rested else on)]
        self._rested = False
        table = integers(plan.chunks)
        for slot, first, count in zip(table[::4], table[1::4], table[2::4], strict=True):
            if (occupant := self._slots.get(slot)) is not None:
                flight.chunks.append((occupant, first, count))
        self._flights.append(flight)

    def masked(self, step: int, seconds: float) -> None:
        """A step has waited for its masks."""
        for flight in self._flights:
            if flight.step == step:
                flight.waited = seconds

    def collect(self, result: StepResult, now: float) -> None:
        """The result of a step has come."""
        while self._flights and self._flights[0].step != result.step:
            self._flights.popleft()  # its masks never came
        if not self._flights:
            return
        flight = self._flights.popleft()
        for occupant in flight.starts:
            occupant.go_on(flight.began, self._sums)
        sums = self._sums
        self._sums = Sums(sums.steps + 1, sums.busy + result.busy, sums.masks + flight.waited)
        self._collected = now
        for occupant, start, count in flight.chunks:
            attributes = {
                names.CHOICE: occupant.choice, names.CHUNK_START: start, names.CHUNK_TOKENS: count,
                names.STEP_NUMBER: flight.step, names.DEVICE_SECONDS: result.busy, names.MASK_SECONDS: flight.waited,
            }  # fmt: skip
            self._tell(occupant.trace, names.EXECUTE_PREFILL, flight.began, now, attributes)
        for occupant in flight.pauses:
            occupant.pause(now, self._sums)
        if self._leaving:
            self._leave()
        if flight.plan.trace is not None:
            self._step(flight, flight.plan.trace, result, now)

    def tick(self, now: float) -> None:
        """Called now and then: tell of those who have not decoded for a moment."""
        if not self._flights and now - self._collected >= CALM:
            self._rested = True
            for occupant in self._slots.values():
                occupant.pause(self._collected, self._sums)
        for occupant in self._slots.values():
            if occupant.since is not None and occupant.before is None and now - occupant.until >= CALM:
                self._decoded(occupant)

    def forget(self) -> None:
        """The slots are empty: a scheduler has come or gone, or a new epoch begins."""
        for occupant in (*self._slots.values(), *self._leaving):
            occupant.pause(self._collected, self._sums)
            self._decoded(occupant)
        self._flights.clear()
        self._slots.clear()
        self._leaving.clear()
        self._decoding.clear()

    def _leave(self) -> None:
        """Tell of those whose slots are somebody else's, as soon as their last step is known."""
        staying = []
        for occupant in self._leaving:
            if occupant.before is None:
                self._decoded(occupant)
            else:
                staying.append(occupant)
        self._leaving = staying

    def _pause(self, occupant: Occupant) -> None:
        """The last step that it decodes in is the one begun last."""
        if self._flights:
            self._flights[-1].pauses.append(occupant)
        else:
            occupant.pause(self._collected, self._sums)

    def _decoded(self, occupant: Occupant) -> None:
        """Tell of its decoding up to its last pause."""
        if occupant.since is None or not occupant.taken.steps:
            return
        attributes = {
            names.CHOICE: occupant.choice, names.STEPS: occupant.taken.steps,
            names.DEVICE_SECONDS: occupant.taken.busy, names.MASK_SECONDS: occupant.taken.masks,
        }  # fmt: skip
        self._tell(occupant.trace, names.EXECUTE_DECODE, occupant.since, occupant.until, attributes)
        occupant.since, occupant.taken = None, Sums()

    def _step(self, flight: Flight, parent: TraceContext, result: StepResult, now: float) -> None:
        plan = flight.plan
        attributes = {
            names.STEP_NUMBER: plan.step, names.EPOCH: plan.epoch, names.BATCH: len(result.token_ids) // 4,
            names.STEP_CHUNKS: len(plan.chunks) // 16, names.STEP_DRAFTS: len(plan.draft_ids) // 4,
            names.DEVICE_SECONDS: result.busy, names.WAITED_SECONDS: result.waited,
            names.MASK_SECONDS: flight.waited,
        }  # fmt: skip
        self._tell(parent, names.EXECUTE_STEP, flight.began, now, attributes)

    def _tell(self, parent: TraceContext, name: str, start: float, end: float, attributes: Attributes) -> None:
        tracer = self._tracer
        tracer.tell(Span(parent=parent, id=tracer.ids.span(), name=name, start=start, end=end, attributes=attributes))


def integers(data: bytes) -> array.array[int]:
    """Numbers of a column."""
    found = array.array("i")
    found.frombytes(data)
    return found
