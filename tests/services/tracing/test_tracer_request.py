"""Whether an exchange is traced is decided once; what is asked of the engine has the names of the conventions."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.errors import DeadlineExceeded, Unavailable
from penstock.protocol.messages import Finish, Pooling, SubmitText, TraceContext
from penstock.protocol.messages import Sampling as Sampled
from penstock.services.client.output_collector import OutputCollector
from penstock.services.metrics.requests import Timings
from penstock.services.tracing import names
from penstock.services.tracing.tracer import (
    MAX_PROMPTS,
    Operation,
    Operations,
    ServerSpan,
    Tracer,
    operation_of,
)
from tests.services.tracing.tracing import PARENT, ROOT, SAMPLED, TRACE, UNSAMPLED, Bench, Span, child_of, events

NONE = TraceContext()


@pytest.mark.parametrize(
    ("ratio", "variable", "context", "traced"),
    [
        (None, "", NONE, True),
        (0.0, "always_on", NONE, False),
        (0.0, "", SAMPLED, True),
        (None, "", UNSAMPLED, False),
        (None, "always_off", SAMPLED, False),
        (None, "always_on", UNSAMPLED, True),
    ],
)
def test_who_decides(
    ratio: float | None, variable: str, context: TraceContext, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--trace-sampling-ratio, or else OTEL_TRACES_SAMPLER."""
    if variable:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", variable)
    bench = Bench(ratio=ratio)
    span = ServerSpan(bench.tracer, context)
    assert span.recording is traced
    assert (bench.tracer.sample(context) is not None) is traced
    recorded = span.context
    assert recorded.sampled is traced
    if context.traceparent:
        assert recorded.trace_id == TRACE, "the client's trace goes on, recorded or not"
    bench.spans()


def test_what_came_goes_on_and_nothing_begins_a_trace() -> None:
    bench = Bench()
    assert bench.tracer.sample(SAMPLED) == SAMPLED
    first, second = bench.tracer.sample(NONE), bench.tracer.sample(NONE)
    assert first is not None
    assert second is not None
    assert first.is_root
    assert first.trace_id != second.trace_id
    bench.spans()


def test_a_share_is_a_share() -> None:
    bench = Bench(ratio=0.25)
    count = sum(ServerSpan(bench.tracer, NONE).recording for _ in range(2000))
    assert 350 < count < 650
    bench.spans()


def test_nothing_is_carried_where_there_is_no_context_and_no_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    bench = Bench()
    assert ServerSpan(bench.tracer, NONE).context == NONE
    assert ServerSpan(bench.tracer, UNSAMPLED).context == UNSAMPLED
    assert ServerSpan(bench.tracer, SAMPLED).context.traceparent == UNSAMPLED.traceparent
    assert bench.spans() == []


@pytest.mark.parametrize("context", [NONE, SAMPLED, UNSAMPLED])
def test_where_traces_are_off_the_clients_context_goes_on_as_it_is(context: TraceContext) -> None:
    span = ServerSpan(Tracer(), context)
    assert (span.recording, span.context) == (False, context)
    assert Operations().begin((asked(trace=context),), 1.0) is None


def test_the_span_of_an_exchange() -> None:
    bench = Bench()
    span = ServerSpan(bench.tracer, SAMPLED)
    span.end("POST", "/v1/completions", 200, {names.HTTP_REQUEST_ID: "abc"}, (1.0, 2.0))
    (recorded,) = bench.spans()
    assert (recorded.name, recorded.server, recorded.remote) == ("POST /v1/completions", True, True)
    assert (recorded.parent.span_id, span.context.span_id) == (PARENT, recorded.id)
    assert recorded.attributes == {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "penstock.http.request_id": "abc",
    }  # fmt: skip


@pytest.mark.parametrize(("status", "kind", "error"), [(200, None, None), (404, "404", None), (503, "503", "")])
def test_an_error_is_the_servers_from_500_on(status: int, kind: str | None, error: str | None) -> None:
    bench = Bench()
    span = ServerSpan(bench.tracer, NONE)
    span.end("GET", "other", status, {}, (1.0, 2.0))
    (recorded,) = bench.spans()
    assert (recorded.attributes.get(names.ERROR_TYPE), recorded.error, recorded.remote) == (kind, error, False)
    assert recorded.parent.span_id == ""


def asked(number: int = 1, **given: Any) -> SubmitText:
    fields: dict[str, Any] = {"prompt": "a", "trace": SAMPLED, "sampling": Sampled(temperature=0.5, top_k=3, seed=9)}
    return SubmitText(id=number, **fields | given)


def replied(**given: Any) -> OutputCollector:
    collector = OutputCollector(1, 1, stream=True, timings=Timings(), now=1.0, name="chatcmpl-1")
    collector.prompts[0].tokens, collector.prompts[0].cached_tokens = 10, 4
    collector.choices[0].tokens, collector.choices[0].finish = 21, given.pop("finish", Finish.STOP)
    collector.choices[0].drafted = given.pop("drafted", (0, 0))
    for name, value in given.items():
        setattr(collector, name, value)
    return collector


def spans(*requests: SubmitText, ended: OutputCollector | None = None) -> tuple[list[Span], Operation]:
    bench = Bench()
    operation = Operation(bench.tracer, requests or (asked(),), "demo", 1.0)
    operation.end(ended if ended is not None else replied(), 5.0)
    return bench.spans(), operation


