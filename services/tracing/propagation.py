"""W3C trace context: from a request's headers, and as it goes on to the engine. Source: W3C Trace Context, sections 3.2
and 3.3, and for the response's header "Trace Context Level 2", section 4."""

from __future__ import annotations

from starlette.types import Scope

from penstock.protocol.messages import TraceContext
from penstock.services.http import request_context as exchange
from penstock.services.tracing.context import given


def trace_context(scope: Scope) -> TraceContext:
    """What the requests of this exchange carry on: its span where it is traced, else what came with it."""
    return exchange.of(scope).context


def client_context(scope: Scope) -> TraceContext:
    """The context as it came; empty when there is none or it is not valid, which is never an error."""
    parents = []
    states = []
    for name, value in scope["headers"]:
        if name == b"traceparent":
            parents.append(value.decode("latin-1").strip())
        elif name == b"tracestate":
            states.append(value.decode("latin-1").strip())
    return given(parents[0], ",".join(states)) if len(parents) == 1 else TraceContext()


def response_header(context: TraceContext) -> tuple[bytes, bytes]:
    """Tells the client the name of a trace that is told, and of the exchange's span in it."""
    return b"traceresponse", context.traceparent.encode()
