"""The scheduler's spans: of traced requests, of grammars that they wait for, of some of the steps that they are in."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.engine_core.scheduling.history import Stay, StepFacts
from penstock.protocol.messages import SubmitTokens, TraceContext
from penstock.protocol.steps import StepPlan, StepResult
from penstock.services.tracing import names
from penstock.services.tracing.context import beginning, under
from penstock.services.tracing.span import MOST_LINKS, Attributes, Span
from penstock.services.tracing.stays import stay_spans
from penstock.services.tracing.tracer import Tracer

LOST = "the executors were lost"


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step that has a span and whose result has not come."""

    id: str
    parent: TraceContext
    planned: float
    facts: StepFacts


class SchedulerTraces:
    """Owner of the spans that have not ended."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        rate = tracer.settings.steps_per_second
        self._pause = 1 / rate if rate else float("inf")  # seconds between steps that have a span
        self._next = 0.0 if rate else float("inf")
        self._open: dict[int, OpenStep] = {}  # by step
        self._prepared: dict[int, float] = {}  # since when a request waits for its automaton

    def due(self, now: float) -> bool:
        """Whether the next step with a traced request in it gets a span."""
        return now >= self._next

    def planned(self, plan: StepPlan, facts: StepFacts, now: float) -> StepPlan:
        """A step that gets a span: the plan as the executors are to have it."""
        self._next = now + self._pause
        self._forget(facts.epoch, now)
        ids = self._tracer.ids
        parent = beginning(ids.trace())
        step = OpenStep(ids.span(), parent, now, facts)
        self._open[facts.step] = step
        return msgspec.structs.replace(plan, trace=under(parent, step.id))

    def applied(self, result: StepResult, now: float) -> None:
        """A result was applied."""
        step = self._open.pop(result.step, None) if self._open else None
        if step is not None and step.facts.epoch == result.epoch:
            times = {names.DEVICE_SECONDS: result.busy, names.WAITED_SECONDS: result.waited}
            times |= {names.DRAFTING_SECONDS: result.drafting} if result.drafting else {}
            self._tell(step, now, times)

    def tell(self, stays: list[Stay]) -> None:
        """What traced requests have been through."""
        for stay in stays:
            for span in stay_spans(stay, self._tracer.ids):
                self._tracer.tell(span)

    def wait(self, request: SubmitTokens, now: float) -> None:
        """It waits for its automaton."""
        if request.trace.sampled:
            self._prepared[request.id] = now

    def admit(self, request: SubmitTokens, now: float, error: str | None) -> None:
        """It waits no longer."""
        since = self._prepared.pop(request.id, None)
        if since is not None:
            self._tracer.tell(Span(
                parent=request.trace, id=self._tracer.ids.span(), name=names.PREPARE_GRAMMAR, start=since, end=now,
                attributes={names.REQUEST: f"{request.id:x}"}, error=error,
            ))  # fmt: skip

    def _forget(self, epoch: int, now: float) -> None:
        """Steps of an epoch that is over have no result."""
        for number in [number for number, step in self._open.items() if step.facts.epoch != epoch]:
            self._tell(self._open.pop(number), now, {}, LOST)

    def _tell(self, step: OpenStep, now: float, times: Attributes, error: str | None = None) -> None:
        facts = step.facts
        attributes = {
            names.STEP_NUMBER: facts.step, names.EPOCH: facts.epoch, names.BATCH: facts.rows,
            names.STEP_TOKENS: facts.tokens, names.STEP_CHUNKS: facts.chunks, names.STEP_DRAFTS: facts.drafts,
            names.STEP_MASKED: facts.masked, names.RUNNING: facts.running, names.WAITING: facts.waiting,
            names.BLOCKS: facts.blocks, names.BLOCKS_USED: facts.blocks_used, **times,
        }  # fmt: skip
        if len(facts.traced) > MOST_LINKS:
            attributes[names.UNLINKED] = len(facts.traced) - MOST_LINKS
        self._tracer.tell(Span(
            parent=step.parent, id=step.id, name=names.STEP, start=step.planned, end=now, attributes=attributes,
            links=facts.traced[:MOST_LINKS], error=error,
        ))  # fmt: skip
