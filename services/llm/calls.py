"""Traces of what a program asks of its engine: the caller's trace, where it has one, else one for each request.

Imported where traces are told alone, as OpenTelemetry is.
"""

from __future__ import annotations

from opentelemetry import trace

from penstock.protocol.messages import TraceContext
from penstock.services.tracing.context import joined
from penstock.services.tracing.operation import Operations
from penstock.services.tracing.request import decided
from penstock.services.tracing.startup import PARENT, STATE
from penstock.services.tracing.tracer import Tracer


class Calls:
    """The traces of one program's engine. Owner of the tracer."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self.operations = Operations(tracer, model)

    def context(self, own: TraceContext) -> TraceContext:
        """What a request that brings a context of its `own`, or an empty one, is sent with: that one, else the current
        span's of whoever awaits it, else the beginning of a new trace. Empty: it is not traced."""
        return decided(self._tracer, own if own.traceparent else current()) or TraceContext()

    def environment(self) -> dict[str, str]:
        """Makes the start of the engine's processes part of the program's current span."""
        found = current()
        return {PARENT: found.traceparent, STATE: found.tracestate} if found.sampled else {}

    def finish(self) -> None:
        """Nothing more is asked."""
        self._tracer.finish()

    def close(self) -> None:
        """As `Tracer.close`."""
        self._tracer.close()


def current() -> TraceContext:
    """The context of the caller's current span, by OpenTelemetry's API; empty where none is current."""
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return TraceContext()
    name, own = f"{span.trace_id:032x}", f"{span.span_id:016x}"
    return joined(name, own, sampled=span.trace_flags.sampled, state=span.trace_state.to_header())
