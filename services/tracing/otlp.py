"""The tracer that exports: OpenTelemetry's sampler, batch processor and OTLP exporters, over HTTP or gRPC.

Nobody waits for a collector: a full queue drops spans, a failed export loses them, and both are counted. Only the end
of a process waits, for LAST_WORDS at most, and of a server whose collector hangs only the first process does.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    get_current_span,
    set_span_in_context,
)

from penstock.protocol.messages import TraceContext
from penstock.protocol.version import VERSION
from penstock.services.supervisor import logs, run_directory
from penstock.services.tracing.propagation import root
from penstock.services.tracing.tracer import (
    GRPC,
    GRPC_MODULE,
    LAST_WORDS,
    Attributes,
    Event,
    Settings,
    Tracer,
    TraceStatistics,
    Value,
)

log = logging.getLogger(__name__)

PATIENCE = 0.5  # seconds of an export after which the end of the process does not wait for it
COMPLAINT_SECONDS = 60.0  # between log lines about a collector that takes nothing
LATE, HANGS, FAILS = "the collector did not take them in time", "the collector hangs", "the collector takes none"
SILENT = "collector.silent"  # in the run directory: a process of this server has waited for the collector in vain
RECENT = 30.0  # seconds for which that counts; by then a collector may be back
EXPORTERS = "opentelemetry.exporter.otlp"
LOGGERS = (
    f"{EXPORTERS}.proto.http.trace_exporter", f"{EXPORTERS}.proto.grpc.exporter",
    f"{EXPORTERS}.proto.grpc.trace_exporter", f"{EXPORTERS}.common.http", "opentelemetry.sdk._shared_internal",
)  # fmt: skip  # which complain of every attempt


class CountingExporter(SpanExporter, logging.Filter):
    """Counts what an exporter delivers, and logs its last complaint now and then instead of each.

    A program that hosts us may have exporters of its own: what they log on their threads passes the filter.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        logging.Filter.__init__(self)
        self._exporter = exporter
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._thread = 0  # that exports
        self._reason = ""
        self._complained = float("-inf")
        self._since: float | None = None  # when the export in flight began
        self._abandoned = False
        self.recorded = self.delivered = self.dropped = self.in_flight = 0
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self)

    @property
    def waiting(self) -> int:
        return self.recorded - self.delivered - self.dropped - self.in_flight

    @property
    def stuck(self) -> bool:
        """Whether an export has taken so long that waiting for it is in vain."""
        since = self._since
        return since is not None and time.monotonic() - since >= PATIENCE

    def admit(self, queue: int) -> bool:
        """A span was recorded; False: there is no room for it."""
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
            self._settle(len(spans), result is SpanExportResult.SUCCESS)
        return result

    def _settle(self, count: int, success: bool) -> None:
        with self._lock:
            self._since = None
            if self._abandoned:
                return
            self.in_flight = 0
            self.delivered += count * success
            self.dropped += count * (not success)
        now = time.monotonic()
        if not success and now - self._complained >= COMPLAINT_SECONDS:
            self._complained = now
            logs.warning(log, "traces_not_delivered", endpoint=self._endpoint, reason=self._reason,
                         dropped=self.dropped)  # fmt: skip

    def abandon(self, reason: str) -> None:
        """What has not been delivered by now never will be."""
        with self._lock:
            self._abandoned = True
            lost = self.waiting + self.in_flight
            self.dropped += lost
            self.in_flight = 0
        if lost:
            logs.warning(log, "traces_lost", endpoint=self._endpoint, dropped=lost, reason=reason)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self._reason = record.getMessage()
        return False

    def shutdown(self) -> None:
        self._exporter.shutdown()
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self)


