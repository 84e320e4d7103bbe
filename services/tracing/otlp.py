"""The tracer that exports: OpenTelemetry's sampler, batch processor and OTLP exporters, over HTTP or gRPC.

Serving never waits for a collector: a full queue drops spans, and a failed export loses them. The end of a process
waits for LAST_WORDS at most.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Unpack

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from penstock.protocol.errors import ConfigError
from penstock.protocol.messages import TraceContext
from penstock.protocol.version import VERSION
from penstock.services.supervisor import logs
from penstock.services.tracing.tracer import (
    GRPC,
    GRPC_MODULE,
    LAST_WORDS,
    Attributes,
    Settings,
    SpanOptions,
    Tracer,
    TraceStatistics,
    Value,
    root,
)

log = logging.getLogger(__name__)


class CountingExporter(SpanExporter):
    """Counts what an exporter is given and delivers, on the processor's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.taken = self.delivered = self.dropped = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.delivered += len(spans)
        else:
            self.dropped += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class OtlpTracer(Tracer):
    """Exports the spans of all threads of a process."""

    enabled = True

    def __init__(self, settings: Settings, resource: Mapping[str, Value], exporter: SpanExporter | None = None) -> None:
        self.steps_per_second = settings.steps_per_second
        sampler = None if settings.ratio is None else ParentBased(TraceIdRatioBased(settings.ratio))
        provider = TracerProvider(sampler, Resource.create(dict(resource)), shutdown_on_exit=False)
        self._sampler, self._resource = provider.sampler, provider.resource
        self._scope = InstrumentationScope("penstock", VERSION)
        self._exporter = CountingExporter(exporter_of(settings) if exporter is None else exporter)
        delay = None if settings.delay is None else settings.delay * 1000
        try:
            self._processor = BatchSpanProcessor(self._exporter, settings.queue, delay)
        except ValueError as error:  # of a variable
            raise ConfigError("OTEL_BSP_MAX_QUEUE_SIZE", settings.queue, str(error)) from None
        self._queue = settings.queue
        self._recorded, self._lost = 0, 0  # the latter by a full queue, or the end of the process
        self._lock = threading.Lock()  # of these
        self._offset = wall_offset()
        self._shutdown: threading.Thread | None = None

    def records(self, context: TraceContext) -> bool:
        return context.sampled or context.is_root

    def sample(self, context: TraceContext) -> TraceContext | None:
        parent, known = context, Context()
        if context.traceparent:
            span = api.NonRecordingSpan(span_context(context, sampled=context.sampled, remote=True))
            known = api.set_span_in_context(span, known)
        else:
            parent = root()
        decision = self._sampler.should_sample(known, int(parent.trace_id, 16), "request").decision
        return parent if decision is Decision.RECORD_AND_SAMPLE else None

    @staticmethod
    def current() -> TraceContext:
        span = api.get_current_span().get_span_context()
        if not span.is_valid:
            return TraceContext()
        flags, state = span.trace_flags.sampled, span.trace_state.to_header()
        return TraceContext(f"00-{span.trace_id:032x}-{span.span_id:016x}-{flags:02x}", state)

    def record(
        self, name: str, parent: TraceContext, start: float, end: float, attributes: Attributes,
        **options: Unpack[SpanOptions],
    ) -> None:  # fmt: skip
        with self._lock:
            full = self._waiting >= self._queue
            self._recorded += 1
            self._lost += full
        if full or self._shutdown is not None:
            return
        own, error = options.get("context") or parent.child(), options.get("error")
        status = api.Status() if error is None else api.Status(api.StatusCode.ERROR, error or None)
        self._processor.on_end(ReadableSpan(
            name,
            span_context(own),
            None if parent.is_root else span_context(parent, remote=options.get("remote", False)),
            self._resource,
            attributes,
            [SdkEvent(event, given, self._wall(moment)) for event, moment, given in options.get("events", ())],
            [api.Link(span_context(link, remote=True)) for link in options.get("links", ())],
            api.SpanKind.SERVER if options.get("server") else api.SpanKind.INTERNAL,
            status=status,
            start_time=self._wall(start),
            end_time=self._wall(end),
            instrumentation_scope=self._scope,
        ))  # fmt: skip

    def statistics(self) -> TraceStatistics:
        counts = self._exporter
        return TraceStatistics(self._recorded, counts.delivered, counts.dropped + self._lost, max(0, self._waiting))

    @property
    def _waiting(self) -> int:
        return self._recorded - self._exporter.taken - self._lost

    def finish(self) -> None:
        if self._shutdown is None:
            # The processor's own shutdown may wait for half a minute.
            self._shutdown = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
            self._shutdown.start()

    def close(self, limit: float = LAST_WORDS) -> None:
        self.finish()
        assert self._shutdown is not None
        self._shutdown.join(limit)
        found = self.statistics()
        if lost := found.recorded - found.delivered - found.dropped:
            self._lost += lost
            logs.warning(log, "traces_lost", dropped=lost)

    def _wall(self, monotonic: float) -> int:
        return round(monotonic * 1e9) + self._offset


def exporter_of(settings: Settings) -> SpanExporter:
    """The exporter of the configured protocol; gRPC's is an optional dependency."""
    if settings.protocol != GRPC:
        return OTLPSpanExporter(endpoint=settings.endpoint)
    module = importlib.import_module(f"{GRPC_MODULE}.trace_exporter")
    exporter: SpanExporter = module.OTLPSpanExporter(endpoint=settings.endpoint)
    return exporter


def span_context(context: TraceContext, *, sampled: bool = True, remote: bool = False) -> api.SpanContext:
    state = api.TraceState.from_header([context.tracestate]) if context.tracestate else None
    return api.SpanContext(int(context.trace_id, 16), int(context.span_id, 16), remote, api.TraceFlags(sampled), state)


def wall_offset() -> int:
    """Nanoseconds from monotonic to unix time, from the quickest of several readings."""
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(5)]
    return min((after - before, wall - (before + after) // 2) for before, wall, after in readings)[1]
