"""Options and the standard variables: who wins, what is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from penstock.protocol.config import TraceConfig
from penstock.protocol.errors import ConfigError
from penstock.services.tracing.otlp import exporter_of
from penstock.services.tracing.startup import service_attributes, settings_of, tracer_of
from penstock.services.tracing.tracer import DELAY, GRPC, HTTP, QUEUE, Tracer, TraceStatistics
from tests.services.tracing.tracing import SAMPLED

BASE = "http://collector:4318"


def found(config: dict[str, Any] | None = None, **variables: str) -> Any:
    return settings_of(TraceConfig(**config or {}), variables)


def test_nothing_is_told_without_a_collector() -> None:
    assert found() is None
    assert found(OTEL_SERVICE_NAME="x", OTEL_TRACES_SAMPLER="always_on") is None


def test_how_many_steps_have_a_span_is_the_options() -> None:
    assert found({"otlp_endpoint": BASE, "trace_steps": 3.0}).steps_per_second == 3.0


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_SDK_DISABLED", "true"), ("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")],
)
def test_it_can_be_turned_off(variable: str, value: str) -> None:
    assert found({"otlp_endpoint": BASE}, **{variable: value}) is None
    assert found({"otlp_endpoint": BASE}) is not None


@pytest.mark.parametrize(
    ("option", "endpoint"),
    [
        (BASE, BASE + "/v1/traces"),
        (BASE + "/", BASE + "/v1/traces"),
        (BASE + "/v1/traces", BASE + "/v1/traces"),
        (BASE + "/otlp", BASE + "/otlp/v1/traces"),
    ],
)
def test_where_traces_go(option: str, endpoint: str) -> None:
    assert found({"otlp_endpoint": option}, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://b:2").endpoint == endpoint


def test_variables_alone_are_the_exporters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        settings = found(**{name: BASE})
        assert settings.endpoint is None
        with monkeypatch.context() as patched:
            patched.setenv(name, BASE)
            exporter: Any = exporter_of(settings)
        assert exporter._endpoint == BASE + ("" if "TRACES" in name else "/v1/traces")


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", "localhost"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        found({"otlp_endpoint": endpoint})
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        found(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)


def test_the_protocol_is_the_options_or_the_variables() -> None:
    assert found({"otlp_endpoint": BASE}).protocol == HTTP
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        found({"otlp_endpoint": BASE}, OTEL_EXPORTER_OTLP_PROTOCOL="http/json")
    assert found({"otlp_endpoint": BASE, "otlp_protocol": HTTP}, OTEL_EXPORTER_OTLP_PROTOCOL="grpc").protocol == HTTP


def test_grpc_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"penstock\[otlp-grpc\]"):
        found({"otlp_endpoint": BASE, "otlp_protocol": GRPC})


def test_grpc_takes_the_endpoint_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for endpoint in ("collector:4317", "https://collector:4317"):
        assert found({"otlp_endpoint": endpoint}, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="grpc").endpoint == endpoint


def test_the_ratio_is_the_options_or_the_samplers() -> None:
    assert found({"otlp_endpoint": BASE}).ratio is None
    assert found({"otlp_endpoint": BASE, "trace_sampling_ratio": 0.5}).ratio == 0.5


def test_queues_are_longer_than_the_librarys_unless_a_variable_says() -> None:
    plain = found({"otlp_endpoint": BASE})
    assert (plain.queue, plain.delay) == (QUEUE, DELAY)
    given = found({"otlp_endpoint": BASE}, OTEL_BSP_MAX_QUEUE_SIZE="1000", OTEL_BSP_SCHEDULE_DELAY="20")
    assert (given.queue, given.delay) == (1000, None)
    for value in ("0", "-1", "many", "1" * 40):
        with pytest.raises(ConfigError, match="OTEL_BSP_MAX_QUEUE_SIZE"):
            found({"otlp_endpoint": BASE}, OTEL_BSP_MAX_QUEUE_SIZE=value)


def test_a_queue_that_is_shorter_than_a_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    with pytest.raises(ConfigError, match=r"OTEL_BSP_MAX_QUEUE_SIZE.*max_queue_size"):
        tracer_of(TraceConfig(otlp_endpoint=BASE), "api", 0)


def test_each_kind_of_process_is_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    own = service_attributes("scheduler", 3)
    assert (own["service.name"], own["service.instance.id"]) == ("penstock-scheduler", "scheduler-3")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "blue")
    named = service_attributes("api", 0)
    assert named["service.name"] == "blue-api"


def test_without_a_collector_the_tracer_records_nothing() -> None:
    tracer = tracer_of(TraceConfig(), "api", 0)
    assert type(tracer) is Tracer
    assert not tracer.enabled
    assert not tracer.records(SAMPLED)
    assert tracer.sample(SAMPLED) is None
    tracer.record("x", SAMPLED, 0.0, 1.0, {})
    tracer.finish()
    tracer.close()
    assert tracer.statistics() == TraceStatistics(0, 0, 0, 0)


def test_the_sdk_is_not_imported_where_nothing_is_told() -> None:
    import subprocess
    import sys

    script = "import penstock.services.openai.api_server\n"
    script += "import penstock.services.scheduler.main, penstock.services.tokenizer.main\n"
    script += "import penstock.services.supervisor.launcher, sys\n"
    script += "import penstock.services.llm.llm, penstock.services.llm.async_llm\n"
    script += "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
