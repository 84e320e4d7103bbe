"""A tracer whose spans stay here, for tests of what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from penstock.protocol.messages import TraceContext
from penstock.services.tracing.otlp import OtlpTracer
from penstock.services.tracing.tracer import Settings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = TraceContext(f"00-{TRACE}-{PARENT}-01", "a=1")
UNSAMPLED = TraceContext(f"00-{TRACE}-{PARENT}-00")
ROOT = TraceContext(f"00-{TRACE}")


class InMemoryExporter(SpanExporter):
    """Takes what is exported."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


class Event(NamedTuple):
    name: str
    time: float
    attributes: dict[str, Any]


class Span(NamedTuple):
    """A span as it was recorded, with times in monotonic seconds."""

    name: str
    parent: TraceContext
    id: str
    start: float
    end: float
    attributes: dict[str, Any]
    events: list[Event]
    links: tuple[TraceContext, ...]
    error: str | None
    server: bool
    remote: bool


def settings(**given: Any) -> Settings:
    return Settings(**{"endpoint": "http://c:4318/v1/traces", "steps_per_second": 10.0} | given)


class Bench:
    """A tracer and the spans that it exported."""

    def __init__(self, **given: Any) -> None:
        self._exporter = InMemoryExporter()
        self.tracer = OtlpTracer(settings(**given), {}, self._exporter)

    def spans(self) -> list[Span]:
        """All spans, in their order; the tracer is closed."""
        self.tracer.close(60.0)
        return [self._read(span) for span in self._exporter.spans]

    def _read(self, span: ReadableSpan) -> Span:
        assert span.context is not None
        assert span.attributes is not None
        parent = TraceContext(f"00-{span.context.trace_id:032x}") if span.parent is None else context_of(span.parent)
        failed = span.status.status_code is StatusCode.ERROR
        return Span(
            span.name, parent, f"{span.context.span_id:016x}", self._seconds(span.start_time),
            self._seconds(span.end_time), dict(span.attributes),
            [Event(event.name, self._seconds(event.timestamp), dict(event.attributes or {})) for event in span.events],
            tuple(context_of(link.context) for link in span.links), (span.status.description or "") if failed else None,
            span.kind is SpanKind.SERVER, span.parent is not None and span.parent.is_remote,
        )  # fmt: skip

    def _seconds(self, wall: int | None) -> float:
        assert wall is not None
        return round((wall - self.tracer._offset) / 1e9, 6)


def context_of(context: SpanContext) -> TraceContext:
    name = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return TraceContext(name, context.trace_state.to_header())


def named(spans: list[Span], name: str) -> Span:
    (found,) = [span for span in spans if span.name == name]
    return found


def events(span: Span) -> list[str]:
    return [event.name for event in span.events]


def child_of(span: Span, parent: TraceContext) -> bool:
    return span.parent.traceparent == parent.traceparent
