"""Collects the output of one API request, per choice, until it is sent.

Deltas are kept, not events: when the client's connection is slow they merge, so a collector never holds more than the
whole response. The engine client puts the rows of a batch, then notifies. One task per request awaits `get`; while a
stream's connection accepts data, its sink sends new output directly, without waking that task.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import Callable, Iterable, Mapping

import msgspec

from penstock.protocol.errors import EngineFailure, GrammarFailure, RequestError, Unavailable
from penstock.protocol.messages import Finish, PieceKind
from penstock.protocol.outputs import Piece, PositionLogprobs, TextExtra
from penstock.services.metrics.requests import Timings
from penstock.services.tracing.tracer import Operation

OWN_NAMES: Mapping[str, str] = {}


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a whole response; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    accepted_tokens: int  # draft tokens in the output
    rejected_tokens: int  # draft tokens that were verified and are not
    reasoning_tokens: int = 0  # of the completion tokens, including markers
    image_tokens: int = 0  # of the prompt tokens


class PromptFacts(msgspec.Struct, eq=False):
    """One prompt, known once its first choice begins."""

    tokens: int = 0
    token_ids: bytes = b""  # int32, where they were asked for
    cached_tokens: int | None = None
    image_tokens: int = 0
    approximations: tuple[str, ...] = ()
    reasons: bool = False  # reasoning is separated from the content
    logprobs: tuple[PositionLogprobs | None, ...] | None = None


class Segment(msgspec.Struct, frozen=True):
    """A part of one choice's output."""

    kind: int  # PieceKind
    text: str  # of a CALL the function's name
    call: int = -1  # index among the choice's calls
    id: str = ""  # of a CALL
    name: str = ""  # of the function that ARGUMENTS belong to


