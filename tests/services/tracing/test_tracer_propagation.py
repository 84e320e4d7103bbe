"""W3C trace context: valid ones travel, others are as none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages import SubmitText, TraceContext
from penstock.services.http.request_context import new_trace
from penstock.services.tracing.tracer import TRACEPARENT, client_context, parse, root
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, words
from tests.services.tracing.tracing import PARENT as SPAN
from tests.services.tracing.tracing import ROOT, SAMPLED, TRACE, UNSAMPLED

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, TraceContext()),
        ({"traceparent": PARENT}, TraceContext(PARENT)),
        ({"traceparent": PARENT, "tracestate": "a=1"}, TraceContext(PARENT, "a=1")),
        ({"traceparent": PARENT, "tracestate": "a=" + "x" * 511}, TraceContext(PARENT)),
        ({"traceparent": "cc" + PARENT[2:] + "-more"}, TraceContext("cc" + PARENT[2:] + "-more")),
        ({"traceparent": PARENT + "-more"}, TraceContext()),
        ({"traceparent": "ff" + PARENT[2:]}, TraceContext()),
        ({"traceparent": PARENT.upper()}, TraceContext()),
        ({"traceparent": PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)}, TraceContext()),
        ({"traceparent": PARENT.replace("b7ad6b7169203331", "0" * 16)}, TraceContext()),
        ({"traceparent": "x" * 9000}, TraceContext()),
        ({"tracestate": "a=1"}, TraceContext()),
    ],
)
def test_trace_context(headers: dict[str, str], expected: TraceContext) -> None:
    assert client_context({name.encode(): [value.encode()] for name, value in headers.items()}) == expected


async def test_the_trace_travels_with_the_request() -> None:
    port = FakeLink(answering(words("ok")))
    async with client(app_state(port)) as http:
        for path, body in (("/v1/chat/completions", HELLO), ("/v1/completions", {"prompt": "a"})):
            await http.post(path, json=body, headers={"traceparent": PARENT})
    assert [request.trace.traceparent for request in port.of(SubmitText)] == [PARENT, PARENT]


def test_a_context_is_taken_apart_and_made() -> None:
    assert (SAMPLED.trace_id, SAMPLED.span_id) == (TRACE, SPAN)
    assert SAMPLED.sampled
    assert not UNSAMPLED.sampled
    assert SAMPLED.unsampled() == UNSAMPLED.unsampled() == UNSAMPLED
    assert ROOT.child(SPAN).traceparent == SAMPLED.traceparent


def test_a_span_below_keeps_trace_and_state() -> None:
    below = SAMPLED.child("0" * 15 + "1")
    assert below == TraceContext(f"00-{TRACE}-{'0' * 15}1-01", "a=1")


def test_what_begins_a_trace_has_no_parent() -> None:
    first, second = root(), root()
    assert first.trace_id != second.trace_id
    assert (len(first.trace_id), first.span_id) == (32, "")
    assert first.is_root
    assert not any(context.is_root for context in (SAMPLED, UNSAMPLED, TraceContext()))
    assert TRACEPARENT.fullmatch(first.child(SPAN).traceparent)


def test_what_comes_from_outside_is_valid_or_nothing() -> None:
    assert parse(SAMPLED.traceparent, "a=1") == SAMPLED
    assert parse(SAMPLED.traceparent, "a=" + "x" * 511) == TraceContext(SAMPLED.traceparent)
    assert parse(SAMPLED.traceparent, "a=é") == TraceContext(SAMPLED.traceparent)
    for wrong in ("", "x", SAMPLED.traceparent + "-more", SAMPLED.traceparent.upper(), f"00-{TRACE}", "x" * 9000):
        assert parse(wrong, "a=1") == TraceContext()


def test_no_context_is_sampled_nowhere() -> None:
    assert not TraceContext().sampled
    assert (TraceContext().trace_id, TraceContext().span_id) == ("", "")
    assert TRACEPARENT.fullmatch(new_trace().traceparent)
    assert not new_trace().sampled


@given(st.integers(0, 255))
def test_the_flag_is_one_bit(flags: int) -> None:
    assert TraceContext(f"00-{TRACE}-{SPAN}-{flags:02x}").sampled == bool(flags & 1)
