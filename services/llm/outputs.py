"""Outputs of requests, under vLLM's names, and how they are built."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from penstock.protocol.columns import unpack
from penstock.protocol.errors import RequestError
from penstock.protocol.messages import Finish, PieceKind
from penstock.protocol.outputs import PositionLogprobs
from penstock.services.client.output_collector import Choice, OutputCollector, Segment
from penstock.services.llm.params import RequestOutputKind
from penstock.services.llm.prompts import Request
from penstock.services.openai.answers import FINISH_REASONS
from penstock.services.openai.embeddings import Vector

Output = TypeVar("Output")


class Logprob(msgspec.Struct, frozen=True):
    """A token's log-probability at a position; rank 1 is the most likely."""

    logprob: float
    rank: int | None
    decoded_token: str


Position = dict[int, Logprob]  # by token id: the chosen token and the most likely ones


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of a choice. In deltas, `arguments` is the new part, and only the first one has `id` and `name`."""

    index: int  # among the choice's calls
    id: str = ""
    name: str = ""
    arguments: str = ""  # JSON as the model wrote it, perhaps cut off; the input of a custom tool
    type: str = "function"  # or custom


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One choice. `token_ids` includes the token that ended it, `text` does not. In a chat, `text` excludes reasoning
    and tool calls."""

    index: int
    text: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    token_ids: list[int]
    cumulative_logprob: float | None = None  # of the tokens in `logprobs`
    logprobs: list[Position] | None = None
    finish_reason: str | None = None  # stop, length or tool_calls, once it has ended
    stop_reason: str | int | None = None  # the stop string or the stop token id
    weight_versions: list[tuple[int, str]] = []  # of the weights, each with the number of its first token

    def finished(self) -> bool:
        return self.finish_reason is not None

    def message(self) -> dict[str, Any]:
        """The choice as the assistant's message for the next turn."""
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
    """Times in Unix seconds, and draft tokens over all choices."""

    arrival_time: float
    first_token_time: float | None = None  # only if the output was streamed
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
    approximations: tuple[str, ...] = ()  # what a lenient grammar does not enforce exactly
    error: RequestError | None = None  # with `return_errors`; `outputs` is then empty


class PoolingOutput(msgspec.Struct, frozen=True):
    """A prompt's hidden state as the engine pooled it: float32 [hidden]."""

    data: Vector


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """A prompt's embedding, truncated and normalized."""

    embedding: list[float]


class ScoringOutput(msgspec.Struct, frozen=True):
    """The similarity of two texts."""

    score: float


class ClassificationOutput(msgspec.Struct, frozen=True):
    """The chance of each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class PoolingRequestOutput(msgspec.Struct, Generic[Output], frozen=True):
    """The output of one prompt, or of one pair of texts: that of `encode` has a `PoolingOutput`."""

    request_id: str
    outputs: Output
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput], frozen=True):
    """The output of `embed` for one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput], frozen=True):
    """The output of `score` for one pair."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput], frozen=True):
    """The output of `classify` for one prompt."""


class ChoiceSoFar:
    """One choice so far, or in deltas its new part."""

    __slots__ = ("_custom_tools", "logprob", "logprobs", "reasoning", "text", "token_ids", "tool_calls")

    def __init__(self, custom_tools: frozenset[str]) -> None:
        self._custom_tools = custom_tools
        self.logprob = 0.0  # cumulative, in deltas too
        self.clear()

    def clear(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.tool_calls: dict[int, ToolCall] = {}
        self.token_ids: list[int] = []
        self.logprobs: list[Position] = []

    def add(self, choice: Choice) -> None:
        """Add a choice's new output."""
        for segment in choice.take():
            self._write(segment)
        found = choice.take_logprobs()
        self.logprob += sum(at.chosen.logprob for at in found)
        self.logprobs += [position(at) for at in found]
        self.token_ids += unpack("i", choice.take_token_ids())

    def _write(self, segment: Segment) -> None:
        calls, index = self.tool_calls, segment.call
        match segment.kind:
            case PieceKind.REASONING:
                self.reasoning += segment.text
            case PieceKind.CALL:
                calls[index] = ToolCall(index=index, id=segment.id, name=segment.text, type=self._type(segment.text))
            case PieceKind.ARGUMENTS:
                call = calls.get(index) or ToolCall(index=index, type=self._type(segment.name))
                calls[index] = msgspec.structs.replace(call, arguments=call.arguments + segment.text)
            case _:
                self.text += segment.text

    def _type(self, name: str) -> str:
        return "custom" if name in self._custom_tools else "function"


class OutputBuilder:
    """Builds the outputs of one request from its collector."""

    def __init__(self, collector: OutputCollector, request: Request, request_id: str, kind: RequestOutputKind) -> None:
        self._reply = collector
        self._request_id = request_id
        self._prompt = request.prompt
        self._delta = kind is RequestOutputKind.DELTA
        self._logprobs = request.params.logprobs is not None
        self._arrival = request.submit.arrival
        self._began = time.monotonic()
        tools = request.submit.tool_use
        custom = frozenset(tool.name for tool in tools.customs) if tools is not None else frozenset()
        self._choices = [ChoiceSoFar(custom) for _ in collector.choices]

    def take(self, updated: Sequence[Choice]) -> RequestOutput:
        """The output with these updated choices: their deltas only, or all choices."""
        collector, facts = self._reply, self._reply.prompts[0]
        for choice in updated:
            if self._delta:
                self._choices[choice.index].clear()
            self._choices[choice.index].add(choice)
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=unpack("i", facts.token_ids),
            prompt_logprobs=None if facts.logprobs is None else [position(at) if at else None for at in facts.logprobs],
            outputs=[self._output(choice) for choice in (updated if self._delta else collector.choices)],
            finished=collector.ended,
            metrics=self._metrics(),
            num_cached_tokens=facts.cached_tokens,
            approximations=facts.approximations,
        )

    def failed(self, error: RequestError) -> RequestOutput:
        """The output of a request that ended with `error`."""
        return RequestOutput(
            request_id=self._request_id, prompt=self._prompt, outputs=[], finished=True, metrics=self._metrics(),
            prompt_token_ids=unpack("i", self._reply.prompts[0].token_ids), error=error,
        )  # fmt: skip

    def _output(self, choice: Choice) -> CompletionOutput:
        found = self._choices[choice.index]
        return CompletionOutput(
            index=choice.index,
            text=found.text,
            reasoning=found.reasoning,
            tool_calls=list(found.tool_calls.values()),
            token_ids=list(found.token_ids),
            cumulative_logprob=found.logprob if self._logprobs else None,
            logprobs=list(found.logprobs) if self._logprobs else None,
            finish_reason=FINISH_REASONS[choice.finish] if choice.finish != Finish.NONE else None,
            stop_reason=choice.stop_reason,
            weight_versions=choice.versions,
        )

    def _metrics(self) -> RequestMetrics:
        collector, usage = self._reply, self._reply.usage
        first = collector.first_token
        return RequestMetrics(
            arrival_time=self._arrival,
            first_token_time=None if first is None else self._arrival + first - self._began,
            finished_time=self._arrival + time.monotonic() - self._began if collector.ended else None,
            accepted_draft_tokens=usage.accepted_tokens,
            rejected_draft_tokens=usage.rejected_tokens,
        )


def position(at: PositionLogprobs) -> Position:
    """A position's tokens by id, the chosen one first."""
    found = {at.chosen.token_id: Logprob(at.chosen.logprob, at.rank, at.chosen.token)}
    for rank, top in enumerate(at.top, 1):
        found.setdefault(top.token_id, Logprob(top.logprob, rank, top.token))
    return found
