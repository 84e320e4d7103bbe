"""`context_management` of a message: edits that the client asks for to keep its conversation short.

None is applied: the conversation is taken as it is, and an answer says so in `context_management.applied_edits`. Edits
that could change something are named in a response header. Source: Anthropic API reference, "Context editing".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.services.openai.messages.blocks import InputBlock, InputMessage, Word
from penstock.services.openai.schema import OptionalJson
from penstock.services.openai.validation import decode, given

HEADER = b"x-penstock-ignored"
MOST_EDITS = 64
THINKING_TURNS = 1  # kept where an edit leaves it open
TOOL_USES = 3
TRIGGER_TOKENS = 100_000
Number = Annotated[int, Meta(ge=0)]


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """One of `edits`; its other fields depend on its type."""

    type: Word
    keep: OptionalJson = msgspec.UNSET
    trigger: OptionalJson = msgspec.UNSET


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True):
    """`context_management`."""

    edits: Annotated[list[Edit], Meta(max_length=MOST_EDITS)] | None = None


class AppliedEdits(msgspec.Struct, frozen=True):
    """`context_management` of an answer."""

    applied_edits: tuple[()] = ()


class KeptThinking(msgspec.Struct, frozen=True):
    """`keep` of clear_thinking."""

    type: Literal["all", "thinking_turns"]
    value: Number = THINKING_TURNS


class KeptTools(msgspec.Struct, frozen=True):
    """`keep` of clear_tool_uses."""

    type: Literal["tool_uses"]
    value: Number


class Trigger(msgspec.Struct, frozen=True):
    """`trigger` of clear_tool_uses."""

    type: Literal["input_tokens", "tool_uses"]
    value: Number


THINKING = msgspec.json.Decoder(Literal["all"] | KeptThinking)
TOOLS = msgspec.json.Decoder(KeptTools)
TRIGGER = msgspec.json.Decoder(Trigger)


def ignored(management: ContextManagement, messages: Sequence[InputMessage], max_model_len: int) -> list[str]:
    """The edits that could change something. Raises InvalidRequest for one that is not as its type has it."""
    found = []
    for number, edit in enumerate(management.edits or ()):
        path = f"context_management.edits[{number}]"
        if not changes_nothing(edit, path, messages, max_model_len):
            found.append(path)
    return found


def changes_nothing(edit: Edit, path: str, messages: Sequence[InputMessage], max_model_len: int) -> bool:
    match edit.type:
        case "clear_thinking_20251015":
            keep = decode(edit.keep, THINKING, f"{path}.keep") if given(edit.keep) else KeptThinking("thinking_turns")
            if isinstance(keep, str) or keep.type == "all":
                return True
            thought = sum(any("thinking" in block.type for block in blocks_of(message)) for message in messages)
            return thought <= keep.value
        case "clear_tool_uses_20250919":
            kept = decode(edit.keep, TOOLS, f"{path}.keep").value if given(edit.keep) else TOOL_USES
            trigger = Trigger("input_tokens", TRIGGER_TOKENS)
            if given(edit.trigger):
                trigger = decode(edit.trigger, TRIGGER, f"{path}.trigger")
            used = sum(block.type == "tool_use" for message in messages for block in blocks_of(message))
            below = max_model_len if trigger.type == "input_tokens" else used
            return used <= kept or below <= trigger.value
        case _:
            return False


def blocks_of(message: InputMessage) -> Sequence[InputBlock]:
    return () if isinstance(message.content, str) else message.content
