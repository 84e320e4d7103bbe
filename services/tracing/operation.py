"""What the api asks of the engine as spans: the operation, its prompts where there are several, the stream.

Source: OpenTelemetry semantic conventions, "Generative AI spans", kind "inference".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from penstock.protocol.errors import DeadlineExceeded, RequestError
from penstock.protocol.messages import Finish, SubmitText, TraceContext
from penstock.services.tracing import names
from penstock.services.tracing.context import begins, under
from penstock.services.tracing.span import Event, Facts, Span
from penstock.services.tracing.tracer import Tracer

MOST_PROMPTS = 32  # of one operation that are told one by one
REASONS: Mapping[Finish, str] = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CALLS: "tool_calls"}
UNTRACED = TraceContext()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an operation ended. Times are in monotonic seconds."""

    response: str  # its id, as the client has it; empty where it has none
    finishes: tuple[Finish, ...]  # of its choices
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    accepted: int  # drafts
    rejected: int
    first_token: float | None  # of a stream
    error: RequestError | None
    left: bool  # the client is gone


class Operation:
    """The requests of one reply, below the context that they came with. They are handed on with contexts of ours."""

    def __init__(self, tracer: Tracer, requests: Sequence[SubmitText], model: str, now: float) -> None:
        self._tracer = tracer
        self._parent = requests[0].trace
        self._asked = requests[0]
        self._model = model
        self._began = now
        self._events: list[Event] = []
        self.id = tracer.ids.span()
        own = under(self._parent, self.id)
        if len(requests) == 1:
            self._prompts: list[str] = []
            self.requests = [msgspec.structs.replace(requests[0], trace=own)]
            return
        told = requests[:MOST_PROMPTS]
        self._prompts = [tracer.ids.span() for _ in told]
        self.requests = [
            msgspec.structs.replace(request, trace=under(own, span))
            for request, span in zip(told, self._prompts, strict=True)
        ]
        self.requests += [msgspec.structs.replace(request, trace=UNTRACED) for request in requests[MOST_PROMPTS:]]

    def happened(self, name: str, now: float) -> None:
        """Something worth an event."""
        self._events.append(Event(name, now))

    def refused(self, error: RequestError, now: float) -> None:
        """It ends before anything has come of it."""
        self.end(
            Outcome(
                response="", finishes=(), prompt_tokens=0, output_tokens=0, cached_tokens=None, accepted=0, rejected=0,
                first_token=None, error=error, left=False,
            ),
            now,
        )  # fmt: skip

    def end(self, outcome: Outcome, now: float) -> None:
        """Tell all of it. Called once."""
        kind = operation_of(self._asked)
        error = outcome.error
        if outcome.left:
            self.happened(names.CLIENT_LEFT, now)
        elif isinstance(error, DeadlineExceeded):
            self.happened(names.DEADLINE, now)
        attributes = request_attributes(self._asked, kind, self._model) | outcome_attributes(outcome, self._began, now)
        skipped = len(self.requests) - MOST_PROMPTS
        if self._prompts:
            attributes |= {names.PROMPTS: len(self.requests)}
            attributes |= {names.SKIPPED_PROMPTS: skipped} if skipped > 0 else {}
        else:
            attributes |= {names.REQUEST: f"{self.requests[0].id:x}"}
        self._tracer.tell(Span(
            parent=self._parent, id=self.id, name=f"{kind} {self._model}", start=self._began, end=now,
            attributes=attributes, events=tuple(self._events), error=None if error is None else error.message,
        ))  # fmt: skip
        own = under(self._parent, self.id)
        for index, span in enumerate(self._prompts):
            self._tracer.tell(Span(
                parent=own, id=span, name=names.PROMPT, start=self._began, end=now,
                attributes={names.PROMPT_INDEX: index, names.REQUEST: f"{self.requests[index].id:x}"},
            ))  # fmt: skip
        if outcome.first_token is not None:
            self._tracer.tell(Span(
                parent=own, id=self._tracer.ids.span(), name=names.STREAM, start=outcome.first_token, end=now,
                attributes={names.OUTPUT_TOKENS: outcome.output_tokens},
            ))  # fmt: skip


class Operations:
    """Makes the operations of one api process or one program, whose model has this name."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def begin(self, requests: Sequence[SubmitText], now: float) -> Operation | None:
        """None where they are not traced; they came together, so all are or none is."""
        trace = requests[0].trace
        traced = trace.sampled or begins(trace)
        return Operation(self._tracer, requests, self._model, now) if traced else None


def operation_of(request: SubmitText) -> str:
    """Its name in the conventions."""
    if request.pooling is not None:
        return "embeddings"
    return "chat" if request.messages is not None else "text_completion"


def request_attributes(request: SubmitText, kind: str, model: str) -> Facts:
    """What was asked."""
    attributes: Facts = {
        names.GEN_AI_OPERATION: kind,
        names.GEN_AI_PROVIDER: names.PROVIDER,
        names.GEN_AI_MODEL: model,
        names.GEN_AI_RESPONSE_MODEL: model,
    }
    if request.pooling is not None:
        return attributes
    sampling = request.sampling
    attributes |= {
        names.GEN_AI_TEMPERATURE: sampling.temperature,
        names.GEN_AI_TOP_P: sampling.top_p,
        names.GEN_AI_SEED: sampling.seed,
    }
    optional: dict[str, int | float | None] = {
        names.GEN_AI_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_TOP_K: sampling.top_k or None,
        names.GEN_AI_CHOICES: request.n if request.n > 1 else None,
        names.GEN_AI_FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        names.GEN_AI_PRESENCE_PENALTY: sampling.presence_penalty or None,
    }
    return attributes | {name: value for name, value in optional.items() if value is not None}


def outcome_attributes(outcome: Outcome, began: float, now: float) -> Facts:
    """What came of it."""
    attributes: Facts = {
        names.GEN_AI_INPUT_TOKENS: outcome.prompt_tokens,
        names.GEN_AI_OUTPUT_TOKENS: outcome.output_tokens,
    }
    reasons = tuple([REASONS[finish] for finish in outcome.finishes if finish in REASONS])
    if reasons:
        attributes[names.GEN_AI_FINISH_REASONS] = reasons
    if outcome.response:
        attributes[names.GEN_AI_RESPONSE_ID] = outcome.response
    if outcome.cached_tokens is not None:
        attributes[names.GEN_AI_CACHED_TOKENS] = outcome.cached_tokens
    if outcome.accepted or outcome.rejected:
        attributes |= {names.ACCEPTED_DRAFTS: outcome.accepted, names.REJECTED_DRAFTS: outcome.rejected}
    if outcome.first_token is not None:
        attributes[names.GEN_AI_TIME_TO_FIRST_TOKEN] = outcome.first_token - began
        if outcome.output_tokens > 1:
            attributes[names.GEN_AI_TIME_PER_TOKEN] = (now - outcome.first_token) / (outcome.output_tokens - 1)
    if outcome.error is not None:
        attributes[names.ERROR_TYPE] = outcome.error.code or outcome.error.type
    elif outcome.left:
        attributes[names.ERROR_TYPE] = "client_left"
    return attributes
