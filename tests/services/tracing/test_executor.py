"""An executor's spans: prompts chunk by chunk, decoding in one, whatever becomes of the slot."""

from __future__ import annotations

import itertools
import struct

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages import Sampling, TraceContext
from penstock.protocol.steps import SlotStart, StepPlan, StepResult
from penstock.services.tracing import names
from penstock.services.tracing.executor import QUIET, ExecutorTraces
from penstock.services.tracing.tracer import root
from tests.services.tracing.tracing import SAMPLED, UNSAMPLED, Bench, child_of, named


def ints(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def start(slot: int, trace: TraceContext = SAMPLED, choice: int = 0) -> SlotStart:
    return SlotStart(slot=slot, token_ids=ints(1), prompt_tokens=1, computed=0, blocks=ints(1), sampling=Sampling(),
                     seed=0, trace=trace, choice=choice)  # fmt: skip


class Execution:
    """Plans and results with a clock: each step takes a second, half of it on the device."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.traces = ExecutorTraces(self.bench.tracer)
        self.now = 0.0
        self.step = 0

    def begin(self, **plan: object) -> int:
        self.step += 1
        self.traces.begin(StepPlan(step=self.step, epoch=1, **plan), self.now)  # type: ignore[arg-type]
        return self.step

    def collect(self, step: int) -> None:
        self.now += 1.0
        self.traces.collect(StepResult(step=step, epoch=1, token_ids=ints(0), busy=0.5), self.now)

    def run(self, **plan: object) -> None:
        self.collect(self.begin(**plan))


def test_a_request_from_its_prompt_to_its_end() -> None:
    execution = Execution()
    execution.run(starts=(start(3, choice=1),), chunks=ints(3, 0, 512, 0))
    execution.run(chunks=ints(3, 512, 88, 1))
    execution.run(decode_on=ints(3))
    for _ in range(4):
        execution.run()
    execution.run(decode_off=ints(3))
    execution.now += 2 * QUIET
    execution.traces.tick(execution.now)
    first, second, decode = execution.bench.spans()
    assert [span.name for span in (first, second, decode)] == [
        names.EXECUTE_PREFILL, names.EXECUTE_PREFILL, names.EXECUTE_DECODE,
    ]  # fmt: skip
    assert all(child_of(span, SAMPLED) for span in (first, second, decode))
    assert [(span.start, span.end) for span in (first, second, decode)] == [(0.0, 1.0), (1.0, 2.0), (2.0, 7.0)]
    assert (second.attributes[names.CHUNK_START], second.attributes[names.CHUNK_TOKENS]) == (512, 88)
    assert first.attributes[names.DEVICE_SECONDS] == 0.5
    assert (decode.attributes[names.STEPS], decode.attributes[names.DEVICE_SECONDS]) == (5, 2.5)
    assert decode.attributes[names.CHOICE] == 1


def test_two_steps_on_the_way() -> None:
    """The plan that takes a slot out is begun before the last result of that slot is there."""
    execution = Execution()
    execution.run(starts=(start(0),), chunks=ints(0, 0, 5, 1))
    one = execution.begin(decode_on=ints(0))
    two = execution.begin()
    execution.collect(one)
    three = execution.begin(decode_off=ints(0))
    execution.collect(two)
    execution.collect(three)
    execution.traces.tick(execution.now + 2 * QUIET)
    decode = named(execution.bench.spans(), names.EXECUTE_DECODE)
    assert (decode.attributes[names.STEPS], decode.start, decode.end) == (2, 1.0, 3.0)


def test_a_slot_that_stands_still_for_a_step_goes_on() -> None:
    execution = Execution()
    execution.run(starts=(start(0), start(1)), chunks=ints(0, 0, 5, 1, 1, 0, 5, 1))
    execution.run(decode_on=ints(0, 1))
    execution.run(decode_off=ints(0))
    execution.run(decode_on=ints(0))
    execution.run(decode_off=ints(0, 1))
    execution.traces.forget()
    decodes = [span for span in execution.bench.spans() if span.name == names.EXECUTE_DECODE]
    assert sorted(span.attributes[names.STEPS] for span in decodes) == [2, 3]


def test_a_slot_that_somebody_else_gets_is_told_at_once() -> None:
    execution = Execution()
    other = root().child("0" * 15 + "1")
    execution.run(starts=(start(0),), chunks=ints(0, 0, 5, 1))
    one = execution.begin(decode_on=ints(0))
    two = execution.begin(starts=(start(0, other),), chunks=ints(0, 0, 9, 1))
    execution.collect(one)
    execution.collect(two)
    spans = execution.bench.spans()
    assert child_of(named(spans, names.EXECUTE_DECODE), SAMPLED)
    assert [span.parent for span in spans if span.name == names.EXECUTE_PREFILL] == [SAMPLED, other]


def test_nothing_is_told_of_the_untraced() -> None:
    execution = Execution()
    execution.run(starts=(start(0, UNSAMPLED), start(1, TraceContext())), chunks=ints(0, 0, 5, 1, 1, 0, 5, 1))
    execution.run(decode_on=ints(0, 1))
    execution.run(decode_off=ints(0, 1))
    execution.traces.forget()
    assert execution.bench.spans() == []


def test_who_decoded_when_the_work_ended_is_told_without_a_further_plan() -> None:
    execution = Execution()
    execution.run(starts=(start(0),), chunks=ints(0, 0, 5, 1))
    execution.run(decode_on=ints(0))
    execution.run()
    execution.traces.tick(execution.now + QUIET / 2)
    assert execution.bench.tracer.statistics().recorded == 1
    execution.traces.tick(execution.now + 2 * QUIET)
    decode = named(execution.bench.spans(), names.EXECUTE_DECODE)
    assert (decode.attributes[names.STEPS], decode.end) == (2, 3.0)


def test_who_goes_on_after_a_rest_is_told_of_twice() -> None:
    execution = Execution()
    execution.run(starts=(start(0),), chunks=ints(0, 0, 5, 1))
    execution.run(decode_on=ints(0))
    execution.traces.tick(execution.now + 2 * QUIET)
    execution.now += 10.0
    execution.run()
    execution.run()
    execution.traces.tick(execution.now + 2 * QUIET)
    decodes = [span for span in execution.bench.spans() if span.name == names.EXECUTE_DECODE]
    assert [span.attributes[names.STEPS] for span in decodes] == [1, 2]
    assert decodes[1].start == 12.0


def test_an_epoch_that_ends_leaves_nothing() -> None:
    execution = Execution()
    execution.run(starts=(start(0),), chunks=ints(0, 0, 5, 1))
    execution.run(decode_on=ints(0))
    execution.begin()  # its result never comes
    execution.traces.forget()
    execution.run()
    assert named(execution.bench.spans(), names.EXECUTE_DECODE).attributes[names.STEPS] == 1


def test_waits_for_masks_are_of_everybody_in_the_step() -> None:
    execution = Execution()
    step = execution.begin(starts=(start(0),), chunks=ints(0, 0, 5, 1))
    execution.traces.masked(step, 0.25)
    execution.collect(step)
    step = execution.begin(decode_on=ints(0))
    execution.traces.masked(step, 0.125)
    execution.collect(step)
    execution.traces.forget()
    prefill, decode = execution.bench.spans()
    assert (prefill.attributes[names.MASK_SECONDS], decode.attributes[names.MASK_SECONDS]) == (0.25, 0.125)


def test_a_step_that_the_scheduler_traces_has_a_span_here() -> None:
    execution = Execution()
    execution.run(trace=SAMPLED, chunks=ints(0, 0, 5, 1))
    step = named(execution.bench.spans(), names.EXECUTE_STEP)
    assert child_of(step, SAMPLED)
    assert (step.attributes[names.STEP_NUMBER], step.attributes[names.STEP_CHUNKS]) == (1, 1)


@given(st.lists(st.sampled_from(["on", "off", "start", "none", "tick", "rest"]), max_size=30))
def test_every_decoding_step_is_told_once(life: list[str]) -> None:
    """Whatever becomes of a slot, the steps of its spans are those that it decoded in."""
    execution = Execution()
    decoding, ran, pending = False, 0, []
    execution.run(starts=(start(0),), chunks=ints(0, 0, 1, 1))
    for what in life:
        if what in ("tick", "rest"):
            while pending:
                execution.collect(pending.pop(0))
            execution.now += 2 * QUIET if what == "rest" else 0.0
            execution.traces.tick(execution.now)
            continue
        plan: dict[str, object] = {}
        if what == "on" and not decoding:
            plan, decoding = {"decode_on": ints(0)}, True
        elif what == "off" and decoding:
            plan, decoding = {"decode_off": ints(0)}, False
        elif what == "start":
            plan, decoding = {"starts": (start(0),), "chunks": ints(0, 0, 1, 1)}, False
        ran += decoding
        pending.append(execution.begin(**plan))
        if len(pending) == 2:
            execution.collect(pending.pop(0))
    while pending:
        execution.collect(pending.pop(0))
    execution.traces.forget()
    decodes = [span for span in execution.bench.spans() if span.name == names.EXECUTE_DECODE]
    assert sum(int(str(span.attributes[names.STEPS])) for span in decodes) == ran
    assert all(before.end <= after.start for before, after in itertools.pairwise(decodes))
