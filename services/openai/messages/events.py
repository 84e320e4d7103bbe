"""The events of a streamed message. Source: Anthropic API reference, "Streaming messages": the message starts, each
block of its content starts, grows and stops, then come the reason for the end, the usage, and the stop.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.protocol.errors import RequestError
from penstock.protocol.messages import PieceKind
from penstock.services.client.output_collector import Choice, Reply
from penstock.services.openai.answers import Identity, Remarks
from penstock.services.openai.messages.errors import encode, told
from penstock.services.openai.messages.output import (
    MessageAnswer,
    MessageUsage,
    Told,
    empty_block,
    shown,
    stop_reason,
    stop_sequence,
)
from penstock.services.openai.output_blocks import Block, Blocks, Change, Happening
from penstock.services.openai.sse import escaped

ENCODE = msgspec.json.Encoder()
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageEvents:
    """As `services.http.stream_writer.Framing`, for one message."""

    def __init__(self, identity: Identity, told: Told = Told()) -> None:  # noqa: B008 (frozen)
        self._identity = identity
        self._told = told
        self._blocks = Blocks()
        self._begun = False

    def take(self, reply: Reply, news: list[Choice]) -> bytes:
        events = self._opening(reply)
        for choice in news:
            changes = self._blocks.push(shown(choice, thinking=self._told.thinking))
            events += [self._changed(change) for change in changes]
        return b"".join(events)

    def end(self, reply: Reply) -> bytes:
        (choice,) = reply.choices
        events = [self._changed(change) for change in self._blocks.end()]
        reason = stop_reason(choice, self._told.max_tokens)
        ending: dict[str, Any] = {"delta": {"stop_reason": reason, "stop_sequence": stop_sequence(choice)}}
        ending["usage"] = MessageUsage.of(reply.usage)
        if self._told.context_management:
            ending["context_management"] = self._told.edits
        if reply.approximations:
            ending["penstock"] = Remarks(reply.approximations)
        events.append(event("message_delta", **ending))
        events.append(event("message_stop"))
        return b"".join(events)

    def failure(self, reply: Reply, error: RequestError) -> bytes:
        return b"event: error\ndata: " + escaped(encode(told(error), self._told.request_id)) + b"\n\n"

    def _opening(self, reply: Reply) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        message = MessageAnswer(
            id=self._identity.id, model=self._identity.model, content=(), stop_reason=None, stop_sequence=None,
            usage=MessageUsage.of(reply.usage),
        )  # fmt: skip
        return [event("message_start", message=message), PING]

    def _changed(self, change: Change) -> bytes:
        index = change.block.index
        match change.what:
            case Happening.BEGUN:
                return event("content_block_start", index=index, content_block=empty_block(change.block))
            case Happening.GROWN:
                return event("content_block_delta", index=index, delta=delta_of(change.block, change.text))
            case Happening.ENDED:
                return event("content_block_stop", index=index)


def delta_of(block: Block, text: str) -> dict[str, str]:
    match block.kind:
        case PieceKind.CALL:
            return {"type": "input_json_delta", "partial_json": text}
        case PieceKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case _:
            return {"type": "text_delta", "text": text}


def event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + escaped(ENCODE.encode({"type": kind, **fields})) + b"\n\n"
