"""A start is a trace, of one process or of all of them below their launcher."""

from __future__ import annotations

from penstock.protocol.messages import TraceContext
from penstock.services.supervisor.process import StartupPhase, StartupPhases
from penstock.services.tracing.startup import PARENT, STATE, Start, environment
from penstock.services.tracing.tracer import Tracer
from tests.services.tracing.tracing import SAMPLED, Bench, child_of

STAGES = StartupPhases()
STAGES.all = [StartupPhase("importing", 1.0), StartupPhase("loading weights", 2.0), StartupPhase("warming up", 5.0)]


def test_stages_are_below_their_process() -> None:
    bench = Bench()
    Start(bench.tracer, "executor-0", STAGES, {}).ready(9.0, {"a": 1})
    whole, *stages = bench.spans()
    assert (whole.name, whole.start, whole.end, whole.attributes) == ("start executor-0", 1.0, 9.0, {"a": 1})
    assert whole.parent.span_id == ""
    assert [(span.name, span.start, span.end) for span in stages] == [
        ("importing", 1.0, 2.0), ("loading weights", 2.0, 5.0), ("warming up", 5.0, 9.0),
    ]  # fmt: skip
    assert {span.parent.span_id for span in stages} == {whole.id}
    assert {span.parent.trace_id for span in stages} == {whole.parent.trace_id}


def test_children_are_below_their_launcher() -> None:
    bench = Bench()
    launcher = Start(bench.tracer, "launcher", STAGES, {PARENT: SAMPLED.traceparent, STATE: SAMPLED.tracestate})
    child = Start(bench.tracer, "api-0", STAGES, environment(launcher.context))
    child.ready(9.0)
    launcher.ready(9.0)
    spans = bench.spans()
    assert spans[0].parent == launcher.context
    assert spans[0].remote
    launched = next(span for span in spans if span.name == "start launcher")
    assert child_of(launched, SAMPLED), "a start may be part of a larger one"


def test_what_is_no_context_begins_a_trace() -> None:
    bench = Bench()
    for junk in ("", "00-abc", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", SAMPLED.traceparent + "-x"):
        start = Start(bench.tracer, "api-0", STAGES, {PARENT: junk})
        assert start.context.trace_id != TraceContext(junk).trace_id
    bench.spans()


def test_a_process_tells_its_start_once() -> None:
    bench = Bench()
    stages = StartupPhases()
    stages.note("waiting")
    start = Start(bench.tracer, "api-0", stages)
    start.ready(stages.all[-1].began + 1.0)
    start.ready(stages.all[-1].began + 2.0)
    assert [span.name for span in bench.spans()] == ["start api-0", "importing", "waiting"]


def test_nothing_without_a_tracer() -> None:
    start = Start(Tracer(), "api-0", StartupPhases())
    start.ready(1.0)
    assert environment(start.context) == {}