def test_one_prompt() -> None:
    recorded, operation = spans(asked(26, n=2, sampling=Sampled(temperature=0.5, top_k=3, seed=9, max_tokens=50)))
    (span,) = recorded
    assert (span.name, span.start, span.end, span.error) == ("text_completion demo", 1.0, 5.0, None)
    assert child_of(span, SAMPLED)
    assert span.attributes == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "penstock", "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo", "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 3, "gen_ai.request.seed": 9, "gen_ai.request.max_tokens": 50,
        "gen_ai.request.choice.count": 2, "gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 21,
        "gen_ai.usage.cache_read.input_tokens": 4, "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.id": "chatcmpl-1", "penstock.request.id": "1a",
    }  # fmt: skip
    assert [request.trace for request in operation.requests] == [operation.context]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "text_completion"),
        ({"prompt": None, "messages": b"[]"}, "chat"),
        ({"pooling": Pooling(kind="mean")}, "embeddings"),
    ],
)
def test_names_of_operations(given: dict[str, Any], name: str) -> None:
    assert operation_of(asked(**given)) == name


def test_a_vector_has_no_sampling() -> None:
    (span,), _ = spans(asked(pooling=Pooling(kind="mean")))
    assert not [name for name in span.attributes if "temperature" in name or "seed" in name]


def test_several_prompts_have_a_span_each() -> None:
    recorded, operation = spans(*(asked(number) for number in range(1, 4)))
    whole, prompts = recorded[0], recorded[1:]
    assert [span.name for span in prompts] == [names.PROMPT] * 3
    assert all(child_of(span, SAMPLED.child(whole.id)) for span in prompts)
    assert [span.attributes[names.PROMPT_INDEX] for span in prompts] == [0, 1, 2]
    assert [request.trace for request in operation.requests] == [SAMPLED.child(span.id) for span in prompts]
    assert whole.attributes[names.PROMPTS] == 3


def test_only_some_prompts_of_many_are_recorded() -> None:
    recorded, operation = spans(*(asked(number) for number in range(1, MAX_PROMPTS + 11)))
    assert sum(span.name == names.PROMPT for span in recorded) == MAX_PROMPTS
    assert [request.trace.sampled for request in operation.requests] == [True] * MAX_PROMPTS + [False] * 10
    assert recorded[0].attributes[names.SKIPPED_PROMPTS] == 10


def test_a_stream_says_how_fast_it_was() -> None:
    recorded, operation = spans(ended=replied(first_token=3.0))
    whole, stream = recorded
    assert (stream.name, stream.start, stream.end) == (names.STREAM, 3.0, 5.0)
    assert child_of(stream, operation.context)
    assert whole.attributes[names.GEN_AI_TIME_TO_FIRST_TOKEN] == 2.0
    assert whole.attributes[names.GEN_AI_TIME_PER_TOKEN] == pytest.approx(0.1)


def test_drafts_are_counted() -> None:
    (span,), _ = spans(ended=replied(drafted=(5, 2)))
    assert (span.attributes[names.ACCEPTED_DRAFTS], span.attributes[names.REJECTED_DRAFTS]) == (5, 2)


def test_a_client_that_left() -> None:
    (span,), _ = spans(ended=replied(disconnected=True, finish=Finish.NONE))
    assert events(span) == [names.CLIENT_LEFT]
    assert span.attributes[names.ERROR_TYPE] == "client_left"
    assert names.GEN_AI_FINISH_REASONS not in span.attributes


def test_a_deadline() -> None:
    (span,), _ = spans(ended=replied(error=DeadlineExceeded("too late"), finish=Finish.NONE))
    assert events(span) == [names.DEADLINE]
    assert span.error == "too late"


def test_an_error_and_what_happened_before() -> None:
    bench = Bench()
    operation = Operation(bench.tracer, (asked(),), "demo", 1.0)
    operation.add_event(names.MOVED, 2.0)
    operation.end(replied(error=Unavailable("gone", code="part_lost")), 3.0)
    (span,) = bench.spans()
    assert (events(span), span.error, span.attributes[names.ERROR_TYPE]) == ([names.MOVED], "gone", "part_lost")


@pytest.mark.parametrize("trace", [UNSAMPLED, TraceContext()])
def test_what_is_not_traced_has_no_operation(trace: TraceContext) -> None:
    bench = Bench()
    operations = Operations(bench.tracer, "demo")
    assert operations.begin((asked(trace=trace),), 1.0) is None
    assert operations.begin((asked(),), 1.0) is not None
    assert bench.spans() == []


def test_one_that_begins_a_trace() -> None:
    """A program's request, where there is no exchange above it."""
    bench = Bench()
    operation = Operations(bench.tracer, "demo").begin((asked(trace=ROOT),), 1.0)
    assert operation is not None
    (request,) = operation.requests
    operation.end(replied(), 2.0)
    (root,) = bench.spans()
    assert (root.parent.span_id, root.parent.trace_id) == ("", TRACE)
    assert (request.trace.trace_id, request.trace.span_id, request.trace.sampled) == (TRACE, root.id, True)


def test_a_refusal_is_an_operation_that_failed() -> None:
    bench = Bench()
    operation = Operation(bench.tracer, (asked(),), "demo", 1.0)
    collector = OutputCollector(1, 1, stream=True, timings=Timings(), now=1.0, name="chatcmpl-1")
    operation.end(collector, 3.0, Unavailable("gone", code="part_lost"))
    (span,) = bench.spans()
    assert (span.error, span.attributes[names.ERROR_TYPE]) == ("gone", "part_lost")
    assert names.GEN_AI_RESPONSE_ID not in span.attributes, "there is none"
    assert collector.error is None, "it may be submitted again"
