"""W3C Trace Context: of requests' headers, of the environment, and of traces that begin here.

OpenTelemetry's own propagator would have to be imported where traces are off, too: a client's trace id stands in the
log either way. Source: W3C Trace Context, sections 3.2 and 3.3.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from penstock.protocol.messages import TraceContext

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
MAX_TRACEPARENT = 128
MAX_TRACESTATE = 512  # bytes that a participant must propagate; a longer one is left out


def parse(traceparent: str, tracestate: str = "") -> TraceContext:
    """A context from outside; empty when it is not valid, which is never an error."""
    if len(traceparent) > MAX_TRACEPARENT or not TRACEPARENT.fullmatch(traceparent):
        return TraceContext()
    if traceparent.startswith("00") and len(traceparent) != 55:
        return TraceContext()
    return TraceContext(traceparent, tracestate if len(tracestate) <= MAX_TRACESTATE and tracestate.isascii() else "")


def client_context(headers: Mapping[bytes, Sequence[bytes]]) -> TraceContext:
    """The context of a request's headers; empty without a valid one."""
    parents = headers.get(b"traceparent", ())
    if len(parents) != 1:
        return TraceContext()
    states = (value.decode("latin-1").strip() for value in headers.get(b"tracestate", ()))
    return parse(parents[0].decode("latin-1").strip(), ",".join(states))


def root() -> TraceContext:
    """The parent of the first span of a new trace."""
    return TraceContext(f"00-{secrets.token_hex(16)}")


def unsampled() -> TraceContext:
    """A new context of which nothing is recorded: its trace id joins log lines of all processes."""
    return TraceContext(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00")
