"""A message as types, and how blocks become its content. Source: Anthropic API reference, "Create a Message".

Beyond Anthropic's shape stands only `penstock`, where there is a remark to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.protocol.errors import RequestError
from penstock.protocol.messages import Finish, PieceKind
from penstock.services.client.output_collector import Choice, OutputCollector, Segment, Usage
from penstock.services.openai.answers import Identity, Remarks
from penstock.services.openai.errors import encode_for_messages
from penstock.services.openai.messages.request import AppliedEdits, MessageRequest
from penstock.services.openai.output_blocks import Block, BlockEncoder, blocks_of
from penstock.services.openai.sse import escaped

UNPARSED = "unparsed"  # the only name in the input of a call whose arguments are no JSON object: their text
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
OBJECT = msgspec.json.Decoder(dict[str, Any])


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    """What the model says."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """What the model thought; nothing is signed, since it may be shown and changed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    """A call of one of the client's tools."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`: tokens of the prompt that were cached are not among its `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        cached = usage.cached_tokens or 0
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: tuple[ContentBlock, ...]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | msgspec.UnsetType = msgspec.UNSET
    penstock: Remarks | msgspec.UnsetType = msgspec.UNSET


class Uncleared(msgspec.Struct, frozen=True):
    """`context_management` of a count."""

    original_input_tokens: int


class TokenCount(msgspec.Struct, frozen=True):
    """Body of a count."""

    input_tokens: int
    context_management: Uncleared | msgspec.UnsetType = msgspec.UNSET


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a message holds because of its request."""

    thinking: bool = True
    context_management: bool = False  # whether edits were asked for
    max_tokens: int = 0  # as the request has it
    request_id: str | None = None  # in the error that ends a stream

    @classmethod
    def of(cls, request: MessageRequest, request_id: str) -> ResponseOptions:
        return cls(
            thinking=request.thinking is None or request.thinking.display != "omitted",
            context_management=request.context_management is not None,
            max_tokens=request.max_tokens,
            request_id=request_id,
        )

    @property
    def edits(self) -> AppliedEdits | msgspec.UnsetType:
        return AppliedEdits() if self.context_management else msgspec.UNSET


def shown(choice: Choice, *, thinking: bool) -> list[Segment]:
    """What the choice has to give, which is thereby taken; its reasoning only if `thinking` is to be told."""
    return [segment for segment in choice.take() if thinking or segment.kind != PieceKind.REASONING]


def message_answer(
    identity: Identity,
    collector: OutputCollector,
    told: ResponseOptions = ResponseOptions(),  # noqa: B008 (frozen)
) -> MessageAnswer:
    """The whole message; its choice has finished."""
    (choice,) = collector.choices
    blocks = blocks_of(shown(choice, thinking=told.thinking))
    return MessageAnswer(
        id=identity.id,
        model=identity.model,
        content=tuple(content_block(block, block.text) for block in blocks),
        stop_reason=stop_reason(choice, told.max_tokens),
        stop_sequence=stop_sequence(choice),
        usage=MessageUsage.of(collector.usage),
        context_management=told.edits,
        penstock=Remarks.of(collector),
    )


def content_block(block: Block, text: str) -> ContentBlock:
    """The block with so much of its text."""
    match block.kind:
        case PieceKind.CALL:
            return ToolUseBlock("toolu_" + block.call.removeprefix("call_"), block.name, arguments(text))
        case PieceKind.REASONING:
            return ThinkingBlock(text)
        case _:
            return TextBlock(text)


def arguments(text: str) -> dict[str, Any]:
    """A call's arguments. Those that were cut off, or in which the model erred, are told as the text that they are."""
    try:
        return OBJECT.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError):
        return {UNPARSED: text}


def stop_sequence(choice: Choice) -> str | None:
    return choice.stop_reason if isinstance(choice.stop_reason, str) else None


def stop_reason(choice: Choice, max_tokens: int) -> StopReason:
    """`max_tokens` is what was asked for: an output that had to end before has filled the context."""
    if choice.finish == Finish.LENGTH:
        return "max_tokens" if choice.tokens >= max_tokens else "model_context_window_exceeded"
    if choice.finish == Finish.CALLS:
        return "tool_use"
    return "end_turn" if stop_sequence(choice) is None else "stop_sequence"


ENCODE = msgspec.json.Encoder()
# The type of a block's delta, and the field that holds it.
DELTAS: Mapping[PieceKind, tuple[str, str]] = {
    PieceKind.CONTENT: ("text_delta", "text"),
    PieceKind.REASONING: ("thinking_delta", "thinking"),
    PieceKind.CALL: ("input_json_delta", "partial_json"),
}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageEvents(BlockEncoder):
    """As `services.openai.generation.ResponseEncoder`, for one message."""

    def __init__(self, identity: Identity, told: ResponseOptions = ResponseOptions()) -> None:  # noqa: B008 (frozen)
        super().__init__()
        self._identity = identity
        self._told = told
        self._opened = False

    def response(self, outputs: OutputCollector) -> bytes:
        """The body of a message that is not streamed."""
        return ENCODE.encode(message_answer(self._identity, outputs, self._told))

    def take(self, collector: OutputCollector, updated: list[Choice]) -> bytes:
        events = self._opening(collector)
        for choice in updated:
            events += self.push(shown(choice, thinking=self._told.thinking))
        return b"".join(events)

    def end(self, collector: OutputCollector) -> bytes:
        (choice,) = collector.choices
        events = self.close()
        reason = stop_reason(choice, self._told.max_tokens)
        ending: dict[str, Any] = {"delta": {"stop_reason": reason, "stop_sequence": stop_sequence(choice)}}
        ending["usage"] = MessageUsage.of(collector.usage)
        if self._told.context_management:
            ending["context_management"] = self._told.edits
        if (remarks := Remarks.of(collector)) is not msgspec.UNSET:
            ending["penstock"] = remarks
        events.append(event("message_delta", **ending))
        events.append(event("message_stop"))
        return b"".join(events)

    def failure(self, collector: OutputCollector, error: RequestError) -> bytes:
        return b"event: error\ndata: " + escaped(encode_for_messages(error, self._told.request_id)) + b"\n\n"

    def _opening(self, collector: OutputCollector) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        message = MessageAnswer(
            id=self._identity.id, model=self._identity.model, content=(), stop_reason=None, stop_sequence=None,
            usage=MessageUsage.of(collector.usage),
        )  # fmt: skip
        return [event("message_start", message=message), PING]

    def _begun(self, block: Block) -> list[bytes]:
        return [event("content_block_start", index=block.index, content_block=content_block(block, ""))]

    def _grown(self, block: Block, text: str) -> list[bytes]:
        kind, field = DELTAS[PieceKind(block.kind)]
        return [event("content_block_delta", index=block.index, delta={"type": kind, field: text})]

    def _ended(self, block: Block) -> list[bytes]:
        return [event("content_block_stop", index=block.index)]


def event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + escaped(ENCODE.encode({"type": kind, **fields})) + b"\n\n"
