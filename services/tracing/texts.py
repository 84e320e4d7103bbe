"""The tokenizer's spans: how a prompt was made, and how the answer became text again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine_core.text.columns import unpack
from penstock.engine_core.text.prompts import Prepared
from penstock.protocol.messages import Rejected, SubmitText, TokenBatch, TraceContext
from penstock.services.tracing import names
from penstock.services.tracing.span import Facts, Span
from penstock.services.tracing.tracer import Tracer

CROWD = 1024  # answers at which those are looked for that nobody waits for any more


@dataclass(slots=True)
class Answer:
    """What has come of the tokens of a traced request."""

    trace: TraceContext
    open: int  # choices
    first: float | None = None
    last: float = 0.0
    rows: int = 0
    tokens: int = 0


class TextTraces:
    """Tells what the relay sees of traced requests. Owner of the answers that are growing."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._answers: dict[int, Answer] = {}
        self._crowd = CROWD

    def tokenized(self, text: SubmitText, made: Prepared | Rejected, since: float, now: float) -> None:
        """The prompt of a request is there, or there is none."""
        if not text.trace.sampled:
            return
        attributes: Facts = {names.REQUEST: f"{text.id:x}"}
        refused = made.message if isinstance(made, Rejected) else None
        if isinstance(made, Prepared):
            attributes[names.PROMPT_TOKENS] = len(made.token_ids)
            ended = sum(written.ended for written in text.written)
            self._answers[text.id] = Answer(text.trace, text.n - ended)
        self._tracer.tell(Span(
            parent=text.trace, id=self._tracer.ids.span(), name=names.TOKENIZE, start=since, end=now,
            attributes=attributes, error=refused,
        ))  # fmt: skip

    def compiled(self, text: SubmitText, made: Prepared | Rejected, since: float, now: float) -> None:
        """The grammar of its answer was compiled, or remembered, or refused."""
        if text.trace.sampled:
            self._tracer.tell(Span(
                parent=text.trace, id=self._tracer.ids.span(), name=names.COMPILE_GRAMMAR, start=since, end=now,
                attributes={names.REQUEST: f"{text.id:x}"}, error=made.message if isinstance(made, Rejected) else None,
            ))  # fmt: skip

    def batch(self, batch: TokenBatch, now: float) -> None:
        """The tokens of a step have become text."""
        answers = self._answers
        if not answers:
            return
        ids = unpack("q", batch.ids)
        counts = unpack("i", batch.counts)
        for number, count, finish in zip(ids, counts, batch.finish, strict=True):
            answer = answers.get(number)
            if answer is None:
                continue
            if answer.first is None:
                answer.first = now
            answer.last = now
            answer.rows += 1
            answer.tokens += count
            if finish:
                answer.open -= 1
                if not answer.open:
                    self._tell(number, answers.pop(number))

    def tidy(self, wanted: Callable[[int], bool]) -> None:
        """Drop the answers of requests that ended without a word from their scheduler, once there may be many."""
        if len(self._answers) >= self._crowd:
            self._answers = {number: answer for number, answer in self._answers.items() if wanted(number)}
            self._crowd = max(CROWD, 2 * len(self._answers))

    def _tell(self, number: int, answer: Answer) -> None:
        assert answer.first is not None
        attributes: Facts = {names.REQUEST: f"{number:x}", names.ROWS: answer.rows}
        attributes[names.OUTPUT_TOKENS] = answer.tokens
        self._tracer.tell(Span(
            parent=answer.trace, id=self._tracer.ids.span(), name=names.DETOKENIZE, start=answer.first,
            end=answer.last, attributes=attributes,
        ))  # fmt: skip
