"""The body of POST /v1/messages as types. Source: Anthropic API reference, "Create a Message".

Fields that are not of Anthropic's are those of `services.openai.extensions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.protocol import limits
from penstock.services.openai.extensions import Extras
from penstock.services.openai.messages.blocks import InputBlock, InputMessage, Word
from penstock.services.openai.messages.context import ContextManagement
from penstock.services.openai.schema import Count, OptionalJson, Share, StopString
from penstock.services.openai.unsupported import REFUSED


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


# Name → values that ask for nothing, as in `services.openai.unsupported`.
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
REFUSALS: Mapping[str, tuple[object, ...]] = {**REFUSED, **OWN_REFUSALS, **CHAT_NAMES}
REASONS: Mapping[str, str] = {
    "container": "container names a machine of Anthropic's; this server has no such tools",
    "mcp_servers": "mcp_servers is not built; this server connects to no others",
    "speed": "speed is not built; every request is served as fast as the engine can",
    "max_completion_tokens": "max_completion_tokens is a parameter of chats; here it is max_tokens",
    "stop": "stop is a parameter of chats; here it is stop_sequences",
    "response_format": "response_format is a parameter of chats; here it is output_config.format",
    "reasoning_effort": "reasoning_effort is a parameter of chats; here it is thinking, or output_config.effort",
    "output_format": "output_format is the former name of output_config.format; give that instead",
    "n": "a message is one; n is a parameter of chats",
    "logprobs": "logprobs is a parameter of chats and responses; a message has no place for them",
}
WITHOUT_EFFECT = ("service_tier", "cache_control", "inference_geo", "betas")
