"""Telling never waits: a full queue drops and counts, a collector that fails loses its batch, an end has its limit."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.engine_core.histogram import Histogram
from penstock.protocol.config import TraceConfig
from penstock.protocol.links import Role
from penstock.services.links.link import Self
from penstock.services.metrics.definitions import EVERY_PROCESS
from penstock.services.metrics.snapshot import LAG, Vitals
from penstock.services.tracing.clock import Clock
from penstock.services.tracing.silence import Silence
from penstock.services.tracing.span import Span
from penstock.services.tracing.tracer import HANGS, LAST_WORDS, LATE, PATIENCE, Tracer, Undelivered, tracer_of
from tests.services.tracing.tracing import SAMPLED, Bench, Kept, settings


class Gated:
    """A collector that takes nothing before it is told to, and may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.exports: list[int] = []
        self.fails = fails

    def export(self, spans: Any) -> None:
        self.entered.set()
        self.gate.wait()
        self.exports.append(len(spans))
        if self.fails:
            raise Undelivered("connection refused")

    def close(self) -> None:
        """Nothing is open."""


def span(name: str = "x") -> Span:
    return Span(parent=SAMPLED, id="0" * 15 + "1", name=name, start=0.0, end=1.0)


def told(tracer: Tracer, count: int) -> None:
    for _ in range(count):
        tracer.tell(span())


def test_all_that_is_told_is_delivered_in_order() -> None:
    bench = Bench()
    for number in range(100):
        bench.tracer.tell(span(str(number)))
    assert [each.name for each in bench.told()] == list(map(str, range(100)))
    assert bench.tracer.statistics().delivered == bench.tracer.statistics().told == 100


def test_a_full_queue_drops_and_counts() -> None:
    way = Gated()
    tracer = Tracer(settings(queue=10, batch=5, delay=0.001), {}, Clock(0), way)
    told(tracer, 1)
    assert way.entered.wait(10)
    told(tracer, 30)
    stand = tracer.statistics()
    assert (stand.told, stand.waiting, stand.dropped) == (31, 10, 20)
    way.gate.set()
    tracer.close(30)
    stand = tracer.statistics()
    assert (stand.delivered, stand.dropped, stand.waiting) == (11, 20, 0)
    assert max(way.exports) <= 5


def test_a_batch_that_is_full_does_not_wait_for_its_time() -> None:
    way = Gated()
    way.gate.set()
    tracer = Tracer(settings(queue=100, batch=5, delay=3600.0), {}, Clock(0), way)
    told(tracer, 5)
    assert way.entered.wait(10)
    tracer.close(30)


def test_what_a_collector_does_not_take_is_lost_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    way = Gated(fails=True)
    way.gate.set()
    with caplog.at_level(logging.WARNING):
        tracer = Tracer(settings(queue=100, batch=5, delay=3600.0), {}, Clock(0), way)
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
    tracer = Tracer(settings(delay=0.001), {}, Clock(0), way)
    told(tracer, 1)
    assert way.entered.wait(10)
    threading.Event().wait(PATIENCE + 0.05)
    with caplog.at_level(logging.WARNING):
        tracer.close(3600.0)
    assert [(fields["dropped"], fields["reason"]) for fields in lost(caplog)] == [(1, HANGS)]
    way.gate.set()


def test_an_end_waits_for_its_limit_alone_and_counts_what_it_lost(caplog: pytest.LogCaptureFixture) -> None:
    way = Gated()
    tracer = Tracer(settings(batch=2, delay=3600.0), {}, Clock(0), way)
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
    assert (stand.told, stand.delivered, stand.dropped, stand.waiting) == (5, 0, 5, 0)
    assert way.exports == [1], "it was given up: the rest is not sent"


class Waits:
    """Instead of a tracer's thread: notes how long its end would wait for it, and stays alive."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def join(self, limit: float) -> None:
        self.limits.append(limit)

    def is_alive(self) -> bool:
        return True


def ended(silence: Silence, spans: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds that the end of a process with so many unsent spans waits for a collector that hangs."""
    way, waits = Gated(), Waits()
    tracer = Tracer(settings(delay=3600.0), {}, Clock(0), way, silence)
    thread = tracer._thread
    told(tracer, spans)
    tracer.finish()
    assert way.entered.wait(60) if spans else True
    with monkeypatch.context() as patched:
        patched.setattr(tracer, "_thread", waits)
        tracer.close()
    way.gate.set()
    thread.join(60)
    assert not thread.is_alive()
    (limit,) = waits.limits
    return limit


def test_of_a_server_whose_collector_hangs_one_process_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.tracing.tracer.PATIENCE", 3600.0)  # however slow this machine is
    waits = [ended(Silence(tmp_path), 3, monkeypatch) for _ in range(4)]
    assert waits == [LAST_WORDS, 0.0, 0.0, 0.0]
    assert ended(Silence(tmp_path / "another"), 3, monkeypatch) == LAST_WORDS


def test_where_nothing_is_lost_nobody_is_warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(Silence(tmp_path), 0, monkeypatch) == LAST_WORDS
    assert not Silence(tmp_path).known()


def test_spans_of_many_threads_are_all_told() -> None:
    bench = Bench(queue=10_000)
    threads = [threading.Thread(target=told, args=(bench.tracer, 200)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bench.told()) == 1600


def test_without_a_collector_there_is_no_tracer_and_no_sdk() -> None:
    assert tracer_of(TraceConfig(), "api", 0) is None


def test_the_sdk_is_not_imported_where_nothing_is_told() -> None:
    import subprocess
    import sys

    script = "import penstock.services.http.main, penstock.services.scheduler.main, penstock.services.tokenizer.main\n"
    script += "import penstock.services.supervisor.launcher, sys\n"
    script += "import penstock.services.llm.llm, penstock.services.llm.async_llm\n"
    script += "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_tracer_is_of_its_process() -> None:
    tracer = tracer_of(TraceConfig(otlp_endpoint="http://localhost:1"), "scheduler", 2)
    assert tracer is not None
    assert tracer.settings.endpoint == "http://localhost:1/v1/traces"
    tracer.close()


def test_kept_is_a_collector() -> None:
    kept = Kept()
    kept.export([span()])
    kept.close()
    assert len(kept.spans) == 1


@pytest.mark.parametrize("traced", [True, False])
def test_every_process_counts_what_it_told_and_what_was_lost(tmp_path: Path, *, traced: bool) -> None:
    """As /metrics shows them, zero where no traces are told."""
    way = Gated(fails=True)
    way.gate.set()
    tracer = Tracer(settings(delay=3600.0), {}, Clock(0), way) if traced else None
    me = Self(Role.SCHEDULER, 0, 1, 7)
    vitals = Vitals(me, tmp_path, Histogram(LAG), tracer)
    if tracer is not None:
        told(tracer, 3)
        tracer.close(30)
    values = {sample.name: sample.value for sample in vitals.sheet().figures(me, 1.0).samples}
    assert values["trace_spans_dropped"] == (3 if traced else 0)
    assert (values["trace_spans"], values["trace_spans_waiting"]) == (0, 0)
    known = {metric.name for metric in EVERY_PROCESS}
    assert {name for name in values if name.startswith("trace")} <= known
