"""Processor time of one traced request by role: `python -m benchmarks.span_cost`.

Each role tells what it tells of a request of decode_c256 (128 tokens in, 512 out, streamed), a batch of 256 of them at
once, and exports it to a collector that takes everything; processor time of this process is counted, the least of
several tries, so that what else the machine does weighs little. Divided by the request's tokens it is what tracing
adds to a token's cost where every request is traced; where one in a hundred is, it is a hundredth. Steps that have a
span of their own cost apart, per second.
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from benchmarks import report
from benchmarks.tracing import collecting
from penstock.engine_core.scheduling.tracing import PrefillChunk, Stay, StepFacts
from penstock.engine_core.text.prompts import Prepared
from penstock.protocol.config import TraceConfig
from penstock.protocol.messages import Finish, Sampling, SubmitText, SubmitTokens, TraceContext
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import SlotStart, StepPlan, StepResult
from penstock.services.client.output_collector import OutputCollector
from penstock.services.metrics.requests import Timings
from penstock.services.tracing.executor import ExecutorTraces
from penstock.services.tracing.otlp import OtlpTracer, exporter_of
from penstock.services.tracing.scheduler import SchedulerTraces
from penstock.services.tracing.tokenizer import TokenizerTraces
from penstock.services.tracing.tracer import Operations, ServerSpan, Settings, Tracer, root

REQUESTS, PROMPT, OUTPUT = 256, 128, 512
TRIES = 5
SPAN = "b7ad6b7169203331"
Told = Callable[[Tracer, TraceContext, int], None]


class Cost(msgspec.Struct, frozen=True):
    """Of one role."""

    role: str
    spans: float  # per request
    request_us: float  # telling and exporting them
    token_ns: float  # the same, per output token


class Pocket(SpanExporter):
    """Keeps spans, so that exports are counted apart from recording."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def api(tracer: Tracer, context: TraceContext, number: int) -> None:
    span = ServerSpan(tracer, context)
    asked = SubmitText(id=number, prompt="a", sampling=Sampling(), trace=span.context)
    operation = Operations(tracer, "model").begin((asked,), 0.0)
    assert operation is not None
    collector = OutputCollector(1, 1, stream=True, timings=Timings(), now=0.0, name="chatcmpl-0")
    collector.prompts[0].tokens, collector.prompts[0].cached_tokens = PROMPT, 0
    collector.choices[0].tokens, collector.choices[0].finish, collector.first_token = OUTPUT, Finish.LENGTH, 0.1
    operation.end(collector, 5.0)
    span.end("POST", "/v1/completions", 200, {"penstock.http.request_id": "0123456789abcdef"}, (0.0, 5.0))


def tokenizer(tracer: Tracer, context: TraceContext, number: int) -> None:
    """Its rows are looked at one by one while a request is traced."""
    traces = TokenizerTraces(tracer)
    text = SubmitText(id=number, prompt="a", sampling=Sampling(), trace=context)
    made = Prepared(SubmitTokens(id=number, token_ids=b"", sampling=Sampling()), range(PROMPT), "")
    traces.tokenized(text, made, 0.0, 0.1)
    ids, counts = struct.pack(f"<{OUTPUT}q", *[number] * OUTPUT), struct.pack(f"<{OUTPUT}i", *[1] * OUTPUT)
    finish = bytes(OUTPUT - 1) + bytes((Finish.LENGTH,))
    traces.batch(TokenBatch(ids=ids, choices=b"", counts=counts, token_ids=b"", finish=finish), 1.0)


def scheduler(tracer: Tracer, context: TraceContext, number: int) -> None:
    every = TraceConfig().trace_tokens
    stay = Stay(
        trace=context, request=number, sequence=0, queued=0.0, entered=0.1, left=5.0, end="length",
        prompt_tokens=PROMPT, reused=0, chunks=[PrefillChunk(1, 0, PROMPT, 0.1, 0.2)], decoding=0.2, first=True,
        tokens=OUTPUT, accepted=0, rejected=0, marks=[(1.0, tokens) for tokens in range(every, OUTPUT, every)],
    )  # fmt: skip
    SchedulerTraces(tracer).record([stay])


