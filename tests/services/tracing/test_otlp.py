"""Spans as OpenTelemetry's exporters send them; nobody waits for a collector, and what it does not take is counted."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from penstock.engine_core.histogram import Histogram
from penstock.protocol.config import RunConfig, TraceConfig
from penstock.protocol.links import Role
from penstock.protocol.messages import TraceContext
from penstock.services.links.handshake import Identity
from penstock.services.metrics.definitions import LAG, METRICS
from penstock.services.metrics.exporter import Exporter
from penstock.services.supervisor import process, run_directory
from penstock.services.tracing.otlp import HANGS, LATE, PATIENCE, RECENT, SILENT, OtlpTracer, wall_offset
from penstock.services.tracing.startup import tracer_of
from penstock.services.tracing.tracer import LAST_WORDS, Sampling, Tracer
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
    assert line.getMessage() == "traces_not_delivered"
    assert "400" in line.__dict__["fields"]["reason"], "that of the exporter, whose own lines are kept out of the log"


def test_exporters_of_a_program_that_hosts_us_keep_their_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.tracer.record("x", SAMPLED, 0.0, 1.0, {})
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").warning("theirs")
    assert [record.getMessage() for record in caplog.records] == ["theirs"]
    bench.spans()


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


def test_a_full_queue_drops_and_counts() -> None:
    way = Gated()
    tracer = OtlpTracer(settings(queue=10, batch=5, delay=0.001), {}, way)
    told(tracer, 1)
    assert way.entered.wait(10)
    told(tracer, 30)
    stand = tracer.statistics()
    assert (stand.recorded, stand.waiting, stand.dropped) == (31, 10, 20)
    way.gate.set()
    tracer.close(30)
    stand = tracer.statistics()
    assert (stand.delivered, stand.dropped, stand.waiting) == (11, 20, 0)
    assert max(way.exports) <= 5


def test_a_batch_that_is_full_does_not_wait_for_its_time() -> None:
    way = Gated()
    way.gate.set()
    tracer = OtlpTracer(settings(queue=100, batch=5, delay=3600.0), {}, way)
    told(tracer, 5)
    assert way.entered.wait(10)
    tracer.close(30)


def test_what_a_collector_does_not_take_is_lost_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    way = Gated(fails=True)
    way.gate.set()
    with caplog.at_level(logging.WARNING):
        tracer = OtlpTracer(settings(queue=100, batch=5, delay=3600.0), {}, way)
        told(tracer, 12)
        tracer.close(30)
    stand = tracer.statistics()
    assert (stand.delivered, stand.dropped, stand.waiting) == (0, 12, 0)
    lines = [record for record in caplog.records if record.getMessage() == "traces_not_delivered"]
    assert len(lines) == 1, "a line now and then, not one for each export"
    assert lines[0].__dict__["fields"]["reason"] == "connection refused"
    assert sum(fields["dropped"] for fields in lost(caplog)) == 12 - sum(way.exports), "what the end did not try"


def lost(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What was logged of spans that an end has lost."""
    return [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "traces_lost"]


def test_an_end_does_not_wait_for_a_collector_that_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    way = Gated()
    tracer = OtlpTracer(settings(delay=0.001), {}, way)
    told(tracer, 1)
    assert way.entered.wait(10)
    threading.Event().wait(PATIENCE + 0.05)
    with caplog.at_level(logging.WARNING):
        tracer.close(3600.0)
    assert [(fields["dropped"], fields["reason"]) for fields in lost(caplog)] == [(1, HANGS)]
    way.gate.set()


def test_an_end_waits_for_its_limit_alone_and_counts_what_it_lost(caplog: pytest.LogCaptureFixture) -> None:
    way = Gated()
    tracer = OtlpTracer(settings(batch=2, delay=3600.0), {}, way)
    told(tracer, 1)
    tracer.finish()
    assert way.entered.wait(60)
    told(tracer, 4)
    with caplog.at_level(logging.WARNING):
        tracer.close(0.0)
        tracer.close(0.0)
    assert [(fields["dropped"], fields["reason"]) for fields in lost(caplog)] == [(5, LATE)], "once"
    way.gate.set()
    tracer.close(60.0)  # the thread ends by itself, and what it was about is not counted a second time
    stand = tracer.statistics()
    assert (stand.recorded, stand.delivered, stand.dropped, stand.waiting) == (5, 0, 5, 0)
    assert way.exports == [1], "it was given up: the rest is not sent"


class Waits:
    """Instead of the thread that ends a tracer: notes how long its end would wait for it, and stays alive."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def join(self, limit: float) -> None:
        self.limits.append(limit)

    def is_alive(self) -> bool:
        return True


def ended(directory: Path, spans: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds that the end of a process with so many unsent spans waits for a collector that hangs."""
    way, waits = Gated(), Waits()
    tracer = OtlpTracer(settings(delay=3600.0), {}, way, directory)
    told(tracer, spans)
    tracer.finish()
    thread = tracer._shutdown
    assert thread is not None
    assert way.entered.wait(60) if spans else True
    with monkeypatch.context() as patched:
        patched.setattr(tracer, "_shutdown", waits)
        tracer.close()
    way.gate.set()
    thread.join(60)
    assert not thread.is_alive()
    (limit,) = waits.limits
    return limit


def test_of_a_server_whose_collector_hangs_one_process_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.tracing.otlp.PATIENCE", 3600.0)  # however slow this machine is
    waits = [ended(tmp_path, 3, monkeypatch) for _ in range(4)]
    assert waits == [LAST_WORDS, 0.0, 0.0, 0.0]
    assert ended(tmp_path / "another", 3, monkeypatch) == LAST_WORDS, "a run directory that is gone is no error"
    for away in (RECENT + 1, -RECENT - 1):  # a collector may be back, and clocks are set
        os.utime(tmp_path / SILENT, (time.time() - away,) * 2)
        assert ended(tmp_path, 3, monkeypatch) == LAST_WORDS
    run_directory.clear(tmp_path, temporary=False)
    assert ended(tmp_path, 3, monkeypatch) == LAST_WORDS, "no server leaves its word to the next one"


def test_a_process_of_a_role_finds_the_run_directory_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.services.tracing.otlp.PATIENCE", 3600.0)
    monkeypatch.setenv(run_directory.SHARED, "to be restored")
    monkeypatch.delenv(process.PARENT, raising=False)
    monkeypatch.setattr("penstock.services.supervisor.logs.setup", lambda *_: None)
    process.enter(Role.TOKENIZER, 0, RunConfig(run_dir=str(tmp_path)))
    way = Gated()
    tracer = OtlpTracer(settings(delay=0.001), {}, way)
    told(tracer, 1)
    assert way.entered.wait(10)
    tracer.close(0.0)
    assert (tmp_path / SILENT).exists()
    way.gate.set()


def test_where_nothing_is_lost_nobody_is_warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(tmp_path, 0, monkeypatch) == LAST_WORDS
    assert not (tmp_path / SILENT).exists()


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
    assert tracer.settings.endpoint == "http://localhost:1/v1/traces"
    tracer.close()


def test_a_share_is_sampled_by_its_name() -> None:
    """So every process and every program with the same ratio decides alike."""
    one, other = (Bench(sampling=Sampling(0.2, parent_based=False)).tracer for _ in range(2))
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
