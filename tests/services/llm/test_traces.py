"""Traces of the Python API at a real collector: a request is one trace, of its own or the caller's."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from penstock import LLM, AsyncLLM, ConfigError, SamplingParams
from penstock.protocol.messages import TraceContext
from penstock.services.tracing.otlp import OtlpTracer
from tests.e2e.chaos.faulty import slow
from tests.e2e.collector import Collector, Span, collecting
from tests.services.tracing.tracing import PARENT, SAMPLED, TRACE

LIMIT = 120.0  # seconds
NESTING = 2_000_000  # nanoseconds by which a child may seem to begin before its parent
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
KINDS = {f"penstock-{kind}" for kind in ("llm", "tokenizer", "scheduler", "executor")}
SETUP = "5" * 32  # the trace in which the engine is started


@pytest.fixture(scope="module")
def sink() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@contextmanager
def within(name: str, *, sampled: bool = True) -> Iterator[None]:
    """A span of the program is current, in the trace of this name."""
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    context = SpanContext(int(name, 16), int(PARENT, 16), is_remote=False, trace_flags=flags,
                          trace_state=TraceState([("a", "1")]))  # fmt: skip
    with trace.use_span(NonRecordingSpan(context)):
        yield


@pytest.fixture(scope="module")
def llm(sink: Collector) -> Iterator[LLM]:
    with within(SETUP):
        llm = LLM(max_num_seqs=4, tokenizer_processes=1, otlp_endpoint=sink.url)
    with llm:
        yield llm


def roots(spans: list[Span]) -> list[Span]:
    """The requests of programs, in the order in which they began."""
    found = [span for span in spans if span["name"].endswith(" penstock-demo")]
    return sorted(found, key=lambda span: span["start"])


def asked(sink: Collector, tokens: int, count: int = 1) -> list[Span]:
    """The requests for so many tokens, once there are as many of them: no two tests ask for as many tokens."""
    deadline = time.monotonic() + LIMIT
    while True:
        found = [span for span in roots(sink.spans()) if span["attributes"].get("gen_ai.request.max_tokens") == tokens]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, found
        select.select([], [], [], 0.05)


def within_trace(sink: Collector, name: str, count: int = 1) -> list[Span]:
    """The requests in the trace of this name, once there are so many."""
    return roots(sink.trace(name, lambda spans: len(roots(spans)) >= count, LIMIT))


def whole(spans: list[Span]) -> bool:
    """A trace with everything that a finished request tells."""
    wanted = {"tokenize", "queue", "prefill", "decode", "detokenize", "execute prefill", "execute decode"}
    return wanted <= {span["name"] for span in spans}


def test_every_request_is_a_trace_of_its_own(llm: LLM, sink: Collector) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(["Once upon a time", "Twice"], params, use_tqdm=False)
    found = asked(sink, 6, 2)
    assert {root["attributes"]["gen_ai.response.id"] for root in found} == {one.request_id for one in outputs}
    assert len({root["trace"] for root in found}) == len(found) == 2
    for root in found:
        spans = sink.trace(root["trace"], whole, LIMIT)
        assert {span["resource"]["service.name"] for span in spans} == KINDS
        assert {span["parent"] for span in spans if span["id"] != root["id"]} == {root["id"]}
        assert all(root["start"] - NESTING <= span["start"] for span in spans)
    told = found[0]["attributes"]
    assert (found[0]["name"], found[0]["parent"]) == ("text_completion penstock-demo", "")
    assert (told["gen_ai.operation.name"], told["gen_ai.provider.name"]) == ("text_completion", "penstock")
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.usage.output_tokens"]) == (6, 6)
    assert told["gen_ai.response.finish_reasons"] == ["length"]


def test_the_callers_span_is_the_parent_of_every_kind_of_call(llm: LLM, sink: Collector) -> None:
    """Although the engine's links live on another thread."""
    name = "7" * 32
    with within(name):
        assert OtlpTracer.current() == TraceContext(f"00-{name}-{PARENT}-01", "a=1")
        llm.generate(["a", "b"], PARAMS, use_tqdm=False)
        llm.chat([{"role": "user", "content": "Hello"}], PARAMS, use_tqdm=False)
        llm.encode("a b c", use_tqdm=False)
        llm.embed("d e f", use_tqdm=False)
        llm.score("g h i", "j k l", use_tqdm=False)
    assert OtlpTracer.current() == TraceContext()
    found = within_trace(sink, name, 7)
    kinds = [root["name"].removesuffix(" penstock-demo") for root in found]
    assert kinds == ["text_completion"] * 2 + ["chat"] + ["embeddings"] * 4, "a score is of two vectors"
    assert {(root["parent"], root["state"]) for root in found} == {(PARENT, "a=1")}


