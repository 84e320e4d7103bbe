"""The way to a collector, by OpenTelemetry's own exporters: OTLP over HTTP, or over gRPC.

They go by the standard variables for what no option says: headers, certificates, compression, timeout, and they try
again what a collector was too busy to take. Imported where traces are told alone.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from penstock.protocol.messages import TraceContext
from penstock.protocol.version import VERSION
from penstock.services.tracing.clock import Clock
from penstock.services.tracing.names import Kind
from penstock.services.tracing.settings import GRPC, GRPC_MODULE, Settings
from penstock.services.tracing.span import Span, Value
from penstock.services.tracing.tracer import Undelivered

EXPORTERS = "opentelemetry.exporter.otlp.proto"
LOGGERS = (
    f"{EXPORTERS}.http.trace_exporter", f"{EXPORTERS}.grpc.exporter", f"{EXPORTERS}.grpc.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
)  # fmt: skip  # of exporters, which complain of every attempt
KINDS: Mapping[Kind, SpanKind] = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER}


class Reasons(logging.Filter):
    """Keeps the last thing that the exporter of one thread logged, for the one line that is written of it now and then,
    and keeps it out of the log. A program that hosts us may have exporters of its own: what they log passes."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.last = record.getMessage()
        return False


class OtlpCollector:
    """A collector that speaks OTLP, for the thread that makes it. `clock` turns the spans' times into wall time."""

    def __init__(
        self, settings: Settings, resource: Mapping[str, Value], clock: Clock, exporter: SpanExporter | None = None
    ) -> None:
        self._exporter = exporter_of(settings) if exporter is None else exporter
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope("penstock", VERSION)
        self._clock = clock
        self._reasons = Reasons()
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self._reasons)

    def export(self, spans: Sequence[Span]) -> None:
        """Hand spans over; blocks up to the exporter's timeout. Raises Undelivered."""
        self._reasons.last = ""
        if self._exporter.export([readable(span, self._resource, self._scope, self._clock) for span in spans]) is not (
            SpanExportResult.SUCCESS
        ):
            raise Undelivered(self._reasons.last or "it took nothing")

    def close(self) -> None:
        self._exporter.shutdown()
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self._reasons)


def exporter_of(settings: Settings) -> SpanExporter:
    """The one that the settings name. That of gRPC is an extra, so it is imported here alone."""
    if settings.protocol != GRPC:
        return OTLPSpanExporter(endpoint=settings.endpoint)
    module = importlib.import_module(f"{GRPC_MODULE}.trace_exporter")
    exporter: SpanExporter = module.OTLPSpanExporter(endpoint=settings.endpoint, insecure=settings.insecure)
    return exporter


def readable(span: Span, resource: Resource, scope: InstrumentationScope, clock: Clock) -> ReadableSpan:
    """A span as OpenTelemetry's exporters take it."""
    trace, sampled = int(span.parent.trace_id, 16), TraceFlags(TraceFlags.SAMPLED)
    state = TraceState.from_header([span.parent.tracestate]) if span.parent.tracestate else None
    above = span.parent.span_id
    events = [Event(event.name, dict(event.attributes), clock.nanoseconds(event.time)) for event in span.events]
    return ReadableSpan(
        span.name,
        SpanContext(trace, int(span.id, 16), is_remote=False, trace_flags=sampled, trace_state=state),
        SpanContext(trace, int(above, 16), is_remote=span.remote, trace_flags=sampled) if above else None,
        resource,
        dict(span.attributes),
        events,
        [Link(context_of(link)) for link in span.links],
        KINDS[span.kind],
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error or None),
        start_time=clock.nanoseconds(span.start),
        end_time=clock.nanoseconds(span.end),
        instrumentation_scope=scope,
    )


def context_of(context: TraceContext) -> SpanContext:
    """That of a span which one of ours links to."""
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote=True, trace_flags=flags)
