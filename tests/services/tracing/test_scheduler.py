"""The scheduler's spans: some steps, linked to the requests in them, waits for grammars, stays."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine_core.scheduling.tracing import PrefillChunk, Stay, StepFacts
from penstock.protocol.messages import Sampling, SubmitTokens, TraceContext
from penstock.protocol.steps import StepPlan, StepResult
from penstock.services.tracing import names
from penstock.services.tracing.scheduler import LOST, MAX_CHUNKS, MAX_LINKS, SchedulerTraces, record_stay
from penstock.services.tracing.tracer import root
from tests.services.tracing.tracing import PARENT, SAMPLED, UNSAMPLED, Bench, Span, child_of, events, named


def facts(step: int = 7, *, epoch: int = 1, traced: tuple[TraceContext, ...] = (SAMPLED,), **given: Any) -> StepFacts:
    fields: dict[str, Any] = {"rows": 3, "chunks": 1, "tokens": 100, "drafts": 4, "masked": 2, "running": 5,
                              "waiting": 6, "blocks": 100, "blocks_used": 40}  # fmt: skip
    return StepFacts(step=step, epoch=epoch, traced=traced, **fields | given)


def result(step: int = 7, epoch: int = 1) -> StepResult:
    return StepResult(step=step, epoch=epoch, token_ids=b"", busy=0.25, waited=0.125, drafting=0.5)


def test_a_step_is_a_trace_that_goes_on_at_the_executors() -> None:
    bench = Bench()
    traces = SchedulerTraces(bench.tracer)
    plan = traces.planned(StepPlan(step=7, epoch=1), facts(), 10.0)
    traces.applied(result(), 10.5)
    (step,) = bench.spans()
    assert plan.trace is not None
    assert (plan.trace.trace_id, plan.trace.span_id) == (step.parent.trace_id, step.id)
    assert plan.trace.sampled
    assert step.parent.span_id == ""
    assert (step.name, step.start, step.end, step.links) == (names.STEP, 10.0, 10.5, (SAMPLED,))
    attributes = step.attributes
    assert (attributes[names.BATCH], attributes[names.STEP_TOKENS], attributes[names.BLOCKS_USED]) == (3, 100, 40)
    assert (attributes[names.DEVICE_SECONDS], attributes[names.WAITED_SECONDS], attributes[names.DRAFTING_SECONDS]) == (
        0.25,
        0.125,
        0.5,
    )


def test_steps_have_spans_now_and_then() -> None:
    bench = Bench(steps_per_second=10.0)
    traces = SchedulerTraces(bench.tracer)
    taken = []
    for number in range(100):
        now = 1.0 + number / 64
        if traces.due(now):
            traces.planned(StepPlan(step=number, epoch=1), facts(number), now)
            taken.append(number)
    assert len(taken) == 15  # of one and a half seconds
    bench.spans()


def test_no_steps_where_none_are_wanted() -> None:
    bench = Bench(steps_per_second=0.0)
    assert not SchedulerTraces(bench.tracer).due(1e9)
    bench.spans()


def test_links_are_bounded_and_the_rest_is_counted() -> None:
    bench = Bench()
    traces = SchedulerTraces(bench.tracer)
    many = tuple(root().child(PARENT) for _ in range(200))
    traces.planned(StepPlan(step=7, epoch=1), facts(traced=many), 1.0)
    traces.applied(result(), 2.0)
    (step,) = bench.spans()
    assert step.links == many[:MAX_LINKS]
    assert step.attributes[names.UNLINKED] == 200 - MAX_LINKS


def test_a_step_whose_executors_are_lost_is_an_error() -> None:
    bench = Bench()
    traces = SchedulerTraces(bench.tracer)
    traces.planned(StepPlan(step=7, epoch=1), facts(), 1.0)
    traces.applied(result(8), 1.5)  # another step
    traces.planned(StepPlan(step=8, epoch=2), facts(8, epoch=2), 3.0)
    traces.applied(result(8, epoch=1), 3.5)  # of an epoch that is over
    (lost,) = bench.spans()
    assert (lost.error, lost.end, lost.attributes[names.STEP_NUMBER]) == (LOST, 3.0, 7)


def request(number: int, trace: TraceContext) -> SubmitTokens:
    return SubmitTokens(id=number, token_ids=b"", sampling=Sampling(), trace=trace)


def test_a_wait_for_a_grammar_is_a_span() -> None:
    bench = Bench()
    traces = SchedulerTraces(bench.tracer)
    for number, trace in ((1, SAMPLED), (2, UNSAMPLED), (3, SAMPLED)):
        traces.wait(request(number, trace), 1.0 + number)
    traces.admit(request(1, SAMPLED), 5.0, None)
    traces.admit(request(2, UNSAMPLED), 5.0, None)
    traces.admit(request(3, SAMPLED), 6.0, "it failed")
    traces.admit(request(4, SAMPLED), 6.0, None)  # it never waited
    first, third = bench.spans()
    assert (first.name, first.start, first.end, first.error) == (names.PREPARE_GRAMMAR, 2.0, 5.0, None)
    assert (third.start, third.end, third.error) == (4.0, 6.0, "it failed")


def test_stays_are_told() -> None:
    bench = Bench()
    stay = Stay(trace=SAMPLED, request=1, sequence=0, queued=0.0, entered=None, left=1.0, end="abort",
                prompt_tokens=1, reused=0, chunks=(), decoding=None, first=False, tokens=0, accepted=0,
                rejected=0, marks=())  # fmt: skip
    SchedulerTraces(bench.tracer).record([stay])
    assert named(bench.spans(), names.QUEUE).end == 1.0


CHUNKS = (PrefillChunk(3, 0, 512, 1.0, 1.5), PrefillChunk(4, 512, 88, 1.4, 2.0))


def stay_spans(**given: Any) -> list[Span]:
    fields: dict[str, Any] = {
        "trace": SAMPLED, "request": 255, "sequence": 1, "queued": 0.5, "entered": 1.0, "left": 9.0, "end": "stop",
        "prompt_tokens": 600, "reused": 16, "chunks": CHUNKS, "decoding": 2.0, "first": True, "tokens": 40,
        "accepted": 5, "rejected": 3, "marks": ((4.0, 16), (6.0, 32)),
    }  # fmt: skip
    bench = Bench()
    record_stay(bench.tracer, Stay(**fields | given))
    return bench.spans()


def test_a_whole_stay() -> None:
    found = stay_spans()
    assert [span.name for span in found] == [names.QUEUE, names.PREFILL, names.PREFILL, names.DECODE]
    assert all(child_of(span, SAMPLED) for span in found)
    assert all(span.attributes[names.REQUEST] == "ff" and span.attributes[names.CHOICE] == 1 for span in found)
    assert [(span.start, span.end) for span in found] == [(0.5, 1.0), (1.0, 1.5), (1.4, 2.0), (2.0, 9.0)]
    assert len({span.id for span in found}) == 4


def test_chunks_say_which_positions_they_ran() -> None:
    second = stay_spans()[2].attributes
    assert (second[names.CHUNK_START], second[names.CHUNK_TOKENS], second[names.STEP_NUMBER]) == (512, 88, 4)
    assert (second[names.PROMPT_TOKENS], second[names.REUSED_TOKENS]) == (600, 16)


def test_decoding_marks_the_first_token_and_every_so_many() -> None:
    decode = named(stay_spans(), names.DECODE)
    assert events(decode) == [names.FIRST_TOKEN, names.TOKENS, names.TOKENS]
    assert [event.time for event in decode.events] == [2.0, 4.0, 6.0]
    assert decode.events[1].attributes == {names.TOKENS_SO_FAR: 16}
    assert decode.attributes[names.OUTPUT_TOKENS] == 40
    assert (decode.attributes[names.ACCEPTED_DRAFTS], decode.attributes[names.REJECTED_DRAFTS]) == (5, 3)
    assert events(named(stay_spans(first=False), names.DECODE))[0] == names.TOKENS


@pytest.mark.parametrize(
    ("end", "event"), [("preempted", names.PREEMPTED), ("restarted", names.RESTARTED), ("abort", names.ABORTED)]
)
def test_what_cuts_a_stay_short_is_an_event(end: str, event: str) -> None:
    assert events(named(stay_spans(end=end, marks=()), names.DECODE)) == [names.FIRST_TOKEN, event]
    waiting = stay_spans(end=end, entered=None, chunks=(), decoding=None)
    assert [span.name for span in waiting] == [names.QUEUE]
    assert (events(waiting[0]), waiting[0].end, waiting[0].attributes[names.END]) == ([event], 9.0, end)


def test_a_stay_cut_in_a_chunk_shows_the_chunk_that_did_not_end() -> None:
    found = stay_spans(end="abort", chunks=CHUNKS[:1], decoding=None)
    assert [span.name for span in found] == [names.QUEUE, names.PREFILL, names.PREFILL]
    assert (found[2].start, found[2].end, events(found[2])) == (1.5, 9.0, [names.ABORTED])
    alone = stay_spans(end="restarted", chunks=(), decoding=None)[-1]
    assert (alone.start, alone.end) == (1.0, 9.0)


@pytest.mark.parametrize("end", ["error", "grammar", "unavailable"])
def test_a_failure_is_the_status_of_the_phase_that_it_ended(end: str) -> None:
    assert [span.error for span in stay_spans(end=end)] == [None, None, None, end]
    assert stay_spans(end=end, entered=None)[-1].error == end
    assert stay_spans(end=end, decoding=None)[-1].error == end


def test_a_vector_is_its_prompt_alone() -> None:
    assert [span.name for span in stay_spans(decoding=None, tokens=0)] == [names.QUEUE, names.PREFILL, names.PREFILL]


def test_chunks_are_bounded() -> None:
    many = tuple(PrefillChunk(step, step, 1, 1.0, 2.0) for step in range(1000))
    assert sum(span.name == names.PREFILL for span in stay_spans(chunks=many)) == MAX_CHUNKS
