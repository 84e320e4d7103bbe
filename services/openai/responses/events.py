"""The events of a streamed response, in order and numbered.

Source: OpenAI API reference, "Streaming events" of responses: a response is created and in progress; each item is
added, its part is added, grows, is done, the item is done; then the response is completed, incomplete or failed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.protocol.errors import RequestError
from penstock.protocol.messages import Finish, PieceKind
from penstock.services.client.output_collector import Choice, OutputCollector, Segment
from penstock.services.openai.answers import ChatTokenLogprob
from penstock.services.openai.output_blocks import Block, BlockEncoder
from penstock.services.openai.responses.output import (
    OutputText,
    ReasoningText,
    ResponseAnswer,
    empty_item,
    item_id,
    item_of,
    item_status,
    shaped,
)
from penstock.services.openai.responses.turn import Turn
from penstock.services.openai.sse import escaped

ENCODE = msgspec.json.Encoder()


class ResponseEvents(BlockEncoder):
    """As `services.openai.generation.ResponseEncoder`, for one response."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self._turn = turn
        self._finish = Finish.NONE
        self._number = 0
        self._told: list[ChatTokenLogprob] = []  # log-probabilities of all tokens so far
        self._waiting: list[ChatTokenLogprob] = []  # of those that no event has told yet
        self._opened = False

    def response(self, outputs: OutputCollector) -> bytes:
        """The body of a response that is not streamed."""
        return ENCODE.encode(self._turn.whole(outputs))

    def take(self, collector: OutputCollector, updated: list[Choice]) -> bytes:
        events = self._opening()
        for choice in updated:
            logprobs = shaped(choice.take_logprobs())
            self._told += logprobs
            self._waiting += logprobs
            self._finish = choice.finish
            events += self.push(choice.take())
        return b"".join(events)

    def end(self, collector: OutputCollector) -> bytes:
        events = [] if self.blocks else self.push([Segment(PieceKind.CONTENT, "")])
        events += self.close()
        answer = self._turn.complete(collector, self.blocks, list(self._told))
        events.append(self._event(f"response.{answer.status}", response=answer))
        return b"".join(events)

    def failure(self, collector: OutputCollector, error: RequestError) -> bytes:
        answer = self._turn.failed(error)
        return b"".join(
            (
                *self._opening(),
                self._event("error", code=error.code, message=error.message, param=error.param),
                self._event("response.failed", response=answer),
            )
        )

    def _opening(self) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        opening: ResponseAnswer = self._turn.opening
        return [self._event(f"response.{word}", response=opening) for word in ("created", "in_progress")]

    def _begun(self, block: Block) -> list[bytes]:
        item = empty_item(block, self._turn.naming)
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind != PieceKind.CALL:
            part = ReasoningText(text="") if block.kind == PieceKind.REASONING else OutputText(text="")
            events.append(self._of(block, "response.content_part.added", content_index=0, part=part))
        return events

    def _grown(self, block: Block, text: str) -> list[bytes]:
        if not text:
            return []
        match block.kind:
            case PieceKind.CALL:
                kind = "custom_tool_call_input" if self._turn.naming.custom(block) else "function_call_arguments"
                return [self._of(block, f"response.{kind}.delta", delta=text)]
            case PieceKind.REASONING:
                return [self._of(block, "response.reasoning_text.delta", content_index=0, delta=text)]
            case _:
                logprobs, self._waiting = self._waiting, []
                return [self._of(block, "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _ended(self, block: Block) -> list[bytes]:
        status = item_status(block, self.blocks, self._finish)
        text = block.text
        told = list(self._told) if block.kind == PieceKind.CONTENT else []
        part: OutputText | ReasoningText
        match block.kind:
            case PieceKind.CALL if self._turn.naming.custom(block):
                events = [self._of(block, "response.custom_tool_call_input.done", input=text)]
            case PieceKind.CALL:
                events = [self._of(block, "response.function_call_arguments.done", arguments=text)]
            case PieceKind.REASONING:
                part = ReasoningText(text=text)
                events = [self._of(block, "response.reasoning_text.done", content_index=0, text=text),
                          self._of(block, "response.content_part.done", content_index=0, part=part)]  # fmt: skip
            case _:
                part = OutputText(text=text, logprobs=told)
                events = [self._of(block, "response.output_text.done", content_index=0, text=text, logprobs=told),
                          self._of(block, "response.content_part.done", content_index=0, part=part)]  # fmt: skip
        item = item_of(block, status, self._turn.naming, told)
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _of(self, block: Block, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=item_id(block, self._turn.naming), output_index=block.index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = escaped(ENCODE.encode({"type": kind, "sequence_number": self._number, **fields}))
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
