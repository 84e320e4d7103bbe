"""A process's tracing settings, its tracer, and the trace of its start.

Options take precedence over OpenTelemetry's standard OTEL_ variables. Its exporters read the variables of headers,
certificates, compression, timeout and resource themselves. Source: OpenTelemetry specification, "Environment Variable
Specification" and "OpenTelemetry Protocol Exporter".

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
    BATCH,
    DELAY,
    GRPC,
    GRPC_MODULE,
    HTTP,
    QUEUE,
    Attributes,
    Sampling,
    Settings,
    Tracer,
    parse,
    root,
)

TRACES_PATH = "/v1/traces"
PREFIX = "penstock"  # of service names
PARENT_BASED = "parentbased_"
PARENT, STATE = "TRACEPARENT", "TRACESTATE"


def tracer_of(config: TraceConfig, role: str, index: int) -> Tracer:
    """The tracer of a process. Raises ConfigError."""
    settings = settings_of(config)
    if settings is None:
        return Tracer()
    from penstock.services.tracing.otlp import OtlpTracer

    return OtlpTracer(settings, service_attributes(settings, role, index))


def settings_of(config: TraceConfig, environ: Mapping[str, str] = os.environ) -> Settings | None:
    """None if traces are off. Raises ConfigError."""
    variables = {name: text.strip() for name, text in environ.items() if name.startswith("OTEL_") and text.strip()}
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true" or variables.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocol = protocol_of(config, variables)
    endpoint = endpoint_of(config, variables, protocol)
    if not endpoint:
        return None
    if protocol == GRPC and importlib.util.find_spec(GRPC_MODULE) is None:
        raise ConfigError("--otlp-protocol", GRPC, "it needs an extra: pip install 'penstock[otlp-grpc]'")
    queue = positive("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE, variables)
    return Settings(
        endpoint=endpoint,
        protocol=protocol,
        sampling=sampling_of(config, variables),
        service=variables.get("OTEL_SERVICE_NAME", PREFIX),
        insecure=True if "://" not in endpoint and not exporter_variable("INSECURE", variables) else None,
        queue=queue,
        batch=min(queue, positive("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH, variables)),
        delay=positive("OTEL_BSP_SCHEDULE_DELAY", DELAY, variables) / 1000,
        steps_per_second=config.trace_steps,
    )  # fmt: skip


def service_attributes(settings: Settings, role: str, index: int) -> dict[str, str | int]:
    """The resource attributes of a process: a service per role, an instance per process."""
    return {
        "service.name": f"{settings.service}-{role}",
        "service.namespace": settings.service,
        "service.instance.id": f"{role}-{index}",
        "service.version": VERSION,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }


def exporter_variable(name: str, variables: Mapping[str, str], default: str = "") -> str:
    """A variable of the exporter: the one for traces, else the one for all signals."""
    return variables.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or variables.get(f"OTEL_EXPORTER_OTLP_{name}") or default


def protocol_of(config: TraceConfig, variables: Mapping[str, str]) -> str:
    if config.otlp_protocol != "auto":
        return config.otlp_protocol
    found = exporter_variable("PROTOCOL", variables, HTTP)
    if found not in (HTTP, GRPC):
        raise ConfigError("OTEL_EXPORTER_OTLP_PROTOCOL", found, f"it must be {HTTP} or {GRPC}")
    return found


def endpoint_of(config: TraceConfig, variables: Mapping[str, str], protocol: str) -> str:
    """The URL for spans, or empty. The variable for traces is used unchanged; the other settings name a collector, to
    which the path of traces is appended for HTTP."""
    exact = "" if config.otlp_endpoint else variables.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    source = "--otlp-endpoint" if config.otlp_endpoint else "OTEL_EXPORTER_OTLP_ENDPOINT"
    found = config.otlp_endpoint or exact or variables.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not found:
        return ""
    parts = urlsplit(found)
    bare = protocol == GRPC and "://" not in found  # host:port
    if not bare and (parts.scheme not in ("http", "https") or not parts.netloc):
        raise ConfigError(source, found, "it must be like http://localhost:4318")
    if protocol == GRPC or exact or parts.path.rstrip("/").endswith(TRACES_PATH):
        return found
    return found.rstrip("/") + TRACES_PATH


def sampling_of(config: TraceConfig, variables: Mapping[str, str]) -> Sampling:
    """`--trace-sampling-ratio` below 1, else OTEL_TRACES_SAMPLER. Raises ConfigError."""
    if config.trace_sampling_ratio < 1.0:
        return Sampling(config.trace_sampling_ratio)
    name = variables.get("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    parent_based, root = name.startswith(PARENT_BASED), name.removeprefix(PARENT_BASED)
    if root == "traceidratio":
        text = variables.get("OTEL_TRACES_SAMPLER_ARG", "1")
        try:
            ratio = float(text)
        except ValueError:
            ratio = -1.0
        if not 0.0 <= ratio <= 1.0:
            raise ConfigError("OTEL_TRACES_SAMPLER_ARG", text, "it must be between 0 and 1")
        return Sampling(ratio, parent_based)
    if root not in ("always_on", "always_off"):
        allowed = "it must be always_on, always_off or traceidratio, or one of these behind parentbased_"
        raise ConfigError("OTEL_TRACES_SAMPLER", name, allowed)
    return Sampling(float(root == "always_on"), parent_based)


def positive(name: str, default: int, variables: Mapping[str, str]) -> int:
    """A whole number above 0. Raises ConfigError."""
    text = variables.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 31):
        raise ConfigError(name, text, "it must be a whole number above 0")
    return int(text)


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