class Segments(msgspec.Struct, eq=False):
    """Parsed output of one choice that has not been taken, after its plain text. Creates the calls' ids."""

    calls: int = 0
    name: str = ""  # of the last call's function
    waiting: list[Segment] = []

    def push(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.kind == PieceKind.CALL:
                self.waiting.append(Segment(piece.kind, piece.text, self.calls, "call_" + secrets.token_hex(12)))
                self.calls += 1
                self.name = piece.text
            elif piece.kind == PieceKind.ARGUMENTS:
                self.waiting.append(Segment(piece.kind, piece.text, self.calls - 1, name=self.name))
            else:
                self.waiting.append(Segment(piece.kind, piece.text))

    def take(self, text: str) -> list[Segment]:
        """`text`, then the segments; neighbours of one kind are joined."""
        found = [Segment(PieceKind.CONTENT, text)] if text else []
        for segment in self.waiting:
            last = found[-1] if found else None
            if last is not None and last.kind == segment.kind != PieceKind.CALL:
                found[-1] = Segment(last.kind, last.text + segment.text, last.call, name=last.name)
            else:
                found.append(segment)
        self.waiting = []
        return found


class Choice(msgspec.Struct, eq=False):
    """One choice: `text`, `segments`, `logprobs` and `token_ids` since they were last taken; the rest is of the whole
    choice."""

    index: int
    prompt: int
    text: list[str] = []
    segments: Segments = msgspec.field(default_factory=Segments)  # after the text
    logprobs: list[PositionLogprobs] = []
    token_ids: list[bytes] = []  # int32, where they were asked for
    tokens: int = 0
    finish: Finish = Finish.NONE
    stop_reason: str | int | None = None
    drafted: tuple[int, int] = (0, 0)  # draft tokens accepted and rejected
    reasoning_tokens: int = 0
    vector: bytes | None = None  # float32, where one was asked for
    weights: list[tuple[int, str]] = []  # as `Versions`, but for what counts no more
    updated: bool = False  # among the choices that `get` will return
    begun: bool = False  # the stream has an event of this choice
    last: float = 0.0  # when the latest tokens arrived; 0 before the first

    @property
    def versions(self) -> list[tuple[int, str]]:
        """The version of the weights that its tokens came from, each with the number of its first one. What came behind
        a stop string is no token of it."""
        return [(start, version) for start, version in self.weights if start < max(1, self.tokens)]

    def take_text(self) -> str:
        if not self.text:
            return ""
        text = "".join(self.text)
        self.text.clear()
        return text

    def take(self) -> list[Segment]:
        """All output since the last call, in order."""
        return self.segments.take(self.take_text())

    def take_logprobs(self) -> list[PositionLogprobs]:
        taken, self.logprobs = self.logprobs, []
        return taken

    def take_token_ids(self) -> bytes:
        """Ids of the tokens since the last call, as int32."""
        taken, self.token_ids = b"".join(self.token_ids), []
        return taken


class OutputCollector:
    """The choices of `prompts` prompts with `n` choices each, numbered prompt by prompt."""

    def __init__(
        self,
        prompts: int,
        n: int,
        *,
        stream: bool,
        timings: Timings,
        now: float,
        name: str = "",
        field_names: Mapping[str, str] = OWN_NAMES,
        least_aborted: int | None = None,
        versioned: bool = False,
    ) -> None:
        """least_aborted: a choice that the operator ends is complete as it is, once it has so many tokens; None: never.
        versioned: answers tell the version of the weights."""
        self.n = n
        self.name = name  # the response's id, if it has one; set by its owner
        self.versioned = versioned
        self._field_names = field_names
        self.prompts = [PromptFacts() for _ in range(prompts)]
        self.choices = [Choice(index, index // n) for index in range(prompts * n)]
        self.error: RequestError | None = None
        self.first_token: float | None = None  # of a stream, in monotonic seconds
        self.request_ids: list[int] = []  # set by the engine client
        self.disconnected = False  # the client is gone
        self.operation: Operation | None = None  # if it is traced; set by the engine client
        self.ended = False  # it is complete, or an error or a disconnect ended them all
        self.open = len(self.choices)  # that have not finished
        self._least_aborted = least_aborted
        self.stream = stream
        self._timings = timings
        self._began = now
        self._updated: list[Choice] = []
        self._timed: list[tuple[Choice, float]] = []  # choices with new tokens, and when these arrived
        self._waiter: tuple[asyncio.Future[None], Sink | None] | None = None  # while the task awaits `get`

    @property
    def usage(self) -> Usage:
        cached = [facts.cached_tokens for facts in self.prompts]
        known = [count for count in cached if count is not None]
        return Usage(
            sum(facts.tokens for facts in self.prompts),
            sum(choice.tokens for choice in self.choices),
            sum(known) if known else None,
            sum(choice.drafted[0] for choice in self.choices),
            sum(choice.drafted[1] for choice in self.choices),
            sum(choice.reasoning_tokens for choice in self.choices),
            sum(facts.image_tokens for facts in self.prompts),
        )

    def put(
        self,
        index: int,
        text: str,
        tokens: int,
        finish: int,
        extra: TextExtra | None,
        now: float,
        pieces: Iterable[Piece] = (),
        token_ids: bytes | memoryview = b"",
    ) -> None:
        """Add one row of a TextBatch to choice `index`, at `now` in monotonic seconds. `token_ids` (int32) are empty
        unless the request asked for them."""
        choice = self.choices[index]
        if choice.finish:
            return
        if extra is not None:
            self._note(choice, extra)
        if text and choice.segments.waiting:
            choice.segments.push((Piece(PieceKind.CONTENT, text),))
        elif text:
            choice.text.append(text)
        if pieces:
            choice.segments.push(pieces)
        if tokens:
            choice.tokens += tokens
            if token_ids:
                choice.token_ids.append(bytes(token_ids))
            if self.stream:
                self._timed.append((choice, now))
        if finish:
            choice.finish = Finish(finish)
            self.open -= 1
            if not self.open:
                self.ended = True
            if finish == Finish.ERROR:
                self.fail(EngineFailure(extra.error if extra and extra.error else "the engine failed this request"))
            elif finish == Finish.GRAMMAR:
                self.fail(GrammarFailure(extra.error if extra and extra.error else "the structure cannot be followed"))
            elif finish == Finish.UNAVAILABLE:
                self.fail(Unavailable(extra.error if extra and extra.error else "the server lost a part of itself"))
            elif finish == Finish.ABORT and (self._least_aborted is None or choice.tokens < self._least_aborted):
                self.fail(Unavailable("the server ended this request before it was complete", code="aborted"))
        if not choice.updated:
            choice.updated = True
            self._updated.append(choice)

    def notify(self) -> None:
        """All rows of a batch have been put: write the stream, or wake the task. Its tokens are timed once they are on
        their way."""
        if self._waiter is not None:
            sink = self._waiter[1]
            written = not self.ended and sink is not None and sink(self, self._updated)
            if written:
                for choice in self._updated:
                    choice.updated = False
                self._updated = []
            elif self.ended or self.stream:
                self._wake()
        for choice, now in self._timed:
            if choice.last:
                self._timings.inter_token.observe(now - choice.last)
            elif self.first_token is None:
                self.first_token = now
                self._timings.first_token.observe(now - self._began)
            choice.last = now
        self._timed.clear()

    @property
    def versions(self) -> list[str]:
        """Versions of the weights that its tokens came from, each once."""
        return list(dict.fromkeys(version for choice in self.choices for _, version in choice.versions))

    @property
    def failure(self) -> RequestError | None:
        """The error to raise: a copy, since a raised error refers to frames that refer to this collector."""
        return copy.copy(self.error)

    def fail(self, error: RequestError) -> None:
        """End every choice with this error, unless one has ended them before."""
        if self.error is None:
            self.error = renamed(error, self._field_names) if self._field_names else error
            self.ended = True
        self._wake()

    def disconnect(self) -> None:
        """The client is gone: `get` returns."""
        self.disconnected = self.ended = True
        self._wake()

    def end_trace(self, now: float) -> None:
        """End the operation's spans. Safe to call twice."""
        operation, self.operation = self.operation, None
        if operation is not None:
            operation.end(self, now)

    @property
    def approximations(self) -> tuple[str, ...]:
        """Parts of the request's grammar that are not enforced exactly; known once a choice has begun."""
        return self.prompts[0].approximations

    async def get(self, sink: Sink | None = None) -> list[Choice]:
        """The choices with new output, in order of arrival; waits for output, or for the end.

        Of a response that is not streamed it waits for the end. Output that `sink` sends meanwhile does not count.
        """
        while not self.ended and not (self.stream and self._updated):
            arrived = asyncio.get_running_loop().create_future()
            self._waiter = arrived, sink
            try:
                await arrived
            finally:
                self._waiter = None
        return self.get_nowait()

    def get_nowait(self) -> list[Choice]:
        """The choices with new output, in order of arrival."""
        updated, self._updated = self._updated, []
        for choice in updated:
            choice.updated = False
        return updated

    def _note(self, choice: Choice, extra: TextExtra) -> None:
        facts = self.prompts[choice.prompt]
        if extra.prompt_tokens is not None:
            facts.tokens, facts.image_tokens = extra.prompt_tokens, extra.image_tokens
        if extra.cached_tokens is not None and (facts.cached_tokens is None or choice.index % self.n == 0):
            facts.cached_tokens = extra.cached_tokens
        if extra.reasons:
            facts.reasons = True
        if extra.approximations:
            facts.approximations = extra.approximations
        if extra.prompt_logprobs is not None:
            facts.logprobs = extra.prompt_logprobs
        if extra.logprobs:
            choice.logprobs.extend(extra.logprobs)
        if extra.prompt_token_ids is not None:
            facts.token_ids = extra.prompt_token_ids
        if extra.stop_reason is not None:
            choice.stop_reason = extra.stop_reason
        if extra.vector is not None:
            choice.vector = extra.vector
        if extra.drafted is not None:
            choice.drafted = extra.drafted
        for start, version in extra.weights:
            # A process that was lost may have told more than it delivered.
            while choice.weights and choice.weights[-1][0] >= start:
                choice.weights.pop()
            if not choice.weights or choice.weights[-1][1] != version:
                choice.weights.append((start, version))
        if extra.reasoning_tokens:
            choice.reasoning_tokens = extra.reasoning_tokens

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter[0].done():
            self._waiter[0].set_result(None)


# Takes what the choices have to give, and sends it at once. False: the connection accepts nothing now, and nothing was
# taken.
Sink = Callable[[OutputCollector, list[Choice]], bool]


class ToolCall(msgspec.Struct, frozen=True):
    """A complete tool call."""

    id: str
    name: str
    arguments: str  # as the model wrote them: JSON, unless it was cut off or the model erred


class ParsedOutput(msgspec.Struct, frozen=True):
    """A choice's whole output, by kind."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]


def parsed_output(segments: Iterable[Segment]) -> ParsedOutput:
    """The output of a choice with these segments."""
    texts: dict[int, list[str]] = {PieceKind.CONTENT: [], PieceKind.REASONING: []}
    calls: list[tuple[Segment, list[str]]] = []
    for segment in segments:
        if segment.kind == PieceKind.CALL:
            calls.append((segment, []))
        elif segment.kind == PieceKind.ARGUMENTS:
            calls[segment.call][1].append(segment.text)
        else:
            texts[segment.kind].append(segment.text)
    return ParsedOutput(
        "".join(texts[PieceKind.CONTENT]),
        "".join(texts[PieceKind.REASONING]),
        tuple(ToolCall(begun.id, begun.text, "".join(parts)) for begun, parts in calls),
    )


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """`error` with its field renamed as in the request's API, in the message as well."""
    param = error.param or ""
    for name, own in names.items():
        if param == name or param.startswith((name + ".", name + "[")):
            error.param = own + param[len(name) :]
            error.message = error.message.replace(param, error.param)
            break
    return error
