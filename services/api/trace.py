"""W3C trace context from a request's headers. Source: W3C Trace Context, sections 3.2 and 3.3."""

from __future__ import annotations

import re

from starlette.types import Scope

from protocol.messages import TraceContext

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
MAX_TRACEPARENT = 128
MAX_TRACESTATE = 512  # bytes that a participant has to carry on; a longer one is left out


def trace_context(scope: Scope) -> TraceContext:
    """The context as it came; empty when there is none or it is not valid, which is never an error."""
    parents = []
    states = []
    for name, value in scope["headers"]:
        if name == b"traceparent":
            parents.append(value.decode("latin-1").strip())
        elif name == b"tracestate":
            states.append(value.decode("latin-1").strip())
    if len(parents) != 1 or len(parents[0]) > MAX_TRACEPARENT or not TRACEPARENT.fullmatch(parents[0]):
        return TraceContext()
    if parents[0].startswith("00") and len(parents[0]) != 55:
        return TraceContext()
    state = ",".join(states)
    return TraceContext(parents[0], state if len(state) <= MAX_TRACESTATE and state.isascii() else "")


def trace_id(context: TraceContext) -> str:
    """The trace's own name, 32 hexadecimal digits; empty without one."""
    return context.traceparent[3:35]
