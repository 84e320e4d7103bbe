"""An executor's spans: chunks of traced prompts, periods of decoding, and the steps that have a span.

Decoding costs nothing per token: totals over steps are noted when a slot starts to decode and when it stops.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.protocol.messages import TraceContext
from penstock.protocol.step_columns import chunk_table, integers
from penstock.protocol.steps import StepPlan, StepResult
from penstock.services.tracing import names
from penstock.services.tracing.tracer import Attributes, Tracer

QUIET = 0.2  # seconds without a step after which a slot's decoding has ended


class Totals(NamedTuple):
    """Sums over all steps, in seconds; the difference of two is a period's."""

    steps: int = 0
    busy: float = 0.0
    masks: float = 0.0


@dataclass(slots=True)
class Occupant:
    """A traced sequence in a slot, and its decoding since its last span."""

    trace: TraceContext
    choice: int
    since: float | None = None  # start of its first step
    until: float = 0.0  # result of its last step, once it has paused
    before: Totals | None = None  # when it resumed decoding; None: it does not decode
    taken: Totals = field(default_factory=Totals)  # by its decoding until it last paused

    def resume(self, began: float, totals: Totals) -> None:
        if self.since is None:
            self.since = began
        self.before = totals

    def pause(self, now: float, totals: Totals) -> None:
        if self.before is not None:
            taken, before = self.taken, self.before
            self.taken = Totals(taken.steps + totals.steps - before.steps, taken.busy + totals.busy - before.busy,
                                taken.masks + totals.masks - before.masks)  # fmt: skip
            self.until, self.before = now, None


@dataclass(slots=True)
class InFlight:
    """A step between its plan and its result, and what the result will affect."""

    plan: StepPlan
    began: float
    chunks: list[tuple[Occupant, int, int]] = field(default_factory=list)  # start, count
    resumed: list[Occupant] = field(default_factory=list)  # decode from this step on
    paused: list[Occupant] = field(default_factory=list)  # decode until this step
    waited: float = 0.0  # seconds for its masks


class ExecutorTraces:
    """Records what traced requests do in this executor's slots. Plans and their results arrive in order.

    A slot that leaves the decode set may return with the next plan, so its period of decoding is recorded only after
    QUIET seconds, or when the slot has another occupant.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._slots: dict[int, Occupant] = {}
        self._decoding: set[int] = set()  # slots of these that decode
        self._in_flight: deque[InFlight] = deque()
        self._totals = Totals()
        self._collected = 0.0  # arrival of the last result
        self._rested = False  # no step for a while, and all decoding was paused
        self._leaving: list[Occupant] = []  # replaced in their slots; their last step may be in flight

    def begin(self, plan: StepPlan, now: float) -> None:
        if not (self._slots or plan.trace) and not (plan.starts and self._tracer.enabled):
            return
        step = InFlight(plan, now)
        for slot in (*integers(plan.decode_off).tolist(), *(start.slot for start in plan.starts)):
            if slot in self._decoding:
                self._decoding.discard(slot)
                self._pause(self._slots[slot])
        for start in plan.starts:
            occupant = self._slots.pop(start.slot, None)
            if occupant is not None:
                self._leaving.append(occupant)
            if start.trace.sampled:
                self._slots[start.slot] = Occupant(start.trace, start.choice)
        on = {slot for slot in integers(plan.decode_on).tolist() if slot in self._slots}
        self._decoding |= on
        step.resumed = [self._slots[slot] for slot in (self._decoding if self._rested else on)]
        self._rested = False
        for slot, first, count, _ in chunk_table(plan.chunks).tolist():
            if (occupant := self._slots.get(slot)) is not None:
                step.chunks.append((occupant, first, count))
        self._in_flight.append(step)

    def masked(self, number: int, seconds: float) -> None:
        for step in self._in_flight:
            if step.plan.step == number:
                step.waited = seconds

    def collect(self, result: StepResult, now: float) -> None:
        while self._in_flight and self._in_flight[0].plan.step != result.step:
            self._in_flight.popleft()  # its bitmasks never arrived
        if not self._in_flight:
            return
        step = self._in_flight.popleft()
        for occupant in step.resumed:
            occupant.resume(step.began, self._totals)
        totals = self._totals
        self._totals = Totals(totals.steps + 1, totals.busy + result.busy, totals.masks + step.waited)
        self._collected = now
        plan, record = step.plan, self._tracer.record
        for occupant, start, count in step.chunks:
            record(names.EXECUTE_PREFILL, occupant.trace, step.began, now, {
                names.CHOICE: occupant.choice, names.CHUNK_START: start, names.CHUNK_TOKENS: count,
                names.STEP_NUMBER: plan.step, names.DEVICE_SECONDS: result.busy, names.MASK_SECONDS: step.waited,
            })  # fmt: skip
        for occupant in step.paused:
            occupant.pause(now, self._totals)
        for occupant in self._leaving:
            self._record_decode(occupant)
        self._leaving = [occupant for occupant in self._leaving if occupant.before is not None]
        if plan.trace is not None:
            record(names.EXECUTE_STEP, plan.trace, step.began, now, {
                names.STEP_NUMBER: plan.step, names.EPOCH: plan.epoch, names.BATCH: len(integers(result.token_ids)),
                names.STEP_CHUNKS: len(chunk_table(plan.chunks)), names.STEP_DRAFTS: len(integers(plan.draft_ids)),
                names.DEVICE_SECONDS: result.busy, names.WAITED_SECONDS: result.waited,
                names.MASK_SECONDS: step.waited,
            })  # fmt: skip

    def tick(self, now: float) -> None:
        """Called now and then: records the decoding of slots that have been quiet."""
        if not self._in_flight and now - self._collected >= QUIET:
            self._rested = True
            for occupant in self._slots.values():
                occupant.pause(self._collected, self._totals)
        for occupant in self._slots.values():
            if now - occupant.until >= QUIET:
                self._record_decode(occupant)

    def forget(self) -> None:
        """The slots are empty: the scheduler has changed, or a new epoch begins."""
        for occupant in (*self._slots.values(), *self._leaving):
            occupant.pause(self._collected, self._totals)
            self._record_decode(occupant)
        self._in_flight.clear()
        self._slots.clear()
        self._leaving.clear()
        self._decoding.clear()

    def _pause(self, occupant: Occupant) -> None:
        """Its last decoding step is the one that began last."""
        if self._in_flight:
            self._in_flight[-1].paused.append(occupant)
        else:
            occupant.pause(self._collected, self._totals)

    def _record_decode(self, occupant: Occupant) -> None:
        """Record its decoding until its last pause, unless it decodes now."""
        if occupant.since is None or occupant.before is not None or not occupant.taken.steps:
            return
        attributes: Attributes = {
            names.CHOICE: occupant.choice, names.STEPS: occupant.taken.steps,
            names.DEVICE_SECONDS: occupant.taken.busy, names.MASK_SECONDS: occupant.taken.masks,
        }  # fmt: skip
        self._tracer.record(names.EXECUTE_DECODE, occupant.trace, occupant.since, occupant.until, attributes)
        occupant.since, occupant.taken = None, Totals()
