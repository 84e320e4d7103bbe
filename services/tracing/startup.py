"""A process's tracing settings, its tracer, and the trace of its start.

Options take precedence over OpenTelemetry's standard OTEL_ variables, which its SDK and exporters read. Source:
OpenTelemetry specification, "Environment Variable Specification" and "OpenTelemetry Protocol Exporter".

The trace of a start has the launcher's span, below it one per process, and below that its phases. A process finds its
context in the environment, as OpenTelemetry's "Environment Variables as Context Propagation Carriers" specifies, so a
start may be part of a larger trace; without a launcher it is a trace of its own.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from penstock.protocol.config import TraceConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.messages import TraceContext
from penstock.protocol.version import VERSION
from penstock.services.supervisor.process import StartupPhases
from penstock.services.tracing import names
from penstock.services.tracing.tracer import (
    DELAY,
    GRPC,
    GRPC_MODULE,
    HTTP,
    QUEUE,
    Attributes,
    Settings,
    Tracer,
    parse,
    root,
)

TRACES_PATH = "/v1/traces"
PREFIX = "penstock"  # of service names
PARENT, STATE = "TRACEPARENT", "TRACESTATE"


def tracer_of(config: TraceConfig, role: str, index: int) -> Tracer:
    """The tracer of a process. Raises ConfigError."""
    settings = settings_of(config)
    if settings is None:
        return Tracer()
    from penstock.services.tracing.otlp import OtlpTracer

    return OtlpTracer(settings, service_attributes(role, index))


def settings_of(config: TraceConfig, environ: Mapping[str, str] = os.environ) -> Settings | None:
    """None if traces are off. Raises ConfigError."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    given = config.otlp_endpoint or exporter_variable("ENDPOINT", environ)
    if not given:
        return None
    protocol = config.otlp_protocol
    if protocol == "auto":
        protocol = exporter_variable("PROTOCOL", environ) or HTTP
    if protocol not in (HTTP, GRPC):
        raise ConfigError("OTEL_EXPORTER_OTLP_PROTOCOL", protocol, f"it must be {HTTP} or {GRPC}")
    if protocol == GRPC and importlib.util.find_spec(GRPC_MODULE) is None:
        raise ConfigError("--otlp-protocol", GRPC, "it needs an extra: pip install 'penstock[otlp-grpc]'")
    parts = urlsplit(given)
    if protocol != GRPC and (parts.scheme not in ("http", "https") or not parts.netloc):
        source = "--otlp-endpoint" if config.otlp_endpoint else "OTEL_EXPORTER_OTLP_ENDPOINT"
        raise ConfigError(source, given, "it must be like http://localhost:4318")
    return Settings(
        endpoint=endpoint_of(config.otlp_endpoint, protocol) if config.otlp_endpoint else None,
        protocol=protocol,
        ratio=config.trace_sampling_ratio if config.trace_sampling_ratio < 1.0 else None,
        queue=queue_of(environ),
        delay=None if "OTEL_BSP_SCHEDULE_DELAY" in environ else DELAY,
        steps_per_second=config.trace_steps,
    )


def service_attributes(role: str, index: int) -> dict[str, str | int]:
    """The resource attributes of a process: a service per role, an instance per process."""
    service = os.environ.get("OTEL_SERVICE_NAME") or PREFIX
    return {
        "service.name": f"{service}-{role}",
        "service.namespace": service,
        "service.instance.id": f"{role}-{index}",
        "service.version": VERSION,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }


def exporter_variable(name: str, environ: Mapping[str, str]) -> str:
    """A variable of the exporter: the one for traces, else the one for all signals."""
    return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")


def queue_of(environ: Mapping[str, str]) -> int:
    """The most waiting spans. Raises ConfigError."""
    text = environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or str(QUEUE)
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 31):
        raise ConfigError("OTEL_BSP_MAX_QUEUE_SIZE", text, "it must be a whole number above 0")
    return int(text)


def endpoint_of(given: str, protocol: str) -> str:
    """--otlp-endpoint as the exporter takes it: with HTTP the path of traces goes behind a collector's address."""
    return given if protocol == GRPC or given.endswith(TRACES_PATH) else given.rstrip("/") + TRACES_PATH


def environment(context: TraceContext) -> dict[str, str]:
    """Environment variables that make the starts of child processes part of this context."""
    variables = {PARENT: context.traceparent, STATE: context.tracestate}
    return {name: value for name, value in variables.items() if value}


class Start:
    """The span of one process's start, which is recorded regardless of the sampling ratio."""

    def __init__(
        self, tracer: Tracer, process: str, phases: StartupPhases, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.phases = phases
        self._tracer = tracer
        self._process = process
        given = environ.get(PARENT, "")
        known = parse(given, environ.get(STATE, "")) if len(given) == 55 else TraceContext()
        self._parent = known if known.traceparent else root()
        self.context = self._parent.child() if tracer.enabled else TraceContext()
        self._recorded = False

    def ready(self, now: float, attributes: Attributes | None = None) -> None:
        """The process is ready: record its start. Only the first call counts."""
        if self._recorded or not self._tracer.enabled:
            return
        self._recorded = True
        record, phases = self._tracer.record, self.phases.all
        record(f"{names.START} {self._process}", self._parent, phases[0].began, now, attributes or {},
               context=self.context, remote=not self._parent.is_root)  # fmt: skip
        for phase, end in zip(phases, [*(phase.began for phase in phases[1:]), now], strict=True):
            record(phase.name, self.context, phase.began, end, {})