def test_a_prompt_may_name_its_trace(llm: LLM, sink: Collector) -> None:
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    prompts = [{"prompt": "a", "traceparent": SAMPLED.traceparent}, {"prompt": "b", "traceparent": "nonsense"}]
    llm.generate(prompts, params, use_tqdm=False)
    llm.embed({"prompt": "c", "traceparent": SAMPLED.traceparent}, use_tqdm=False)
    assert {root["parent"] for root in asked(sink, 7, 2)} == {PARENT, ""}
    found = within_trace(sink, TRACE, 2)
    assert [(root["name"].split()[0], root["parent"]) for root in found] == [
        ("text_completion", PARENT), ("embeddings", PARENT),
    ]  # fmt: skip


def test_what_the_caller_does_not_sample_is_not_told(llm: LLM, sink: Collector) -> None:
    with within("9" * 32, sampled=False):
        llm.generate("a", PARAMS, use_tqdm=False)
    with within("a" * 32):
        llm.generate("b", PARAMS, use_tqdm=False)
    sink.trace("a" * 32, whole, LIMIT)  # told later, by each process
    assert not [span for span in sink.spans() if span["trace"] == "9" * 32]


def test_one_that_is_refused_says_why(llm: LLM, sink: Collector) -> None:
    with within("b" * 32):
        (output,) = llm.generate(["word " * 6000], PARAMS, use_tqdm=False, return_errors=True)
    assert output.error is not None
    (root,) = within_trace(sink, "b" * 32)
    assert (root["error"], root["attributes"]["error.type"]) == (True, "context_length_exceeded")


def test_a_start_is_part_of_what_the_program_does(llm: LLM, sink: Collector) -> None:
    del llm
    wanted = {"start launcher", "start tokenizer-0", "start scheduler-0", "start executor-0"}
    spans = sink.trace(SETUP, lambda spans: wanted <= {span["name"] for span in spans}, LIMIT)
    assert [span["parent"] for span in spans if span["name"] == "start launcher"] == [PARENT]


def test_a_wrong_variable_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "nowhere")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        LLM()


async def test_streams_and_those_that_are_left(sink: Collector, faults: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By OpenTelemetry's own variable, and told to the end when the engine is closed."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
    headers = {"TraceParent": f"00-{'d' * 32}-{PARENT}-01", "tracestate": "b=2"}
    async with AsyncLLM(max_num_seqs=2, tokenizer_processes=1) as llm:
        with within("8" * 32):
            outputs = [output async for output in llm.generate("Once", PARAMS)]
        question = [{"role": "user", "content": "Hello"}]
        left = llm.chat(question, SamplingParams(max_tokens=3000, ignore_eos=True), "mine", trace_headers=headers)
        with slow(faults):
            await anext(left)
            await left.aclose()
    assert outputs[-1].finished
    (completion,), (chat,) = within_trace(sink, "8" * 32), within_trace(sink, "d" * 32)
    assert completion["parent"] == PARENT
    assert 0 < completion["attributes"]["gen_ai.server.time_to_first_token"] < LIMIT
    assert (chat["name"], chat["parent"], chat["state"]) == ("chat penstock-demo", PARENT, "b=2")
    assert chat["attributes"]["gen_ai.response.id"] == "mine"
    assert (chat["attributes"]["error.type"], chat["events"][-1]["name"]) == ("client_left", "client left")
