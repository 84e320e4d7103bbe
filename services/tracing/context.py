"""W3C trace contexts: what names a trace and the span in it that is the parent. Source: W3C Trace Context, 3.2."""

from __future__ import annotations

import random
import re
import secrets

from penstock.protocol.messages import TraceContext

TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
SAMPLED = "01"
NOT_SAMPLED = "00"
MAX_TRACEPARENT = 128
MAX_TRACESTATE = 512  # bytes that a participant has to carry on; a longer one is left out
RATIO_BITS = 64  # of a trace's id decide whether it is sampled, as OpenTelemetry's TraceIdRatioBased has it


def given(parent: str, state: str = "") -> TraceContext:
    """A context as it came from outside; empty when it is not valid, which is never an error."""
    if len(parent) > MAX_TRACEPARENT or not TRACEPARENT.fullmatch(parent):
        return TraceContext()
    if parent.startswith("00") and len(parent) != 55:
        return TraceContext()
    return TraceContext(parent, state if len(state) <= MAX_TRACESTATE and state.isascii() else "")


def beginning(trace: str) -> TraceContext:
    """What the first span of a trace stands under: nothing."""
    return TraceContext(f"00-{trace}")


def begins(context: TraceContext) -> bool:
    """Whether it is that of a trace which has no span yet."""
    return bool(context.traceparent) and not context.span_id


def joined(trace: str, span: str, *, sampled: bool, state: str = "") -> TraceContext:
    """The context of a span."""
    return TraceContext(f"00-{trace}-{span}-{SAMPLED if sampled else NOT_SAMPLED}", state)


def unsampled() -> TraceContext:
    """A context of its own for what came without one and is not traced: its name joins log lines of all processes."""
    return joined(secrets.token_hex(16), secrets.token_hex(8), sampled=False)


def under(context: TraceContext, span: str) -> TraceContext:
    """The context of a span of ours below `context`, which is sampled."""
    return joined(context.trace_id, span, sampled=True, state=context.tracestate)


class Ids:
    """Names of traces and spans. Owned by one thread."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source if source is not None else random.SystemRandom()
        self._spans = random.Random(self._source.getrandbits(128))  # a span's name is no secret, and there are many

    def trace(self) -> str:
        return f"{self._source.getrandbits(128) or 1:032x}"

    def span(self) -> str:
        return f"{self._spans.getrandbits(64) or 1:016x}"


def chosen(trace: str, ratio: float) -> bool:
    """Whether a new trace of this name is among the share that is sampled. Source: OpenTelemetry SDK,
    "TraceIdRatioBased": every sampler of the same ratio says the same."""
    return int(trace[16:], 16) < round(ratio * (1 << RATIO_BITS))
