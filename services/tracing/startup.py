"""A start as a trace: the launcher's span, below it each process's, below that its phases.

A process finds the context in its environment, as OpenTelemetry's "Environment Variables as Context Propagation
Carriers" names it, so a start may be part of a larger trace. One without a launcher begins a trace of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from penstock.protocol.messages import TraceContext
from penstock.services.supervisor.process import StartupPhases
from penstock.services.tracing import names
from penstock.services.tracing.propagation import parse, root
from penstock.services.tracing.tracer import Attributes, Tracer

PARENT, STATE = "TRACEPARENT", "TRACESTATE"


def environment(context: TraceContext) -> dict[str, str]:
    """Variables that make the starts of children part of this context."""
    told = {PARENT: context.traceparent, STATE: context.tracestate}
    return {name: value for name, value in told.items() if value}


class Start:
    """The span of one process's start, whatever the share of traced requests is."""

    def __init__(
        self, tracer: Tracer, process: str, phases: StartupPhases, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.phases = phases
        self._tracer = tracer
        self._process = process
        given = environ.get(PARENT, "")
        known = parse(given, environ.get(STATE, "")) if len(given) == 55 else TraceContext()
        self._parent = known if known.traceparent else root()
        self.context = self._parent.child() if tracer.enabled else TraceContext()
        self._recorded = False

    def ready(self, now: float, attributes: Attributes | None = None) -> None:
        """The process takes work. Only the first call counts."""
        if self._recorded or not self._tracer.enabled:
            return
        self._recorded = True
        record, phases = self._tracer.record, self.phases.all
        record(f"{names.START} {self._process}", self._parent, phases[0].began, now, attributes or {},
               context=self.context, remote=not self._parent.is_root)  # fmt: skip
        for phase, end in zip(phases, [*(phase.began for phase in phases[1:]), now], strict=True):
            record(phase.name, self.context, phase.began, end, {})
