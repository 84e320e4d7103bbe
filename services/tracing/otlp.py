"""The tracer that exports: OpenTelemetry's sampler, batch processor and OTLP exporters, over HTTP or gRPC.

Serving never waits for a collector: a full queue drops spans, a failed export loses them, and both are counted. The end
of a process waits for LAST_WORDS at most; if the collector hangs, only the first process of a server to end does.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from penstock.protocol.messages import TraceContext
from penstock.protocol.version import VERSION
from penstock.services.supervisor import logs, run_directory
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

PATIENCE = 0.5  # seconds of an export after which the end of the process does not wait for it
COMPLAINT_SECONDS = 60.0  # between log lines about failed exports
LATE, HANGS, FAILS = "the collector did not take them in time", "the collector hangs", "the collector takes none"
SILENT = "collector.silent"  # in the run directory: a process of this server waited for the collector in vain
RECENT = 30.0  # seconds for which that counts
LOGGERS = (
    "opentelemetry.exporter.otlp.common.http", "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)  # fmt: skip  # loggers that log every failed attempt


class CountingExporter(SpanExporter):
    """Counts what an exporter delivers, and logs its last error now and then instead of every one.

    Log lines of other exporters in the program are left alone; they come from other threads.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._lock = threading.Lock()  # of the counters and of `_abandoned`
        self._abandoned = False
        self.recorded = self.delivered = self.dropped = self.in_flight = 0
        self._since = float("inf")  # when the export in flight began
        self._thread = 0  # that exports
        self._reason = ""
        self._complained = float("-inf")
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self._intercept)

    @property
    def waiting(self) -> int:
        return self.recorded - self.delivered - self.dropped - self.in_flight

    @property
    def stuck(self) -> bool:
        """Whether the export in flight has taken longer than PATIENCE."""
        return time.monotonic() - self._since >= PATIENCE

    def admit(self, queue: int) -> bool:
        """Count a recorded span; False if the queue is full."""
        with self._lock:
            room = self.waiting < queue
            self.recorded += 1
            self.dropped += not room
        return room

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            if self._abandoned:
                return SpanExportResult.FAILURE
            self.in_flight, self._since = len(spans), time.monotonic()
        self._thread, self._reason = threading.get_ident(), "it took nothing"
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._settle(len(spans), success=result is SpanExportResult.SUCCESS)
        return result

    def _settle(self, count: int, *, success: bool) -> None:
        now = time.monotonic()
        with self._lock:
            self._since = float("inf")
            if self._abandoned:
                return
            self.in_flight = 0
            self.delivered += count if success else 0
            self.dropped += 0 if success else count
        if not success and now - self._complained >= COMPLAINT_SECONDS:
            self._complained = now
            logs.warning(log, "traces_not_delivered", endpoint=self._endpoint, reason=self._reason,
                         dropped=self.dropped)  # fmt: skip

    def abandon(self, reason: str) -> None:
        """Count everything that is not delivered yet as dropped."""
        with self._lock:
            self._abandoned = True
            lost = self.waiting + self.in_flight
            self.dropped += lost
            self.in_flight = 0
        if lost:
            logs.warning(log, "traces_lost", endpoint=self._endpoint, dropped=lost, reason=reason)

    def _intercept(self, record: logging.LogRecord) -> bool:
        """A filter of the exporter's loggers: keeps its lines out of the log, and the last one as the reason."""
        if record.thread != self._thread:
            return True
        self._reason = record.getMessage()
        return False

    def shutdown(self) -> None:
        self._exporter.shutdown()
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self._intercept)


class OtlpTracer(Tracer):
    """Exports the spans of all threads of a process. `directory` is the server's run directory."""

    enabled = True

    def __init__(
        self,
        settings: Settings,
        resource: Mapping[str, Value],
        exporter: SpanExporter | None = None,
        directory: Path | None = None,
    ) -> None:
        self.settings = settings
        self.steps_per_second = settings.steps_per_second
        ratio = TraceIdRatioBased(settings.sampling.ratio)
        self._sampler = ParentBased(ratio) if settings.sampling.parent_based else ratio
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope("penstock", VERSION)
        self._exporter = CountingExporter(exporter_of(settings) if exporter is None else exporter, settings.endpoint)
        self._processor = BatchSpanProcessor(self._exporter, settings.queue, settings.delay * 1000, settings.batch)
        shared = directory if directory is not None else os.environ.get(run_directory.SHARED)
        self._silent = Path(shared) / SILENT if shared else None
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
        if not self._exporter.admit(self.settings.queue) or self._shutdown is not None:
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
        return TraceStatistics(counts.recorded, counts.delivered, counts.dropped, counts.waiting)

    def finish(self) -> None:
        if self._shutdown is None:
            # The processor's own shutdown may wait for half a minute.
            self._shutdown = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
            self._shutdown.start()

    def close(self, limit: float = LAST_WORDS) -> None:
        self.finish()
        assert self._shutdown is not None
        exporter = self._exporter
        stuck = exporter.stuck
        warned = not stuck and bool(exporter.waiting or exporter.in_flight) and self._warned()
        self._shutdown.join(0.0 if stuck or warned else limit)
        if not self._shutdown.is_alive():
            exporter.abandon(FAILS)
            return
        if exporter.in_flight and not warned and self._silent is not None:
            with contextlib.suppress(OSError):  # the run directory is gone
                self._silent.touch(mode=0o600)
        exporter.abandon(HANGS if stuck or warned else LATE)

    def _warned(self) -> bool:
        """Whether another process of this server has recently waited for the collector in vain."""
        try:
            return self._silent is not None and abs(time.time() - self._silent.stat().st_mtime) < RECENT
        except OSError:
            return False

    def _wall(self, monotonic: float) -> int:
        return round(monotonic * 1e9) + self._offset


def exporter_of(settings: Settings) -> SpanExporter:
    """The exporter of the configured protocol; gRPC's is an optional dependency."""
    if settings.protocol != GRPC:
        return OTLPSpanExporter(endpoint=settings.endpoint)
    module = importlib.import_module(f"{GRPC_MODULE}.trace_exporter")
    exporter: SpanExporter = module.OTLPSpanExporter(endpoint=settings.endpoint, insecure=settings.insecure)
    return exporter


def span_context(context: TraceContext, *, sampled: bool = True, remote: bool = False) -> api.SpanContext:
    state = api.TraceState.from_header([context.tracestate]) if context.tracestate else None
    return api.SpanContext(int(context.trace_id, 16), int(context.span_id, 16), remote, api.TraceFlags(sampled), state)


def wall_offset() -> int:
    """Nanoseconds from monotonic to unix time, from the quickest of several readings."""
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(5)]
    return min((after - before, wall - (before + after) // 2) for before, wall, after in readings)[1]
