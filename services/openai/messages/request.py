"""The body of POST /v1/messages as types. Source: Anthropic API reference, "Create a Message".

Fields that are not of Anthropic's are those of `services.openai.schema`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.protocol import limits
from penstock.services.openai.parameters import UNSUPPORTED
from penstock.services.openai.schema import Count, Extras, OptionalJson, Share, StopString
from penstock.services.openai.validation import decode, given

Word = Annotated[str, Meta(max_length=64)]
ROLES = ("user", "assistant", "system")


class InputBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a content: text, thinking, tool_use, tool_result, search_result and documents of plain text are
    read, and images where the model sees them."""

    type: Word
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | None = None
    is_error: bool | None = None
    source: dict[str, Any] | str | None = None
    title: str | None = None
    context: str | None = None


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the conversation."""

    role: Annotated[str, Meta(max_length=64, extra_json_schema={"enum": list(ROLES)})]
    content: str | list[InputBlock]


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """One of `tools`; those of the client's own are served."""

    name: str
    type: Word | None = None
    description: str | None = None
    input_schema: OptionalJson = msgspec.UNSET
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """`thinking`: with a budget, as the model sees fit, or none."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_THINKING)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema: OptionalJson = msgspec.UNSET


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """`metadata`."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens: the fields of a message that stand in its prompt."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[InputBlock] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: OptionalJson = msgspec.UNSET


class MessageRequest(Extras, frozen=True, kw_only=True):
    """Body of POST /v1/messages."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    max_tokens: Count
    model: str | None = None
    system: str | list[InputBlock] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=limits.MOST_STOP_STRINGS)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    metadata: Metadata | None = None


# Name → values that ask for nothing, as in `services.openai.parameters`.
OWN_REFUSALS: Mapping[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
CHAT_NAMES: Mapping[str, tuple[object, ...]] = {
    "max_completion_tokens": (),
    "stop": (),
    "response_format": (),
    "reasoning_effort": (),
    "output_format": (),
    "n": (1,),
    "logprobs": (False,),
}
REFUSALS: Mapping[str, tuple[object, ...]] = {**UNSUPPORTED, **OWN_REFUSALS, **CHAT_NAMES}
REASONS: Mapping[str, str] = {
    "container": "container names a machine of Anthropic's; this server has no such tools",
    "mcp_servers": "mcp_servers is not supported; this server connects to no others",
    "speed": "speed is not supported; every request is served as fast as the engine can",
    "max_completion_tokens": "max_completion_tokens is a parameter of chats; here it is max_tokens",
    "stop": "stop is a parameter of chats; here it is stop_sequences",
    "response_format": "response_format is a parameter of chats; here it is output_config.format",
    "reasoning_effort": "reasoning_effort is a parameter of chats; here it is thinking, or output_config.effort",
    "output_format": "output_format is the former name of output_config.format; give that instead",
    "n": "a message is one; n is a parameter of chats",
    "logprobs": "logprobs is a parameter of chats and responses; a message has no place for them",
}
WITHOUT_EFFECT = ("service_tier", "cache_control", "inference_geo", "betas")


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
