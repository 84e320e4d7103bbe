"""Spans as OpenTelemetry's exporters send them; nobody waits for a collector, and what it does not take is counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from penstock.engine_core.histogram import Histogram
from penstock.protocol.config import TraceConfig
from penstock.protocol.links import Role
from penstock.protocol.messages import TraceContext
from penstock.services.links.handshake import Identity
from penstock.services.metrics.definitions import LAG, METRICS
from penstock.services.metrics.exporter import Exporter
from penstock.services.tracing.otlp import OtlpTracer, wall_offset
from penstock.services.tracing.startup import tracer_of
from penstock.services.tracing.tracer import Tracer, TraceStatistics
from tests.e2e.collector import Collector, collecting
from tests.services.tracing.tracing import PARENT, ROOT, SAMPLED, TRACE, Bench, settings

OWN = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def sink() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def export(sink: Collector, name: str, parent: TraceContext = SAMPLED, **given: Any) -> OtlpTracer:
    tracer = OtlpTracer(settings(endpoint=sink.url + "/v1/traces"), {"service.name": "penstock-api"})
    tracer._offset = 1_000_000_000
    tracer.record(name, parent, 1.5, 2.5, given.pop("attributes", {}), context=parent.child(OWN), **given)
    tracer.close(60.0)
    return tracer


def found(sink: Collector, name: str) -> list[dict[str, Any]]:
    return [span for span in sink.spans() if span["name"] == name]


def test_a_span_arrives_as_it_was_recorded(sink: Collector) -> None:
    export(sink, "chat demo", server=True, remote=True, events=[("first token", 2.0, {"n": 1})], links=(SAMPLED,),
           attributes={"text": "é", "whole": -3, "share": 0.5, "yes": True, "words": ("stop", "length")},
           error="it broke")  # fmt: skip
    (span,) = found(sink, "chat demo")
    assert (span["trace"], span["parent"], span["id"]) == (TRACE, PARENT, OWN)
    assert (span["start"], span["end"]) == (2_500_000_000, 3_500_000_000)
    assert span["attributes"] == {"text": "é", "whole": -3, "share": 0.5, "yes": True, "words": ["stop", "length"]}
    assert span["events"] == [{"name": "first token", "time": 3_000_000_000, "attributes": {"n": 1}}]
    assert span["links"] == [{"trace": TRACE, "id": PARENT}]
    assert (span["error"], span["message"]) == (True, "it broke")
    assert (span["kind"], span["state"], span["scope"]) == (2, "a=1", "penstock")
    assert span["resource"]["service.name"] == "penstock-api"


def test_the_first_span_of_a_trace_has_no_parent(sink: Collector) -> None:
    export(sink, "start", ROOT)
    (span,) = found(sink, "start")
    assert (span["trace"], span["parent"], span["error"]) == (TRACE, "", False)


def test_an_error_may_have_no_words(sink: Collector) -> None:
    export(sink, "silent", error="")
    (span,) = found(sink, "silent")
    assert (span["error"], span["message"]) == (True, "")


def test_a_refusal_is_logged_with_its_reason(sink: Collector, caplog: pytest.LogCaptureFixture) -> None:
    sink.answers(status=400)
    with caplog.at_level(logging.INFO):
        tracer = export(sink, "refused")
    sink.answers(status=200)
    assert not found(sink, "refused")
    assert (tracer.statistics().delivered, tracer.statistics().dropped) == (0, 1)
    (line,) = caplog.records
    assert "400" in line.getMessage()


def test_variables_of_the_exporter_count(sink: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    export(sink, "pressed")
    (span,) = found(sink, "pressed")
    assert span["resource"]["deployment.environment.name"] == "test"


class Gated(SpanExporter):
    """Takes nothing before it is told to, and may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.exports: list[int] = []
        self.fails = fails

    def export(self, spans: Any) -> SpanExportResult:
        self.entered.set()
        self.gate.wait()
        self.exports.append(len(spans))
        if not self.fails:
            return SpanExportResult.SUCCESS
        logging.getLogger("opentelemetry.exporter.otlp.common.http").error("connection refused")
        return SpanExportResult.FAILURE


def told(tracer: Tracer, count: int) -> None:
    for number in range(count):
        tracer.record(str(number), SAMPLED, 0.0, 1.0, {})


