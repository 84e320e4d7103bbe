"""The body of POST /v1/responses as types. Source: OpenAI API reference, "Create a model response".

Fields that are not of OpenAI's are those of `services.openai.schema`, and `stop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.protocol import limits
from penstock.services.openai.parameters import UNSUPPORTED, WITHOUT_EFFECT
from penstock.services.openai.schema import Count, Detail, Effort, Extras, OptionalJson, Share, StopString, TopCount

Word = Annotated[str, Meta(max_length=64)]
ROLES = ("user", "assistant", "system", "developer")
LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
MAX_METADATA = 16
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)
]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a content, an output or a reasoning: those that hold text are read, and `input_image` where the model
    sees images."""

    type: Word = ""
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None  # of an image: a data: URL, or one of https at a host that the server fetches from
    file_id: str | None = None
    detail: Detail | None = None
    stdout: str | None = None  # of a shell's output, which has no type
    stderr: str | None = None


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`format` of a custom tool: any text, or text that follows a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponseTool(msgspec.Struct, frozen=True, kw_only=True):
    """One of `tools`; those of type `function`, `custom` and `namespace`, which holds such, are served."""

    type: Word
    name: str | None = None
    description: str | None = None
    parameters: OptionalJson = msgspec.UNSET
    strict: bool | None = None
    format: ToolFormat | None = None
    tools: list[ResponseTool] | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One of `input`: a message, a reasoning, a call or its output."""

    type: Word | None = None  # a message may leave it out
    id: str | None = None
    role: Annotated[str, Meta(max_length=64, extra_json_schema={"enum": list(ROLES)})] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None  # of a custom tool
    output: str | list[Part] | dict[str, Any] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    status: str | None = None
    # of calls that others made
    action: Any = None
    operation: Any = None
    queries: Any = None
    results: list[Any] | None = None
    code: str | None = None
    outputs: list[Any] | None = None
    server_label: str | None = None
    error: Any = None
    revised_prompt: str | None = None
    result: str | None = None
    tools: list[ResponseTool] | None = None


class AllowedTool(msgspec.Struct, frozen=True, kw_only=True):
    """One of the tools that may be called, by its name."""

    type: Word
    name: str | None = None
    namespace: str | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` other than a word: the function to call, or the tools that may be."""

    type: Word
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`text.format`."""

    type: Word
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    description: str | None = None
    schema: OptionalJson = msgspec.UNSET
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning`. Reasoning is told as it is, so a summary of it is not made whatever is asked."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_obfuscation: bool | None = None


class ResponseRequest(Extras, frozen=True, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Include] | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_logprobs: TopCount | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=limits.MOST_STOP_STRINGS)] | None = None


# Name → values that ask for nothing, as in `services.openai.parameters`.
CHAT_NAMES: Mapping[str, tuple[object, ...]] = {
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": (),
    "reasoning_effort": (),
    "n": (1,),
    "logprobs": (False,),
}
OWN_REFUSALS: Mapping[str, tuple[object, ...]] = {
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": ([],),
    "moderation": (),
}
REFUSALS: Mapping[str, tuple[object, ...]] = {
    **{name: values for name, values in UNSUPPORTED.items() if name != "reasoning"},
    **OWN_REFUSALS,
    **CHAT_NAMES,
}
RESPONSE_WITHOUT_EFFECT = tuple(name for name in WITHOUT_EFFECT if name not in ("metadata", "store"))
REASONS: Mapping[str, str] = {
    "conversation": "conversation is not supported; previous_response_id goes on from a response that is kept",
    "prompt": "prompt names a template that OpenAI keeps; this server keeps none",
    "max_tool_calls": "max_tool_calls bounds OpenAI's built-in tools; this server has none",
    "context_management": "context_management is not supported; truncation says what to do with too long an input",
    "messages": "messages is a parameter of chats; here it is input",
    "max_tokens": "max_tokens is a parameter of chats; here it is max_output_tokens",
    "max_completion_tokens": "max_completion_tokens is a parameter of chats; here it is max_output_tokens",
    "response_format": "response_format is a parameter of chats; here it is text.format",
    "reasoning_effort": "reasoning_effort is a parameter of chats; here it is reasoning.effort",
    "n": "a response is one; n is a parameter of chats",
    "logprobs": f"logprobs is a parameter of chats; here include has {LOGPROBS}",
}
