"""What of the options and of the standard OTEL_ variables one process goes by.

An option that was given wins over its variable. The variables of headers, certificates, compression, timeout and
resource are read by OpenTelemetry's exporters themselves. Source: OpenTelemetry specification, "Environment Variable
Specification" and "OpenTelemetry Protocol Exporter".
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from penstock.protocol.config import TraceConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.version import VERSION

HTTP, GRPC = "http/protobuf", "grpc"
TRACES_PATH = "/v1/traces"
PREFIX = "penstock"  # of services' names
PARENT_BASED = "parentbased_"
QUEUE, BATCH, DELAY = 8192, 512, 1000  # spans, spans, milliseconds
GRPC_MODULE = "opentelemetry.exporter.otlp.proto.grpc"
TRUE = "true"


class Sampling(msgspec.Struct, frozen=True):
    """Who decides about a trace: the client where it has decided and we follow, else its share."""

    ratio: float
    follow: bool = True  # the client's sampled flag


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How this process tells its traces."""

    endpoint: str
    protocol: str
    sampling: Sampling
    service: str  # prefix of its services' names
    insecure: bool | None = None  # of gRPC; None: as the endpoint's scheme and the variables say
    queue: int = QUEUE  # spans that wait at most
    batch: int = BATCH  # spans of one export at most
    delay: float = DELAY / 1000  # seconds that a span waits at most
    steps_per_second: float = 0.0  # step spans, where a traced request is in them
    tokens_per_event: int = 0


def settings(config: TraceConfig, environ: Mapping[str, str] = os.environ) -> Settings | None:
    """None where no traces are to be told. Raises ConfigError."""
    variables = {name: text.strip() for name, text in environ.items() if name.startswith("OTEL_") and text.strip()}
    if variables.get("OTEL_SDK_DISABLED", "").lower() == TRUE or variables.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocol = protocol_of(config, variables)
    endpoint = endpoint_of(config, variables, protocol)
    if not endpoint:
        return None
    if protocol == GRPC and importlib.util.find_spec(GRPC_MODULE) is None:
        raise ConfigError("--otlp-protocol", GRPC, "it needs an extra: pip install 'penstock[otlp-grpc]'")
    queue = whole("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE, variables)
    return Settings(
        endpoint=endpoint,
        protocol=protocol,
        sampling=sampling_of(config, variables),
        service=variables.get("OTEL_SERVICE_NAME", PREFIX),
        insecure=True if "://" not in endpoint and not exporter("INSECURE", variables) else None,
        queue=queue,
        batch=min(queue, whole("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH, variables)),
        delay=whole("OTEL_BSP_SCHEDULE_DELAY", DELAY, variables) / 1000,
        steps_per_second=config.trace_steps,
        tokens_per_event=config.trace_tokens,
    )  # fmt: skip


def service_attributes(found: Settings, role: str, index: int) -> dict[str, str | int]:
    """Who tells: a service per kind of process, an instance per process."""
    return {
        "service.name": f"{found.service}-{role}",
        "service.namespace": found.service,
        "service.instance.id": f"{role}-{index}",
        "service.version": VERSION,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }


def exporter(name: str, variables: Mapping[str, str], default: str = "") -> str:
    """A variable of the exporter: that of traces, or that of all signals."""
    return variables.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or variables.get(f"OTEL_EXPORTER_OTLP_{name}") or default


def protocol_of(config: TraceConfig, variables: Mapping[str, str]) -> str:
    if config.otlp_protocol != "auto":
        return config.otlp_protocol
    found = exporter("PROTOCOL", variables, HTTP)
    if found not in (HTTP, GRPC):
        raise ConfigError("OTEL_EXPORTER_OTLP_PROTOCOL", found, f"it must be {HTTP} or {GRPC}")
    return found


def endpoint_of(config: TraceConfig, variables: Mapping[str, str], protocol: str) -> str:
    """Where traces go. The variable of traces alone is taken as it stands; the others name a collector, to which HTTP
    adds the path of traces, unless an option names it already."""
    option, source = config.otlp_endpoint, "--otlp-endpoint"
    exact = "" if option else variables.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    source = source if option else "OTEL_EXPORTER_OTLP_ENDPOINT"
    found = option or exact or variables.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not found:
        return ""
    parts = urlsplit(found)
    plain = protocol == GRPC and "://" not in found  # host:port
    if not plain and (parts.scheme not in ("http", "https") or not parts.netloc):
        raise ConfigError(source, found, "it must be like http://localhost:4318")
    if protocol == GRPC or exact or parts.path.rstrip("/").endswith(TRACES_PATH):
        return found
    return found.rstrip("/") + TRACES_PATH


def sampling_of(config: TraceConfig, variables: Mapping[str, str]) -> Sampling:
    """`--trace-sampling-ratio` below 1, or what OTEL_TRACES_SAMPLER says. Raises ConfigError."""
    if config.trace_sampling_ratio < 1.0:
        return Sampling(config.trace_sampling_ratio)
    name = variables.get("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    follow, own = name.startswith(PARENT_BASED), name.removeprefix(PARENT_BASED)
    if own == "traceidratio":
        text = variables.get("OTEL_TRACES_SAMPLER_ARG", "1")
        try:
            ratio = float(text)
        except ValueError:
            ratio = -1.0
        if not 0.0 <= ratio <= 1.0:
            raise ConfigError("OTEL_TRACES_SAMPLER_ARG", text, "it must be between 0 and 1")
        return Sampling(ratio, follow)
    if own not in ("always_on", "always_off"):
        allowed = "it must be always_on, always_off or traceidratio, or one of these behind parentbased_"
        raise ConfigError("OTEL_TRACES_SAMPLER", name, allowed)
    return Sampling(float(own == "always_on"), follow)


def whole(name: str, default: int, variables: Mapping[str, str]) -> int:
    """A whole number above 0. Raises ConfigError."""
    text = variables.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 31):
        raise ConfigError(name, text, "it must be a whole number above 0")
    return int(text)