def test_all_that_is_recorded_is_delivered_in_order() -> None:
    bench = Bench()
    told(bench.tracer, 100)
    assert [each.name for each in bench.spans()] == list(map(str, range(100)))
    assert bench.tracer.statistics().delivered == bench.tracer.statistics().recorded == 100


def test_a_full_queue_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5")
    way = Gated()
    tracer = OtlpTracer(settings(queue=10, delay=0.001), {}, way)
    told(tracer, 1)
    assert way.entered.wait(60)
    told(tracer, 30)
    assert tracer.statistics() == TraceStatistics(31, 0, 20, 10)
    way.gate.set()
    tracer.close(30)
    assert tracer.statistics() == TraceStatistics(31, 11, 20, 0)
    assert max(way.exports) <= 5


def test_what_a_collector_does_not_take_is_lost_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    way = Gated(fails=True)
    way.gate.set()
    with caplog.at_level(logging.WARNING):
        tracer = OtlpTracer(settings(queue=600, delay=3600.0), {}, way)
        told(tracer, 12)
        tracer.close(30)
    assert tracer.statistics() == TraceStatistics(12, 0, 12, 0)
    assert lost(caplog) == []


def lost(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What was logged of spans that an end has lost."""
    return [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "traces_lost"]


def test_an_end_waits_for_its_limit_alone_and_counts_what_it_lost(caplog: pytest.LogCaptureFixture) -> None:
    way = Gated()
    tracer = OtlpTracer(settings(delay=3600.0), {}, way)
    told(tracer, 1)
    tracer.finish()
    assert way.entered.wait(60)
    told(tracer, 4)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        tracer.close(0.0)
        tracer.close(0.0)
    assert time.monotonic() - began < 20, "OpenTelemetry's own end takes thirty seconds"
    assert [fields["dropped"] for fields in lost(caplog)] == [5], "once"
    assert tracer.statistics() == TraceStatistics(5, 0, 5, 0)
    way.gate.set()
    assert tracer._shutdown is not None
    tracer._shutdown.join(60)


def test_spans_of_many_threads_are_all_delivered() -> None:
    bench = Bench(queue=10_000)
    threads = [threading.Thread(target=told, args=(bench.tracer, 200)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bench.spans()) == 1600


def test_a_tracer_is_of_its_process() -> None:
    tracer = tracer_of(TraceConfig(otlp_endpoint="http://localhost:1"), "scheduler", 2)
    assert isinstance(tracer, OtlpTracer)
    assert tracer._resource.attributes["service.instance.id"] == "scheduler-2"
    tracer.close()


def test_a_share_is_sampled_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """So every process and every program with the same ratio decides alike."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.2")
    one, other = (Bench().tracer for _ in range(2))
    names = [f"{number * 0x9E3779B97F4A7C15 % (1 << 64):032x}" for number in range(1, 1001)]
    contexts = [TraceContext(f"00-{name}-{PARENT}-00") for name in names]
    chosen = [one.sample(context) is not None for context in contexts]
    assert chosen == [other.sample(context) is not None for context in contexts]
    assert 150 < sum(chosen) < 250
    one.close()
    other.close()


def test_no_span_of_a_program_is_current() -> None:
    assert OtlpTracer.current() == TraceContext()


def test_times_are_the_walls() -> None:
    before = time.time_ns()
    told = round(time.monotonic() * 1e9) + wall_offset()
    assert before - 50_000_000 < told < time.time_ns() + 50_000_000


@pytest.mark.parametrize("traced", [True, False])
def test_every_process_counts_what_it_told_and_what_was_lost(tmp_path: Path, *, traced: bool) -> None:
    """As /metrics shows them, zero where traces are off."""
    way = Gated(fails=True)
    way.gate.set()
    tracer = OtlpTracer(settings(delay=3600.0), {}, way) if traced else Tracer()
    me = Identity(Role.SCHEDULER, 0, 1, 7)
    exporter = Exporter(me, tmp_path, Histogram(LAG), lambda into: None, tracer)
    told(tracer, 3)
    tracer.close(30)
    values = {name: series.get((), 1.0) for name, series in exporter.snapshot(1.0).values.items()}
    assert values["trace_spans_dropped"] == (3 if traced else 0)
    assert (values["trace_spans"], values["trace_spans_waiting"]) == (0, 0)
    assert {name for name in values if name.startswith("trace")} <= set(METRICS)
