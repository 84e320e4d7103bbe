"""Trace contexts, the tracer of a process, and the api's spans of a request.

Nothing of OpenTelemetry is imported here, so that a process whose traces are off does not load it; a client's trace id
stands in the log either way. Source: W3C Trace Context, sections 3.2 and 3.3; OpenTelemetry semantic conventions, "HTTP
server" and "Generative AI spans", kind "inference".
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

import msgspec

from penstock.protocol.errors import DeadlineExceeded, RequestError
from penstock.protocol.messages import Finish, SubmitText, TraceContext
from penstock.services.tracing import names

if TYPE_CHECKING:
    from penstock.services.client.output_collector import OutputCollector

Value = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, Value]
Event = tuple[str, float, Attributes]  # name, monotonic seconds, attributes


TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
MAX_TRACEPARENT = 128
MAX_TRACESTATE = 512  # bytes that a participant must propagate; a longer one is left out
MAX_PROMPTS = 32  # of one operation that have a span of their own
REASONS: Mapping[Finish, str] = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CALLS: "tool_calls"}
HTTP, GRPC = "http/protobuf", "grpc"
QUEUE, DELAY = 8192, 1.0  # spans, seconds; OpenTelemetry's own queue is short for a server that is traced as a whole
GRPC_MODULE = "opentelemetry.exporter.otlp.proto.grpc"
LAST_WORDS = 1.0  # seconds that the end of a process waits for the collector


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What options say of traces. None: what OpenTelemetry's variables or defaults say."""

    endpoint: str | None = None
    protocol: str = HTTP
    ratio: float | None = None  # of the requests that are traced, where the client has not decided
    queue: int = QUEUE  # most waiting spans
    delay: float | None = None  # most seconds that a span waits
    steps_per_second: float = 0.0  # steps with traced requests that get a span


class SpanOptions(TypedDict, total=False):
    context: TraceContext  # the span's own, if others already refer to it
    events: Sequence[Event]
    links: Sequence[TraceContext]
    error: str | None  # empty: an error without a message
    server: bool  # of kind SERVER
    remote: bool  # its parent is outside this server


class TraceStatistics(msgspec.Struct, frozen=True):
    """Spans since the start, and those that wait."""

    recorded: int
    delivered: int
    dropped: int  # by a full queue, a failed export, or the end of the process
    waiting: int


class Tracer:
    """The null tracer of processes whose traces are off; `otlp.OtlpTracer` exports.

    Spans are recorded once they have ended, with times in monotonic seconds of this process.
    """

    enabled = False
    steps_per_second = 0.0

    def records(self, context: TraceContext) -> bool:
        """Whether spans under this context are recorded."""
        return False

    def sample(self, context: TraceContext) -> TraceContext | None:
        """Decide once per request, in its first process, whether it is traced. Returns the parent of its first span, or
        None. `context` is the client's, or empty."""
        return None

    @staticmethod
    def current() -> TraceContext:
        """The context of the caller's current OpenTelemetry span; empty without one."""
        return TraceContext()

    def record(
        self, name: str, parent: TraceContext, start: float, end: float, attributes: Attributes,
        **options: Unpack[SpanOptions],
    ) -> None:  # fmt: skip
        """Record a span that has ended."""

    def statistics(self) -> TraceStatistics:
        return TraceStatistics(0, 0, 0, 0)

    def finish(self) -> None:
        """Start to export waiting spans, as the process ends. Spans recorded later are lost."""

    def close(self, limit: float = LAST_WORDS) -> None:
        """Export waiting spans for `limit` seconds at most; the others are dropped, which is logged."""


def parse(traceparent: str, tracestate: str = "") -> TraceContext:
    """A context from outside; empty if it is not valid, which is no error."""
    if len(traceparent) > MAX_TRACEPARENT or not TRACEPARENT.fullmatch(traceparent):
        return TraceContext()
    if traceparent.startswith("00") and len(traceparent) != 55:
        return TraceContext()
    return TraceContext(traceparent, tracestate if len(tracestate) <= MAX_TRACESTATE and tracestate.isascii() else "")


def client_context(headers: Mapping[bytes, Sequence[bytes]]) -> TraceContext:
    """The context of a request's headers; empty without a valid one."""
    parents = headers.get(b"traceparent", ())
    if len(parents) != 1:
        return TraceContext()
    states = (value.decode("latin-1").strip() for value in headers.get(b"tracestate", ()))
    return parse(parents[0].decode("latin-1").strip(), ",".join(states))


def root() -> TraceContext:
    """The parent of the first span of a new trace."""
    return TraceContext(f"00-{secrets.token_hex(16)}")


class ServerSpan:
    """The span of one HTTP request. `context` is propagated whether it is recorded or not."""

    def __init__(self, tracer: Tracer | None, context: TraceContext) -> None:
        """Where nothing is recorded at all the context goes on as it is."""
        self._tracer = tracer if tracer is not None and tracer.enabled else None
        self._parent = self._tracer.sample(context) if self._tracer is not None else None
        self.recording = self._parent is not None
        if self._parent is not None:
            self.context = self._parent.child()
        else:
            self.context = context.unsampled() if self._tracer is not None else context

    def end(self, method: str, route: str, status: int, attributes: Attributes, times: tuple[float, float]) -> None:
        """Record it; `route` as in the log, `times` of its start and end."""
        if self._tracer is None or self._parent is None:
            return
        attributes = {names.HTTP_METHOD: method, names.HTTP_ROUTE: route, names.HTTP_STATUS: status, **attributes}
        if status >= 400:
            attributes[names.ERROR_TYPE] = str(status)
        self._tracer.record(
            f"{method} {route}", self._parent, *times, attributes, context=self.context, server=True,
            remote=not self._parent.is_root, error="" if status >= 500 else None,
        )  # fmt: skip


