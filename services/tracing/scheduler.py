"""The scheduler's spans: of traced requests, of automata that they wait for, and of some of their steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from penstock.engine_core.scheduling.tracing import Stay, StepFacts
from penstock.protocol.messages import SubmitTokens, TraceContext
from penstock.protocol.steps import StepPlan, StepResult
from penstock.services.tracing import names
from penstock.services.tracing.tracer import Attributes, Event, Tracer, root

MAX_LINKS = 128  # of a span; OpenTelemetry's limit
MAX_CHUNKS = 128  # of a prompt that have a span
LOST = "the executors were lost"
EVENTS: Mapping[str, str] = {
    "preempted": names.PREEMPTED,
    "restarted": names.RESTARTED,
    "abort": names.ABORTED,
}  # by how a stay ends
ERRORS = ("error", "grammar", "unavailable")


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step with a span whose result has not arrived."""

    parent: TraceContext
    context: TraceContext
    planned: float
    facts: StepFacts


class SchedulerTraces:
    """Records the spans; owns those that have not ended."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.enabled = tracer.enabled
        rate = tracer.steps_per_second
        self._interval = 1 / rate if rate else float("inf")  # seconds between steps with a span
        self._next = 0.0 if rate else float("inf")
        self._open: dict[int, OpenStep] = {}  # by step
        self._waiting: dict[int, float] = {}  # by request: since when it waits for its automaton

    def due(self, now: float) -> bool:
        """Whether the next step with a traced request gets a span."""
        return now >= self._next

    def planned(self, plan: StepPlan, facts: StepFacts, now: float) -> StepPlan:
        """Start a step's span; returns the plan with its context, for the executors."""
        self._next = now + self._interval
        for number in [number for number, step in self._open.items() if step.facts.epoch != facts.epoch]:
            self._record_step(self._open.pop(number), now, {}, LOST)  # its epoch is over: no result will come
        parent = root()
        step = self._open[facts.step] = OpenStep(parent, parent.child(), now, facts)
        return msgspec.structs.replace(plan, trace=step.context)

    def applied(self, result: StepResult, now: float) -> None:
        """End a step's span: its result was applied."""
        step = self._open.pop(result.step, None) if self._open else None
        if step is not None and step.facts.epoch == result.epoch:
            times: Attributes = {names.DEVICE_SECONDS: result.busy, names.WAITED_SECONDS: result.waited}
            if result.drafting:
                times[names.DRAFTING_SECONDS] = result.drafting
            self._record_step(step, now, times)

    def wait(self, request: SubmitTokens, now: float) -> None:
        if self._tracer.records(request.trace):
            self._waiting[request.id] = now

    def admit(self, request: SubmitTokens, now: float, error: str | None) -> None:
        if (since := self._waiting.pop(request.id, None)) is not None:
            attributes: Attributes = {names.REQUEST: f"{request.id:x}"}
            self._tracer.record(names.PREPARE_GRAMMAR, request.trace, since, now, attributes, error=error)

    def record(self, stays: Iterable[Stay]) -> None:
        for stay in stays:
            record_stay(self._tracer, stay)

    def _record_step(self, step: OpenStep, now: float, times: Attributes, error: str | None = None) -> None:
        facts = step.facts
        attributes: Attributes = {
            names.STEP_NUMBER: facts.step, names.EPOCH: facts.epoch, names.BATCH: facts.rows,
            names.STEP_TOKENS: facts.tokens, names.STEP_CHUNKS: facts.chunks, names.STEP_DRAFTS: facts.drafts,
            names.STEP_MASKED: facts.masked, names.RUNNING: facts.running, names.WAITING: facts.waiting,
            names.BLOCKS: facts.blocks, names.BLOCKS_USED: facts.blocks_used, **times,
        }  # fmt: skip
        if len(facts.traced) > MAX_LINKS:
            attributes[names.UNLINKED] = len(facts.traced) - MAX_LINKS
        self._tracer.record(names.STEP, step.parent, step.planned, now, attributes, context=step.context,
                            links=facts.traced[:MAX_LINKS], error=error)  # fmt: skip


def record_stay(tracer: Tracer, stay: Stay) -> None:
    """A sequence's stay in the scheduler: its wait, the chunks of its prompt, its decoding. All spans are children of
    the api's, so that none is orphaned when a process dies before it exports."""
    common: Attributes = {names.REQUEST: f"{stay.request:x}", names.CHOICE: stay.sequence}
    end: Attributes = common | {names.END: stay.end}
    ended: list[Event] = [(EVENTS[stay.end], stay.left, {})] if stay.end in EVENTS else []
    error = stay.end if stay.end in ERRORS else None
    record, parent = tracer.record, stay.trace
    if stay.entered is None:
        record(names.QUEUE, parent, stay.queued, stay.left, end, events=ended, error=error)
        return
    record(names.QUEUE, parent, stay.queued, stay.entered, common)
    for chunk in stay.chunks[:MAX_CHUNKS]:  # the steps overlap: a chunk is planned while the one before it runs
        record(names.PREFILL, parent, chunk.planned, chunk.applied, {
            **common, names.PROMPT_TOKENS: stay.prompt_tokens, names.REUSED_TOKENS: stay.reused,
            names.CHUNK_START: chunk.start, names.CHUNK_TOKENS: chunk.count, names.STEP_NUMBER: chunk.step,
        })  # fmt: skip
    if stay.decoding is not None:
        events: list[Event] = [(names.FIRST_TOKEN, stay.decoding, {})] if stay.first else []
        events += [(names.TOKENS, time, {names.TOKENS_SO_FAR: tokens}) for time, tokens in stay.marks]
        record(names.DECODE, parent, stay.decoding, stay.left, {
            **end, names.OUTPUT_TOKENS: stay.tokens,
            names.ACCEPTED_DRAFTS: stay.accepted, names.REJECTED_DRAFTS: stay.rejected,
        }, events=[*events, *ended], error=error)  # fmt: skip
    elif ended or error:  # during a chunk
        began = stay.chunks[-1].applied if stay.chunks else stay.entered
        record(names.PREFILL, parent, began, stay.left, end, events=ended, error=error)
