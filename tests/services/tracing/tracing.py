"""A tracer that keeps what it is told, for tests of who tells."""

from __future__ import annotations

from typing import Any

from penstock.protocol.messages import TraceContext
from penstock.services.tracing.clock import Clock
from penstock.services.tracing.context import joined
from penstock.services.tracing.settings import HTTP, Sampling, Settings
from penstock.services.tracing.span import Span
from penstock.services.tracing.tracer import Tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = joined(TRACE, PARENT, sampled=True, state="a=1")
UNSAMPLED = joined(TRACE, PARENT, sampled=False)


class Kept:
    """Takes what is exported."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def export(self, spans: Any) -> None:
        self.spans += spans

    def close(self) -> None:
        """Nothing is open."""


def settings(**given: Any) -> Settings:
    fields: dict[str, Any] = {"endpoint": "http://c:4318/v1/traces", "protocol": HTTP, "sampling": Sampling(1.0),
                              "service": "penstock", "steps_per_second": 10.0, "tokens_per_event": 4}  # fmt: skip
    return Settings(**fields | given)


class Bench:
    """A tracer and what came of it."""

    def __init__(self, **given: Any) -> None:
        self._kept = Kept()
        self.tracer = Tracer(settings(**given), {}, Clock(0), self._kept)

    def told(self) -> list[Span]:
        """All spans, in their order; the tracer is closed."""
        self.tracer.close(60.0)
        return self._kept.spans


def named(spans: list[Span], name: str) -> Span:
    (found,) = [span for span in spans if span.name == name]
    return found


def events(span: Span) -> list[str]:
    return [event.name for event in span.events]


def child_of(span: Span, parent: TraceContext) -> bool:
    return span.parent.traceparent == parent.traceparent