def executor(tracer: Tracer, context: TraceContext, number: int) -> None:
    traces = ExecutorTraces(tracer)
    start = SlotStart(slot=3, token_ids=b"", prompt_tokens=PROMPT, computed=0, blocks=b"", sampling=Sampling(), seed=0,
                      trace=context)  # fmt: skip
    slot = struct.pack("<i", 3)
    plans = (
        StepPlan(step=1, epoch=1, starts=(start,), chunks=struct.pack("<4i", 3, 0, PROMPT, 1)),
        StepPlan(step=2, epoch=1, decode_on=slot), StepPlan(step=3, epoch=1, decode_off=slot),
    )  # fmt: skip
    for plan in plans:
        traces.begin(plan, float(plan.step))
        traces.collect(StepResult(step=plan.step, epoch=1, token_ids=b"", busy=0.01), plan.step + 0.5)
    traces.forget()


ROLES: dict[str, Told] = {"api": api, "tokenizer": tokenizer, "scheduler": scheduler, "executor": executor}


def settings(url: str) -> Settings:
    return Settings(endpoint=f"{url}/v1/traces", queue=1 << 20, delay=3600.0, steps_per_second=1.0)


def seconds(work: Callable[[], None]) -> float:
    """Processor time, the least of several tries."""
    tries = []
    for _ in range(TRIES):
        began = time.process_time()
        work()
        tries.append(time.process_time() - began)
    return min(tries)


def spans_of(told: Told, url: str) -> list[ReadableSpan]:
    """What a role tells of all the requests."""
    pocket = Pocket()
    tracer = OtlpTracer(settings(url), {}, pocket)
    for number in range(REQUESTS):
        told(tracer, root().child(SPAN), number)
    tracer.close(60.0)
    return pocket.spans


def cost(role: str, told: Told, url: str) -> Cost:
    spans = spans_of(told, url)
    exporter = exporter_of(settings(url))

    def export() -> None:
        for first in range(0, len(spans), 512):
            exporter.export(spans[first : first + 512])

    whole = seconds(lambda: spans_of(told, url) and None) + seconds(export)
    exporter.shutdown()
    return Cost(role, len(spans) / REQUESTS, round(1e6 * whole / REQUESTS, 1),
                round(1e9 * whole / REQUESTS / OUTPUT))  # fmt: skip


def step_microseconds(url: str) -> float:
    """Of one step's span with as many links as a span may have."""
    traced = tuple(root().child(SPAN) for _ in range(REQUESTS))
    facts = StepFacts(step=1, epoch=1, rows=REQUESTS, chunks=0, tokens=REQUESTS, drafts=0, masked=0, running=REQUESTS,
                      waiting=0, blocks=1000, blocks_used=900, traced=traced)  # fmt: skip

    def told(tracer: Tracer, context: TraceContext, number: int) -> None:
        traces = SchedulerTraces(tracer)
        traces.planned(StepPlan(step=1, epoch=1), facts, 0.0)
        traces.applied(StepResult(step=1, epoch=1, token_ids=b"", busy=0.01), 1.0)

    return cost("step", told, url).request_us


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.span_cost", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    with collecting() as url:
        costs = [cost(role, told, url) for role, told in ROLES.items()]
        step = step_microseconds(url)
    for one in costs:
        print(f"{one.role:<10} {one.spans:.1f} spans, {one.request_us:.0f} µs a request, {one.token_ns} ns a token")
    print(f"a step's span with 128 links: {step:.0f} µs")
    if options.output:
        report.write(options.output, "span_cost", {"load": "decode_c256", "costs": costs, "step_us": step}, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