class OtlpTracer(Tracer):
    """Exports spans of all threads of a process. `directory` is the run directory that its server's processes share."""

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
        self._sampler = sampler_of(settings)
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
        parent = context if context.traceparent else root()
        remote = Context() if parent.is_root else set_span_in_context(
            NonRecordingSpan(span_context(context, sampled=context.sampled)), Context()
        )  # fmt: skip
        result = self._sampler.should_sample(remote, int(parent.trace_id, 16), "request")
        return parent if result.decision is Decision.RECORD_AND_SAMPLE else None

    def current(self) -> TraceContext:
        return current()

    def record(
        self,
        name: str,
        parent: TraceContext,
        start: float,
        end: float,
        attributes: Attributes,
        *,
        span_id: str = "",
        events: Sequence[Event] = (),
        links: Sequence[TraceContext] = (),
        error: str | None = None,
        server: bool = False,
        remote: bool = False,
    ) -> None:
        if not self._exporter.admit(self.settings.queue) or self._shutdown is not None:
            return
        own = parent.child(span_id or secrets.token_hex(8))
        self._processor.on_end(ReadableSpan(
            name,
            span_context(own),
            None if parent.is_root else span_context(parent, remote=remote),
            self._resource,
            attributes,
            [SdkEvent(event, given, self._wall(moment)) for event, moment, given in events],
            [Link(span_context(link, remote=True)) for link in links],
            SpanKind.SERVER if server else SpanKind.INTERNAL,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error or None),
            start_time=self._wall(start),
            end_time=self._wall(end),
            instrumentation_scope=self._scope,
        ))  # fmt: skip

    def statistics(self) -> TraceStatistics:
        counts = self._exporter
        return TraceStatistics(counts.recorded, counts.delivered, counts.dropped, counts.waiting)

    def finish(self) -> None:
        if self._shutdown is None:
            # The processor's own shutdown waits for half a minute.
            self._shutdown = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
            self._shutdown.start()

    def close(self, limit: float = LAST_WORDS) -> None:
        self.finish()
        assert self._shutdown is not None
        exporter = self._exporter
        warned = not exporter.stuck and bool(exporter.waiting or exporter.in_flight) and self._silent_before()
        hangs = exporter.stuck or warned
        self._shutdown.join(0.0 if hangs else limit)
        if not self._shutdown.is_alive():
            exporter.abandon(FAILS)
            return
        if exporter.in_flight and not warned and self._silent is not None:
            with contextlib.suppress(OSError):  # the run directory is gone, and with it everyone who would look
                self._silent.touch(mode=0o600)
        exporter.abandon(HANGS if hangs else LATE)

    def _silent_before(self) -> bool:
        """Whether another process of this server has just waited for the collector in vain."""
        try:
            return self._silent is not None and abs(time.time() - self._silent.stat().st_mtime) < RECENT
        except OSError:
            return False

    def _wall(self, monotonic: float) -> int:
        """Unix nanoseconds."""
        return round(monotonic * 1e9) + self._offset


def current() -> TraceContext:
    """The context of the caller's current span; empty where none is current."""
    span = get_current_span().get_span_context()
    if not span.is_valid:
        return TraceContext()
    flags, state = span.trace_flags.sampled, span.trace_state.to_header()
    return TraceContext(f"00-{span.trace_id:032x}-{span.span_id:016x}-{flags:02x}", state)


def sampler_of(settings: Settings) -> Sampler:
    ratio = TraceIdRatioBased(settings.sampling.ratio)
    return ParentBased(ratio) if settings.sampling.parent_based else ratio


def exporter_of(settings: Settings) -> SpanExporter:
    """The gRPC exporter is an extra, so it is imported only here."""
    if settings.protocol != GRPC:
        return OTLPSpanExporter(endpoint=settings.endpoint)
    module = importlib.import_module(f"{GRPC_MODULE}.trace_exporter")
    exporter: SpanExporter = module.OTLPSpanExporter(endpoint=settings.endpoint, insecure=settings.insecure)
    return exporter


def span_context(context: TraceContext, *, sampled: bool = True, remote: bool = False) -> SpanContext:
    state = TraceState.from_header([context.tracestate]) if context.tracestate else None
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), remote, TraceFlags(sampled), state)


def wall_offset() -> int:
    """Nanoseconds from monotonic to unix time, from the quickest of several readings."""
    looks = []
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        looks.append((after - before, wall - (before + after) // 2))
    return min(looks)[1]
