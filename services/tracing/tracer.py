"""The tracer of a process, and its settings: options first, then OpenTelemetry's standard OTEL_ variables.

Nothing of OpenTelemetry is imported unless spans are exported. Its exporters read the variables of headers,
certificates, compression, timeout and resource themselves. Source: OpenTelemetry specification, "Environment Variable
Specification" and "OpenTelemetry Protocol Exporter".
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack
from urllib.parse import urlsplit

import msgspec

from penstock.protocol.config import TraceConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.messages import TraceContext
from penstock.protocol.version import VERSION

Value = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, Value]
Event = tuple[str, float, Attributes]  # name, monotonic seconds, attributes

HTTP, GRPC = "http/protobuf", "grpc"
TRACES_PATH = "/v1/traces"
PREFIX = "penstock"  # of service names
PARENT_BASED = "parentbased_"
QUEUE, BATCH, DELAY = 8192, 512, 1000  # spans, spans, milliseconds
GRPC_MODULE = "opentelemetry.exporter.otlp.proto.grpc"
LAST_WORDS = 1.0  # seconds that the end of a process waits for the collector


class Sampling(msgspec.Struct, frozen=True):
    """How a request is sampled: by its client's sampled flag where there is one and we follow it, else by ratio."""

    ratio: float
    parent_based: bool = True


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str
    protocol: str
    sampling: Sampling
    service: str  # prefix of the services' names
    insecure: bool | None = None  # of gRPC; None: as the endpoint's scheme and the variables say
    queue: int = QUEUE  # spans waiting at most
    batch: int = BATCH  # spans of one export at most
    delay: float = DELAY / 1000  # seconds that a span waits at most
    steps_per_second: float = 0.0  # spans of steps that have traced requests


class SpanOptions(TypedDict, total=False):
    context: TraceContext  # its own, where it was handed on
    events: Sequence[Event]
    links: Sequence[TraceContext]
    error: str | None  # empty: a failure without a message
    server: bool  # its kind is that of an HTTP server's spans
    remote: bool  # its parent is not of this server


class TraceStatistics(msgspec.Struct, frozen=True):
    """Spans since the start, and those waiting now."""

    recorded: int
    delivered: int
    dropped: int  # by a full queue, a failed export, or the end of the process
    waiting: int


class Tracer:
    """A no-op tracer, for processes whose traces are off; `otlp.OtlpTracer` is the one that exports.

    Spans are recorded once they have ended, with times in monotonic seconds of this process.
    """

    enabled = False
    steps_per_second = 0.0

    def records(self, context: TraceContext) -> bool:
        """Whether spans under this context are recorded."""
        return False

    def sample(self, context: TraceContext) -> TraceContext | None:
        """The parent of our first span of a request that came with `context`, or with an empty one. None: it is not
        traced. Asked once per request, by the process that it enters."""
        return None

    @staticmethod
    def current() -> TraceContext:
        """The context of the caller's current span, by OpenTelemetry's API; empty where none is current."""
        return TraceContext()

    def record(
        self, name: str, parent: TraceContext, start: float, end: float, attributes: Attributes,
        **options: Unpack[SpanOptions],
    ) -> None:  # fmt: skip
        """A span that has ended."""

    def statistics(self) -> TraceStatistics:
        return TraceStatistics(0, 0, 0, 0)

    def finish(self) -> None:
        """Begin to export what waits: the process ends. Spans recorded later are lost."""

    def close(self, limit: float = LAST_WORDS) -> None:
        """Export what waits, for `limit` seconds at most; what is left is dropped and logged."""


def tracer_of(config: TraceConfig, role: str, index: int) -> Tracer:
    """The tracer of a process. Raises ConfigError."""
    settings = settings_of(config)
    if settings is None:
        return Tracer()
    from penstock.services.tracing.otlp import OtlpTracer

    return OtlpTracer(settings, service_attributes(settings, role, index))


def settings_of(config: TraceConfig, environ: Mapping[str, str] = os.environ) -> Settings | None:
    """None where traces are off. Raises ConfigError."""
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
    """The resource of a process: a service per role, an instance per process."""
    return {
        "service.name": f"{settings.service}-{role}",
        "service.namespace": settings.service,
        "service.instance.id": f"{role}-{index}",
        "service.version": VERSION,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }


def exporter_variable(name: str, variables: Mapping[str, str], default: str = "") -> str:
    """A variable of the exporter: that of traces, else that of all signals."""
    return variables.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or variables.get(f"OTEL_EXPORTER_OTLP_{name}") or default


def protocol_of(config: TraceConfig, variables: Mapping[str, str]) -> str:
    if config.otlp_protocol != "auto":
        return config.otlp_protocol
    found = exporter_variable("PROTOCOL", variables, HTTP)
    if found not in (HTTP, GRPC):
        raise ConfigError("OTEL_EXPORTER_OTLP_PROTOCOL", found, f"it must be {HTTP} or {GRPC}")
    return found


def endpoint_of(config: TraceConfig, variables: Mapping[str, str], protocol: str) -> str:
    """The URL that spans go to, empty without one. The variable of traces is used unchanged; the others name a
    collector, and over HTTP the path of traces is appended."""
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
