"""A start as a trace: the launcher's span, below it each process's, below that its stages.

A process learns the context from its environment, as OpenTelemetry's "Environment Variables as Context Propagation
Carriers" names it; so a start may be part of a larger one. One without a launcher begins a trace of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from penstock.protocol.messages import TraceContext
from penstock.services.supervisor.process import StartupPhase, StartupPhases
from penstock.services.tracing import names
from penstock.services.tracing.context import TRACEPARENT, beginning, under
from penstock.services.tracing.span import Attributes, Span
from penstock.services.tracing.tracer import Tracer

PARENT, STATE = "TRACEPARENT", "TRACESTATE"


class Start:
    """The span of one process's start. It is told whatever the share of traced requests is: there is one."""

    def __init__(self, tracer: Tracer, environ: Mapping[str, str] = os.environ) -> None:
        self._tracer = tracer
        given = environ.get(PARENT, "")
        known = len(given) == 55 and TRACEPARENT.fullmatch(given)
        self._parent = TraceContext(given, environ.get(STATE, "")) if known else beginning(tracer.ids.trace())
        self._remote = bool(known)
        self._id = tracer.ids.span()
        self.context = under(self._parent, self._id)

    def environment(self) -> dict[str, str]:
        """What makes the starts of children part of this one."""
        told = {PARENT: self.context.traceparent, STATE: self.context.tracestate}
        return {name: value for name, value in told.items() if value}

    def ready(self, process: str, stages: Sequence[StartupPhase], now: float, attributes: Attributes) -> None:
        """The process takes work. Called once."""
        tracer = self._tracer
        tracer.tell(Span(
            parent=self._parent, id=self._id, name=f"{names.START} {process}", start=stages[0].began, end=now,
            remote=self._remote, attributes=attributes,
        ))  # fmt: skip
        ends = [*(stage.began for stage in stages[1:]), now]
        for stage, end in zip(stages, ends, strict=True):
            tracer.tell(Span(parent=self.context, id=tracer.ids.span(), name=stage.name, start=stage.began, end=end))


class OwnStart:
    """The start of a process that has no children: its stages, told once, when it is ready for the first time."""

    def __init__(self, tracer: Tracer | None, process: str, stages: StartupPhases) -> None:
        self.stages = stages
        self._process = process
        self._start = Start(tracer) if tracer is not None else None

    def ready(self, now: float) -> None:
        """It takes work. Called again, nothing happens; nor where no traces are told."""
        start, self._start = self._start, None
        if start is not None:
            start.ready(self._process, self.stages.all, now, {})
