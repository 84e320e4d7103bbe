"""The scheduler's spans: some steps, linked to the requests in them, waits for grammars, stays."""

from __future__ import annotations

from typing import Any

from penstock.engine_core.scheduling.history import StepFacts
from penstock.protocol.messages import Sampling, SubmitTokens, TraceContext
from penstock.protocol.steps import StepPlan, StepResult
from penstock.services.tracing import names
from penstock.services.tracing.context import Ids, joined
from penstock.services.tracing.scheduling import LOST, SchedulerTraces
from penstock.services.tracing.span import MOST_LINKS
from tests.services.tracing.test_stays import spans as stay_spans
from tests.services.tracing.tracing import SAMPLED, UNSAMPLED, Bench, named


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
    (step,) = bench.told()
    assert plan.trace is not None
    assert (plan.trace.trace_id, plan.trace.span_id) == (step.parent.trace_id, step.id)
    assert plan.trace.sampled
    assert step.parent.span_id == ""
    assert (step.name, step.start, step.end, step.links) == (names.STEP, 10.0, 10.5, (SAMPLED,))
    told = step.attributes
    assert (told[names.BATCH], told[names.STEP_TOKENS], told[names.BLOCKS_USED]) == (3, 100, 40)
    assert (told[names.DEVICE_SECONDS], told[names.WAITED_SECONDS], told[names.DRAFTING_SECONDS]) == (0.25, 0.125, 0.5)


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
    bench.told()


def test_no_steps_where_none_are_wanted() -> None:
    bench = Bench(steps_per_second=0.0)
    assert not SchedulerTraces(bench.tracer).due(1e9)
    bench.told()


def test_links_are_bounded_and_the_rest_is_counted() -> None:
    bench, ids = Bench(), Ids()
    traces = SchedulerTraces(bench.tracer)
    many = tuple(joined(ids.trace(), ids.span(), sampled=True) for _ in range(200))
    traces.planned(StepPlan(step=7, epoch=1), facts(traced=many), 1.0)
    traces.applied(result(), 2.0)
    (step,) = bench.told()
    assert step.links == many[:MOST_LINKS]
    assert step.attributes[names.UNLINKED] == 200 - MOST_LINKS


def test_a_step_whose_executors_are_lost_is_an_error() -> None:
    bench = Bench()
    traces = SchedulerTraces(bench.tracer)
    traces.planned(StepPlan(step=7, epoch=1), facts(), 1.0)
    traces.applied(result(8), 1.5)  # another step
    traces.planned(StepPlan(step=8, epoch=2), facts(8, epoch=2), 3.0)
    traces.applied(result(8, epoch=1), 3.5)  # of an epoch that is over
    (lost,) = bench.told()
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
    first, third = bench.told()
    assert (first.name, first.start, first.end, first.error) == (names.PREPARE_GRAMMAR, 2.0, 5.0, None)
    assert (third.start, third.end, third.error) == (4.0, 6.0, "it failed")


def test_stays_are_told() -> None:
    bench = Bench()
    from penstock.engine_core.scheduling.history import Stay

    stay = Stay(trace=SAMPLED, request=1, choice=0, queued=0.0, entered=None, left=1.0, end="abort",
                prompt_tokens=1, reused=0, chunks=(), decoding=None, first=False, tokens=0, accepted=0,
                rejected=0, marks=())  # fmt: skip
    SchedulerTraces(bench.tracer).tell([stay])
    assert named(bench.told(), names.QUEUE).end == 1.0
    assert stay_spans()
