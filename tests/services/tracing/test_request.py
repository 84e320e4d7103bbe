"""Whether an exchange is traced is decided once, by the client or by the share."""

from __future__ import annotations

import pytest

from penstock.protocol.messages import TraceContext
from penstock.services.tracing import names
from penstock.services.tracing.context import begins
from penstock.services.tracing.names import Kind
from penstock.services.tracing.request import carried, decided, served
from penstock.services.tracing.settings import Sampling
from tests.services.tracing.tracing import PARENT, SAMPLED, TRACE, UNSAMPLED, Bench

NONE = TraceContext()


@pytest.mark.parametrize(
    ("sampling", "context", "traced"),
    [
        (Sampling(1.0), NONE, True),
        (Sampling(0.0), NONE, False),
        (Sampling(0.0), SAMPLED, True),
        (Sampling(1.0), UNSAMPLED, False),
        (Sampling(0.0, follow=False), SAMPLED, False),
        (Sampling(1.0, follow=False), UNSAMPLED, True),
    ],
)
def test_who_decides(sampling: Sampling, context: TraceContext, traced: bool) -> None:
    bench = Bench(sampling=sampling)
    span = served(bench.tracer, context)
    assert (span is not None) is traced
    assert (decided(bench.tracer, context) is not None) is traced
    told = carried(context, span)
    assert told.sampled is traced
    if context.traceparent:
        assert told.trace_id == TRACE, "the client's trace goes on, told or not"
    bench.told()


def test_what_came_goes_on_and_nothing_begins_a_trace() -> None:
    bench = Bench()
    assert decided(bench.tracer, SAMPLED) == SAMPLED
    first, second = decided(bench.tracer, NONE), decided(bench.tracer, NONE)
    assert first is not None
    assert second is not None
    assert begins(first)
    assert first.trace_id != second.trace_id
    bench.told()


def test_a_share_is_a_share() -> None:
    bench = Bench(sampling=Sampling(0.25))
    count = sum(served(bench.tracer, NONE) is not None for _ in range(2000))
    assert 350 < count < 650
    bench.told()


def test_nothing_is_carried_where_nothing_came_and_nothing_is_told() -> None:
    assert carried(NONE, None) == NONE
    assert carried(UNSAMPLED, None) == UNSAMPLED
    assert carried(SAMPLED, None).traceparent == UNSAMPLED.traceparent


def test_the_span_of_an_exchange() -> None:
    bench = Bench()
    span = served(bench.tracer, SAMPLED)
    assert span is not None
    span.end("POST", "/v1/completions", 200, {names.HTTP_REQUEST_ID: "abc"}, (1.0, 2.0))
    (told,) = bench.told()
    assert (told.name, told.kind, told.remote) == ("POST /v1/completions", Kind.SERVER, True)
    assert (told.parent.span_id, span.context.span_id) == (PARENT, told.id)
    assert told.attributes == {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "penstock.http.request_id": "abc",
    }  # fmt: skip


@pytest.mark.parametrize(("status", "kind", "error"), [(200, None, None), (404, "404", None), (503, "503", "")])
def test_an_error_is_the_servers_from_500_on(status: int, kind: str | None, error: str | None) -> None:
    bench = Bench()
    span = served(bench.tracer, NONE)
    assert span is not None
    span.end("GET", "other", status, {}, (1.0, 2.0))
    (told,) = bench.told()
    assert (told.attributes.get(names.ERROR_TYPE), told.error, told.remote) == (kind, error, False)
    assert told.parent.span_id == ""
