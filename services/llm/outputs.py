"""What a request gives back, under the names that vLLM's users know, gathered from the reply as it grows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.protocol.columns import unpack
from penstock.protocol.errors import RequestError
from penstock.protocol.messages import Finish, PieceKind, PositionLogprobs
from penstock.services.client.output_collector import Choice, Reply, Segment
from penstock.services.llm.params import RequestOutputKind
from penstock.services.openai.answers import finish_reason


class Logprob(msgspec.Struct, frozen=True):
    """A token's log-probability at a position; rank 1 is the most likely."""

    logprob: float
    rank: int | None
    decoded_token: str


Position = dict[int, Logprob]  # by token id: the chosen one and the most likely ones


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a choice makes. Where deltas are wanted `arguments` is what is new of them, and `id` and `name` stand
    in the first one alone."""

    index: int  # among the choice's calls
    id: str = ""
    name: str = ""
    arguments: str = ""  # JSON as the model wrote it, perhaps cut off; of a custom tool its input
    type: str = "function"  # or custom


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One choice. `token_ids` holds the token that ended it, `text` does not; of a chat `text` holds neither the
    reasoning nor the calls."""

    index: int
    text: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    token_ids: list[int]
    cumulative_logprob: float | None = None  # of the tokens in `logprobs`
    logprobs: list[Position] | None = None
    finish_reason: str | None = None  # stop, length or tool_calls, once it has ended
    stop_reason: str | int | None = None  # the stop string or the stop token id

    def finished(self) -> bool:
        return self.finish_reason is not None

    def message(self) -> dict[str, Any]:
        """The choice as the assistant's message of the conversation's next turn."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": call.type,
                 call.type: {"name": call.name, "input" if call.type == "custom" else "arguments": call.arguments}}
                for call in self.tool_calls
            ]  # fmt: skip
        return found


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Unix seconds, and what became of drafts, of all choices together."""

    arrival_time: float
    first_token_time: float | None = None  # where the output was streamed: nobody sees it come otherwise
    finished_time: float | None = None
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """All choices of one prompt. `prompt` is None for token ids and for chats."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Position | None] | None = None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    approximations: tuple[str, ...] = ()  # what a lenient grammar does not hold exactly
    error: RequestError | None = None  # why it failed, where errors are returned; `outputs` is empty then


class Growth:
    """One choice so far."""

    __slots__ = ("_customs", "calls", "logprobs", "reasoning", "text", "token_ids", "total")

    def __init__(self, customs: frozenset[str]) -> None:
        self._customs = customs  # names of custom tools
        self.total = 0.0
        self.begin()

    def begin(self) -> None:
        """Forget all but the total: what comes is the next delta."""
        self.text = ""
        self.reasoning = ""
        self.calls: dict[int, ToolCall] = {}
        self.token_ids: list[int] = []
        self.logprobs: list[Position] = []

    def write(self, segment: Segment) -> None:
        match segment.kind:
            case PieceKind.REASONING:
                self.reasoning += segment.text
            case PieceKind.CALL:
                kind = self._kind(segment.text)
                self.calls[segment.call] = ToolCall(index=segment.call, id=segment.id, name=segment.text, type=kind)
            case PieceKind.ARGUMENTS:
                call = self.calls.get(segment.call) or ToolCall(index=segment.call, type=self._kind(segment.name))
                self.calls[segment.call] = msgspec.structs.replace(call, arguments=call.arguments + segment.text)
            case _:
                self.text += segment.text

    def _kind(self, name: str) -> str:
        return "custom" if name in self._customs else "function"


class Gathering:
    """Turns a reply into outputs. Owned by the one coroutine that waits for the reply."""

    def __init__(
        self, reply: Reply, name: str, prompt: str | None, kind: RequestOutputKind, *, logprobs: bool, arrival: float,
        customs: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._reply = reply
        self._name = name
        self._prompt = prompt
        self._kind = kind
        self._logprobs = logprobs
        self._arrival = arrival
        self._began = time.monotonic()
        self._growths = [Growth(customs) for _ in reply.choices]

    def take(self, news: Sequence[Choice]) -> RequestOutput:
        """The output with what `news` brought: of those choices alone where deltas are wanted, else of all."""
        reply, facts = self._reply, self._reply.prompts[0]
        delta = self._kind is RequestOutputKind.DELTA
        for choice in news:
            self._grow(self._growths[choice.index], choice, delta=delta)
        shown = news if delta else reply.choices
        return RequestOutput(
            request_id=self._name,
            prompt=self._prompt,
            prompt_token_ids=unpack("i", facts.token_ids),
            prompt_logprobs=None if facts.logprobs is None else [position(at) if at else None for at in facts.logprobs],
            outputs=[self._output(choice) for choice in shown],
            finished=reply.ended,
            metrics=self._metrics(),
            num_cached_tokens=facts.cached_tokens,
            approximations=facts.approximations,
        )

    def failed(self, error: RequestError) -> RequestOutput:
        """The output of a request that ended with `error`."""
        return RequestOutput(
            request_id=self._name, prompt=self._prompt, prompt_token_ids=unpack("i", self._reply.prompts[0].token_ids),
            outputs=[], finished=True, metrics=self._metrics(), error=error,
        )  # fmt: skip

    def _grow(self, growth: Growth, choice: Choice, *, delta: bool) -> None:
        if delta:
            growth.begin()
        for segment in choice.take():
            growth.write(segment)
        found = choice.take_logprobs()
        growth.total += sum(at.chosen.logprob for at in found)
        growth.logprobs += [position(at) for at in found]
        growth.token_ids += unpack("i", choice.take_token_ids())

    def _output(self, choice: Choice) -> CompletionOutput:
        growth = self._growths[choice.index]
        return CompletionOutput(
            index=choice.index,
            text=growth.text,
            reasoning=growth.reasoning,
            tool_calls=list(growth.calls.values()),
            token_ids=list(growth.token_ids),
            cumulative_logprob=growth.total if self._logprobs else None,
            logprobs=list(growth.logprobs) if self._logprobs else None,
            finish_reason=finish_reason(choice.finish) if choice.finish != Finish.NONE else None,
            stop_reason=choice.stop_reason,
        )

    def _metrics(self) -> RequestMetrics:
        reply, usage = self._reply, self._reply.usage
        first = reply.first_token
        return RequestMetrics(
            arrival_time=self._arrival,
            first_token_time=None if first is None else self._arrival + first - self._began,
            finished_time=self._arrival + time.monotonic() - self._began if reply.ended else None,
            accepted_draft_tokens=usage.accepted_tokens,
            rejected_draft_tokens=usage.rejected_tokens,
        )


def position(at: PositionLogprobs) -> Position:
    """A position's tokens by id, the chosen one first."""
    found = {at.chosen.token_id: Logprob(at.chosen.logprob, at.rank, at.chosen.token)}
    for rank, top in enumerate(at.top, 1):
        found.setdefault(top.token_id, Logprob(top.logprob, rank, top.token))
    return found