class Operation:
    """The inference of one HTTP request, or of one call of the Python API: one internal request per prompt. `requests`
    carry the contexts of its spans."""

    def __init__(self, tracer: Tracer, requests: Sequence[SubmitText], model: str, now: float) -> None:
        self._tracer = tracer
        self._parent = requests[0].trace
        self._asked = requests[0]
        self._model = model
        self._began = now
        self._events: list[Event] = []
        self.context = self._parent.child()
        count = min(len(requests), MAX_PROMPTS) if len(requests) > 1 else 0
        self._prompts = [self.context.child() for _ in range(count)]
        contexts = self._prompts or [self.context]
        contexts = contexts + [TraceContext()] * (len(requests) - len(contexts))
        self.requests = [
            msgspec.structs.replace(request, trace=context)
            for request, context in zip(requests, contexts, strict=True)
        ]  # fmt: skip

    def add_event(self, name: str, now: float) -> None:
        self._events.append((name, now, {}))

    def end(self, collector: OutputCollector, now: float, refusal: RequestError | None = None) -> None:
        """Record it and its children. `refusal`: the error if no tokenizer accepted the requests. Called once."""
        kind = operation_of(self._asked)
        error = refusal or collector.error
        if collector.disconnected:
            self.add_event(names.CLIENT_LEFT, now)
        elif isinstance(error, DeadlineExceeded):
            self.add_event(names.DEADLINE, now)
        attributes = request_attributes(self._asked, kind, self._model)
        attributes |= response_attributes(collector, self._began, now)
        if collector.name and refusal is None:
            attributes[names.GEN_AI_RESPONSE_ID] = collector.name
        if error is not None:
            attributes[names.ERROR_TYPE] = error.code
        elif collector.disconnected:
            attributes[names.ERROR_TYPE] = "client_left"
        if self._prompts:
            attributes[names.PROMPTS] = len(self.requests)
            if len(self.requests) > MAX_PROMPTS:
                attributes[names.SKIPPED_PROMPTS] = len(self.requests) - MAX_PROMPTS
        else:
            attributes[names.REQUEST] = f"{self._asked.id:x}"
        record = self._tracer.record
        record(f"{kind} {self._model}", self._parent, self._began, now, attributes, context=self.context,
               events=self._events, error=None if error is None else error.message)  # fmt: skip
        for index, context in enumerate(self._prompts):
            prompt: Attributes = {names.PROMPT_INDEX: index, names.REQUEST: f"{self.requests[index].id:x}"}
            record(names.PROMPT, self.context, self._began, now, prompt, context=context)
        if collector.first_token is not None:
            tokens = attributes[names.GEN_AI_OUTPUT_TOKENS]
            record(names.STREAM, self.context, collector.first_token, now, {names.OUTPUT_TOKENS: tokens})


class Operations:
    """Starts the operations of one process. Without a tracer none is recorded."""

    def __init__(self, tracer: Tracer | None = None, model: str = "") -> None:
        self._tracer = tracer if tracer is not None else Tracer()
        self._model = model
        self.enabled = self._tracer.enabled

    def begin(self, requests: Sequence[SubmitText], now: float) -> Operation | None:
        """None if they are not traced; requests that are submitted together have one trace."""
        traced = self._tracer.records(requests[0].trace)
        return Operation(self._tracer, requests, self._model, now) if traced else None


def operation_of(request: SubmitText) -> str:
    if request.pooling is not None:
        return "embeddings"
    return "chat" if request.messages is not None else "text_completion"


def request_attributes(request: SubmitText, kind: str, model: str) -> Attributes:
    attributes: Attributes = {
        names.GEN_AI_OPERATION: kind,
        names.GEN_AI_PROVIDER: names.PROVIDER,
        names.GEN_AI_MODEL: model,
        names.GEN_AI_RESPONSE_MODEL: model,
    }
    if request.pooling is not None:
        return attributes
    sampling = request.sampling
    optional: dict[str, int | float | None] = {
        names.GEN_AI_TEMPERATURE: sampling.temperature,
        names.GEN_AI_TOP_P: sampling.top_p,
        names.GEN_AI_SEED: sampling.seed,
        names.GEN_AI_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_TOP_K: sampling.top_k or None,
        names.GEN_AI_CHOICES: request.n if request.n > 1 else None,
        names.GEN_AI_FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        names.GEN_AI_PRESENCE_PENALTY: sampling.presence_penalty or None,
    }
    return attributes | {name: value for name, value in optional.items() if value is not None}


def response_attributes(collector: OutputCollector, began: float, now: float) -> Attributes:
    usage, first = collector.usage, collector.first_token
    attributes: Attributes = {
        names.GEN_AI_INPUT_TOKENS: usage.prompt_tokens,
        names.GEN_AI_OUTPUT_TOKENS: usage.completion_tokens,
    }
    if reasons := tuple([REASONS[choice.finish] for choice in collector.choices if choice.finish in REASONS]):
        attributes[names.GEN_AI_FINISH_REASONS] = reasons
    if usage.cached_tokens is not None:
        attributes[names.GEN_AI_CACHED_TOKENS] = usage.cached_tokens
    if usage.accepted_tokens or usage.rejected_tokens:
        attributes |= {names.ACCEPTED_DRAFTS: usage.accepted_tokens, names.REJECTED_DRAFTS: usage.rejected_tokens}
    if first is not None:
        attributes[names.GEN_AI_TIME_TO_FIRST_TOKEN] = first - began
        if usage.completion_tokens > 1:
            attributes[names.GEN_AI_TIME_PER_TOKEN] = (now - first) / (usage.completion_tokens - 1)
    return attributes
