"""Options and the standard variables: who wins, what is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from penstock.protocol.config import TraceConfig
from penstock.protocol.errors import ConfigError
from penstock.services.tracing import tracer as module
from penstock.services.tracing.startup import service_attributes, settings_of, tracer_of
from penstock.services.tracing.tracer import GRPC, HTTP, Sampling, Tracer, TraceStatistics
from tests.services.tracing.tracing import SAMPLED

BASE = "http://collector:4318"


def found(config: dict[str, Any] | None = None, **variables: str) -> Any:
    return settings_of(TraceConfig(**config or {}), variables)


def test_nothing_is_told_without_a_collector() -> None:
    assert found() is None
    assert found(OTEL_SERVICE_NAME="x", OTEL_TRACES_SAMPLER="always_on") is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_SDK_DISABLED", "true"), ("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")],
)
def test_it_can_be_turned_off(variable: str, value: str) -> None:
    assert found({"otlp_endpoint": BASE}, **{variable: value}) is None
    assert found({"otlp_endpoint": BASE}, **{variable: ""}) is not None


@pytest.mark.parametrize(
    ("option", "variables", "endpoint"),
    [
        (BASE, {}, BASE + "/v1/traces"),
        (BASE + "/", {}, BASE + "/v1/traces"),
        (BASE + "/v1/traces", {}, BASE + "/v1/traces"),
        (BASE + "/otlp", {}, BASE + "/otlp/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": BASE}, BASE + "/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": BASE + "/own"}, BASE + "/own"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:2"},
         "http://b:2"),
        (BASE, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:2"}, BASE + "/v1/traces"),
    ],
)  # fmt: skip
def test_where_traces_go(option: str, variables: dict[str, str], endpoint: str) -> None:
    assert found({"otlp_endpoint": option}, **variables).endpoint == endpoint


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
    for endpoint in ("collector:4317", "http://collector:4317", "https://collector:4317"):
        assert found({"otlp_endpoint": endpoint}, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="grpc").endpoint == endpoint
    assert found({"otlp_endpoint": "collector:4317", "otlp_protocol": GRPC}).insecure is True
    assert found({"otlp_endpoint": "https://collector:4317", "otlp_protocol": GRPC}).insecure is None


@pytest.mark.parametrize(
    ("sampler", "argument", "expected"),
    [
        ("", "", Sampling(1.0)),
        ("parentbased_always_on", "", Sampling(1.0)),
        ("parentbased_always_off", "", Sampling(0.0)),
        ("parentbased_traceidratio", "0.25", Sampling(0.25)),
        ("traceidratio", "0.25", Sampling(0.25, parent_based=False)),
        ("traceidratio", "", Sampling(1.0, parent_based=False)),
        ("always_on", "0.25", Sampling(1.0, parent_based=False)),
        ("always_off", "", Sampling(0.0, parent_based=False)),
    ],
)
def test_samplers(sampler: str, argument: str, expected: Sampling) -> None:
    variables = {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument}
    assert found({"otlp_endpoint": BASE}, **variables).sampling == expected
    assert found({"otlp_endpoint": BASE, "trace_sampling_ratio": 0.5}, **variables).sampling == Sampling(0.5)


@pytest.mark.parametrize("argument", ["2", "-1", "half", "nan"])
def test_a_share_lies_between_none_and_all(argument: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER_ARG"):
        found({"otlp_endpoint": BASE}, OTEL_TRACES_SAMPLER="traceidratio", OTEL_TRACES_SAMPLER_ARG=argument)


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER"):
        found({"otlp_endpoint": BASE}, OTEL_TRACES_SAMPLER="jaeger_remote")


def test_queue_and_batches() -> None:
    plain = found({"otlp_endpoint": BASE})
    assert (plain.queue, plain.batch, plain.delay) == (module.QUEUE, module.BATCH, module.DELAY / 1000)
    small = found({"otlp_endpoint": BASE}, OTEL_BSP_MAX_QUEUE_SIZE="10", OTEL_BSP_SCHEDULE_DELAY="20")
    assert (small.queue, small.batch, small.delay) == (10, 10, 0.02)
    for value in ("0", "-1", "many", "1" * 40):
        with pytest.raises(ConfigError, match="OTEL_BSP_MAX_QUEUE_SIZE"):
            found({"otlp_endpoint": BASE}, OTEL_BSP_MAX_QUEUE_SIZE=value)


def test_each_kind_of_process_is_a_service() -> None:
    own = service_attributes(found({"otlp_endpoint": BASE}), "scheduler", 3)
    assert (own["service.name"], own["service.instance.id"]) == ("penstock-scheduler", "scheduler-3")
    named = service_attributes(found({"otlp_endpoint": BASE}, OTEL_SERVICE_NAME="blue"), "api", 0)
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
