"""Contexts name a trace and a span in it; new traces are sampled by their names."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages import TraceContext
from penstock.services.tracing import context
from penstock.services.tracing.context import (
    TRACEPARENT,
    Ids,
    beginning,
    begins,
    chosen,
    joined,
    under,
)
from tests.services.tracing.tracing import PARENT, SAMPLED, TRACE, UNSAMPLED


def test_a_context_is_taken_apart_and_made() -> None:
    assert (SAMPLED.trace_id, SAMPLED.span_id) == (TRACE, PARENT)
    assert SAMPLED.sampled
    assert not UNSAMPLED.sampled
    assert joined(TRACE, PARENT, sampled=True, state="a=1") == SAMPLED
    assert TRACEPARENT.fullmatch(SAMPLED.traceparent)


def test_a_span_below_keeps_trace_and_state() -> None:
    below = under(SAMPLED, "0" * 15 + "1")
    assert below == TraceContext(f"00-{TRACE}-{'0' * 15}1-01", "a=1")


def test_what_begins_a_trace_has_no_parent() -> None:
    first = beginning(TRACE)
    assert (first.trace_id, first.span_id) == (TRACE, "")
    assert under(first, PARENT).traceparent == SAMPLED.traceparent
    assert begins(first)
    assert not any(map(begins, (SAMPLED, UNSAMPLED, TraceContext())))


def test_what_comes_from_outside_is_valid_or_nothing() -> None:
    assert context.given(SAMPLED.traceparent, "a=1") == SAMPLED
    assert context.given(SAMPLED.traceparent, "a=" + "x" * 511) == TraceContext(SAMPLED.traceparent)
    assert context.given(SAMPLED.traceparent, "a=é") == TraceContext(SAMPLED.traceparent)
    for wrong in ("", "x", SAMPLED.traceparent + "-more", SAMPLED.traceparent.upper(), f"00-{TRACE}", "x" * 9000):
        assert context.given(wrong, "a=1") == TraceContext()


def test_no_context_is_sampled_nowhere() -> None:
    assert not TraceContext().sampled
    assert (TraceContext().trace_id, TraceContext().span_id) == ("", "")


@given(st.integers(0, 255))
def test_the_flag_is_one_bit(flags: int) -> None:
    assert TraceContext(f"00-{TRACE}-{PARENT}-{flags:02x}").sampled == bool(flags & 1)


def test_ids_have_their_length_and_differ() -> None:
    ids = Ids(random.Random(0))
    spans, traces = {ids.span() for _ in range(1000)}, {ids.trace() for _ in range(100)}
    assert (len(spans), len(traces)) == (1000, 100)
    assert {len(name) for name in spans} == {16}
    assert {len(name) for name in traces} == {32}
    assert TRACEPARENT.fullmatch(joined(ids.trace(), ids.span(), sampled=True).traceparent)


def test_none_and_all_are_chosen() -> None:
    ids = Ids(random.Random(0))
    names = [ids.trace() for _ in range(1000)] + ["f" * 32]
    assert not any(chosen(name, 0.0) for name in names)
    assert all(chosen(name, 1.0) for name in names)


def test_a_share_is_chosen_as_opentelemetry_chooses() -> None:
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    ids, theirs = Ids(random.Random(0)), TraceIdRatioBased(0.2)
    names = [ids.trace() for _ in range(2000)]
    ours = [chosen(name, 0.2) for name in names]
    decided = [theirs.should_sample(None, int(name, 16), "x").decision for name in names]
    assert ours == [decision is Decision.RECORD_AND_SAMPLE for decision in decided]
    assert 300 < sum(ours) < 500
