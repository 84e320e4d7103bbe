"""The tokenizer's spans: prompts, grammars, answers."""

from __future__ import annotations

import struct
from typing import Any

from penstock.engine_core.text.prompts import Prepared
from penstock.protocol.messages import Rejected, Sampling, SubmitText, SubmitTokens, TraceContext, Written
from penstock.protocol.outputs import TokenBatch
from penstock.services.tracing import names
from penstock.services.tracing.tokenizer import PRUNE_AT, TokenizerTraces
from tests.services.tracing.tracing import SAMPLED, UNSAMPLED, Bench, named


def text(number: int = 1, trace: TraceContext = SAMPLED, **given: Any) -> SubmitText:
    return SubmitText(id=number, prompt="a", sampling=Sampling(), trace=trace, **given)


def prepared(number: int = 1, tokens: int = 5) -> Prepared:
    return Prepared(SubmitTokens(id=number, token_ids=b"", sampling=Sampling()), tuple(range(tokens)), "")


def batch(*rows: tuple[int, int, int, int]) -> TokenBatch:
    """# each row: id, choice, tokens, finish"""
    return TokenBatch(
        ids=struct.pack(f"<{len(rows)}q", *(row[0] for row in rows)),
        choices=struct.pack(f"<{len(rows)}H", *(row[1] for row in rows)),
        counts=struct.pack(f"<{len(rows)}i", *(row[2] for row in rows)),
        token_ids=b"",
        finish=bytes(row[3] for row in rows),
    )


def test_a_prompt() -> None:
    bench = Bench()
    TokenizerTraces(bench.tracer).tokenized(text(), prepared(), 1.0, 1.25)
    (span,) = bench.spans()
    assert (span.name, span.start, span.end, span.error) == (names.TOKENIZE, 1.0, 1.25, None)
    assert span.attributes == {names.REQUEST: "1", names.PROMPT_TOKENS: 5}


def test_a_prompt_that_is_refused() -> None:
    bench = Bench()
    traces = TokenizerTraces(bench.tracer)
    refused = Rejected(id=1, status=400, message="too long")
    traces.tokenized(text(), refused, 1.0, 1.25)
    traces.compiled(text(), refused, 1.0, 1.25)
    assert [span.error for span in bench.spans()] == ["too long", "too long"]


def test_a_grammar() -> None:
    bench = Bench()
    TokenizerTraces(bench.tracer).compiled(text(), prepared(), 1.0, 1.5)
    (span,) = bench.spans()
    assert (span.name, span.end, span.error) == (names.COMPILE_GRAMMAR, 1.5, None)


def test_an_answer_from_its_first_row_to_its_last() -> None:
    bench = Bench()
    traces = TokenizerTraces(bench.tracer)
    traces.tokenized(text(n=2), prepared(), 0.0, 1.0)
    traces.batch(batch((1, 0, 1, 0), (9, 0, 1, 1)), 2.0)
    traces.batch(batch((1, 0, 3, 1), (1, 1, 1, 0)), 3.0)
    traces.batch(batch((1, 1, 2, 2)), 4.0)
    traces.batch(batch((1, 1, 2, 2)), 5.0)  # nothing is left of it
    span = named(bench.spans(), names.DETOKENIZE)
    assert (span.start, span.end) == (2.0, 4.0)
    assert span.attributes == {names.REQUEST: "1", names.ROWS: 4, names.OUTPUT_TOKENS: 7}


def test_choices_that_had_ended_elsewhere_are_not_waited_for() -> None:
    bench = Bench()
    traces = TokenizerTraces(bench.tracer)
    traces.tokenized(text(n=2, written=(Written(b"", True), Written(b"", False))), prepared(), 0.0, 1.0)
    traces.batch(batch((1, 1, 1, 1)), 2.0)
    assert named(bench.spans(), names.DETOKENIZE).end == 2.0


def test_nothing_of_the_untraced() -> None:
    bench = Bench()
    traces = TokenizerTraces(bench.tracer)
    for trace in (UNSAMPLED, TraceContext()):
        traces.tokenized(text(trace=trace), prepared(), 0.0, 1.0)
        traces.compiled(text(trace=trace), prepared(), 0.0, 1.0)
    traces.batch(batch((1, 0, 1, 1)), 2.0)
    assert bench.spans() == []


def test_answers_that_nobody_ends_are_forgotten() -> None:
    bench = Bench(queue=1 << 16)
    traces = TokenizerTraces(bench.tracer)
    for number in range(PRUNE_AT + 5):
        traces.tokenized(text(number), prepared(number), 0.0, 1.0)
    traces.prune(range(PRUNE_AT, PRUNE_AT + 4).__contains__)
    for number in (1, PRUNE_AT + 1, PRUNE_AT + 4):
        traces.batch(batch((number, 0, 1, 1)), 2.0)
    spans = [span for span in bench.spans() if span.name == names.DETOKENIZE]
    assert [span.attributes[names.REQUEST] for span in spans] == [f"{PRUNE_AT + 1:x}"]
