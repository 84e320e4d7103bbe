"""Spans as OpenTelemetry's exporters send them, read back with OpenTelemetry's own classes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.services.tracing.clock import Clock
from penstock.services.tracing.collector import OtlpCollector
from penstock.services.tracing.context import beginning
from penstock.services.tracing.names import Kind
from penstock.services.tracing.span import Event, Span
from penstock.services.tracing.tracer import Undelivered
from tests.e2e.collector import Collector, collecting
from tests.services.tracing.tracing import PARENT, SAMPLED, TRACE, settings

OWN = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def sink() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def export(sink: Collector, *spans: Span, path: str = "/v1/traces") -> None:
    way = OtlpCollector(settings(endpoint=sink.url + path), {"service.name": "penstock-api"}, Clock(1_000_000_000))
    try:
        way.export(spans)
    finally:
        way.close()


def test_a_span_arrives_as_it_was_told(sink: Collector) -> None:
    export(sink, Span(
        parent=SAMPLED, id=OWN, name="chat demo", start=1.5, end=2.5, kind=Kind.SERVER, remote=True,
        attributes={"text": "é", "whole": -3, "share": 0.5, "yes": True, "words": ("stop", "length")},
        events=(Event("first token", 2.0, {"n": 1}),), links=(SAMPLED,), error="it broke",
    ))  # fmt: skip
    (found,) = [span for span in sink.spans() if span["name"] == "chat demo"]
    assert (found["trace"], found["parent"], found["id"]) == (TRACE, PARENT, OWN)
    assert (found["start"], found["end"]) == (2_500_000_000, 3_500_000_000)
    assert found["attributes"] == {"text": "é", "whole": -3, "share": 0.5, "yes": True, "words": ["stop", "length"]}
    assert found["events"] == [{"name": "first token", "time": 3_000_000_000, "attributes": {"n": 1}}]
    assert found["links"] == [{"trace": TRACE, "id": PARENT}]
    assert (found["error"], found["message"]) == (True, "it broke")
    assert (found["kind"], found["state"], found["scope"]) == (2, "a=1", "penstock")
    assert found["resource"]["service.name"] == "penstock-api"


def test_the_first_span_of_a_trace_has_no_parent(sink: Collector) -> None:
    export(sink, Span(parent=beginning("f" * 32), id=OWN, name="start", start=0.0, end=1.0))
    (found,) = [span for span in sink.spans() if span["name"] == "start"]
    assert (found["trace"], found["parent"], found["error"]) == ("f" * 32, "", False)


def test_an_error_may_have_no_words(sink: Collector) -> None:
    export(sink, Span(parent=SAMPLED, id=OWN, name="silent", start=0.0, end=1.0, error=""))
    (found,) = [span for span in sink.spans() if span["name"] == "silent"]
    assert (found["error"], found["message"]) == (True, "")


def test_a_refusal_is_told_with_its_reason(sink: Collector) -> None:
    sink.answers(status=400)
    with pytest.raises(Undelivered, match="400"):
        export(sink, Span(parent=SAMPLED, id=OWN, name="refused", start=0.0, end=1.0))
    sink.answers(status=200)
    assert not [span for span in sink.spans() if span["name"] == "refused"]


def test_variables_of_the_exporter_count(sink: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    export(sink, Span(parent=SAMPLED, id=OWN, name="pressed", start=0.0, end=1.0))
    (found,) = [span for span in sink.spans() if span["name"] == "pressed"]
    assert found["resource"]["deployment.environment.name"] == "test"
