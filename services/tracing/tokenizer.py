"""The tokenizer's spans: tokenizing a prompt, compiling its grammar, detokenizing its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine_core.text.prompts import Prepared
from penstock.protocol.columns import unpack
from penstock.protocol.messages import Rejected, SubmitText, TraceContext
from penstock.protocol.outputs import TokenBatch
from penstock.services.tracing import names
from penstock.services.tracing.tracer import Attributes, Tracer

PRUNE_AT = 1024  # outputs; then those of requests that have ended are removed


@dataclass(slots=True)
class Output:
    """The tokens of a traced request so far."""

    trace: TraceContext
    open: int  # choices
    first: float | None = None
    rows: int = 0
    tokens: int = 0


class TokenizerTraces:
    """Records the spans; owns the outputs that have not ended."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._outputs: dict[int, Output] = {}
        self._prune_at = PRUNE_AT

    def tokenized(self, text: SubmitText, made: Prepared | Rejected, since: float, now: float) -> None:
        """The prompt of a request was tokenized or refused."""
        if not self._tracer.records(text.trace):
            return
        attributes: Attributes = {names.REQUEST: f"{text.id:x}"}
        if isinstance(made, Prepared):
            attributes[names.PROMPT_TOKENS] = len(made.token_ids)
            ended = sum(written.ended for written in text.written)
            self._outputs[text.id] = Output(text.trace, text.n - ended)
        error = made.message if isinstance(made, Rejected) else None
        self._tracer.record(names.TOKENIZE, text.trace, since, now, attributes, error=error)

    def compiled(self, text: SubmitText, made: Prepared | Rejected, since: float, now: float) -> None:
        if self._tracer.records(text.trace):
            attributes: Attributes = {names.REQUEST: f"{text.id:x}"}
            error = made.message if isinstance(made, Rejected) else None
            self._tracer.record(names.COMPILE_GRAMMAR, text.trace, since, now, attributes, error=error)

    def batch(self, batch: TokenBatch, now: float) -> None:
        outputs = self._outputs
        if not outputs:
            return
        ids, counts = unpack("q", batch.ids), unpack("i", batch.counts)
        for number, count, finish in zip(ids, counts, batch.finish, strict=True):
            output = outputs.get(number)
            if output is None:
                continue
            if output.first is None:
                output.first = now
            output.rows += 1
            output.tokens += count
            output.open -= bool(finish)
            if finish and not output.open:
                del outputs[number]
                self._tracer.record(names.DETOKENIZE, output.trace, output.first, now, {
                    names.REQUEST: f"{number:x}", names.ROWS: output.rows, names.OUTPUT_TOKENS: output.tokens,
                })  # fmt: skip

    def prune(self, wanted: Callable[[int], bool]) -> None:
        """Remove outputs of requests that ended without a final row, once there are many."""
        if len(self._outputs) >= self._prune_at:
            self._outputs = {number: output for number, output in self._outputs.items() if wanted(number)}
            self._prune_at = max(PRUNE_AT, 2 * len(self._outputs))
