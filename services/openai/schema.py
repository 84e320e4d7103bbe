"""Request bodies as types: what msgspec decodes and what /openapi.json shows.

Source: OpenAI API reference, "Create chat completion" and "Create completion"; the fields after them are the extras
that clients of open servers send (`extra_body`). A field that is null counts as left out. Fields that no struct here
names are accepted, unless `refusals` knows them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.protocol import limits

TokenId = Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]
Count = Annotated[int, Meta(ge=1, le=limits.MAX_TOKEN_ID)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopCount = Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TIMEOUT = "seconds in which the request must end"
Timeout = Annotated[float, Meta(ge=limits.MIN_TIMEOUT, le=limits.MAX_TIMEOUT, description=TIMEOUT)]
Whitespace = Annotated[str, Meta(min_length=1, max_length=limits.MAX_WHITESPACE)]
SPECULATIVE = "false: no drafts for this request but those that its grammar forces; the output is the same"
TRUNCATE = "keep so many of the prompt's last tokens; -1: as many as leave room for max_tokens"
TRUNCATION_SIDE = "where truncate_prompt_tokens cuts: left, the default, keeps the last tokens, right the first"
Side = Literal["left", "right"]
RETURN_IDS = "answer with the token ids of the prompt and of the output as well"
AS_IDS = "name the tokens of log-probabilities token_id:N, so that tokens that read the same can be told apart"
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]  # names that vLLM has for the same, of a whole server
LOGPROBS_MODE = (
    "what the output's log-probabilities are of: the model's own distribution, or the one that structure, allowed and "
    "bad words, biases, penalties and temperature leave; top_k, top_p and min_p change neither"
)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Budget = Annotated[int, Meta(ge=0, le=limits.MAX_THINKING)]
Detail = Literal["auto", "low", "high", "original"]  # protocol.images.DETAILS
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields that may hold a grammar, of which a request uses one.
GRAMMAR_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice",
    "guided_json_object", "json_schema", "regex", "ebnf", "grammar", "structural_tag",
)  # fmt: skip
UNREAD = 16 << 10  # bytes of a grammar's JSON; a longer one is left to the process that compiles it
OptionalJson = msgspec.Raw | msgspec.UnsetType  # decoded in a second pass, or handed on as it is


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class ImageURL(msgspec.Struct, frozen=True, kw_only=True):
    """`image_url`: a data: URL, or one of https at a host that the server fetches from."""

    url: str
    detail: Detail | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content; parts of type `text` are served, an assistant's `refusal`, and `image_url` where
    the model sees images."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageURL | str | None = None  # a string, as vLLM takes it, is the URL


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """`prediction`: text that the output is expected to repeat. Its tokens are drafts; what comes out is the same."""

    type: Literal["content"]
    content: str | Annotated[list[ContentPart], Meta(min_length=1)]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What every request for text may say."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=limits.MAX_LOGIT_BIAS)] | None = None
    seed: Annotated[int, Meta(ge=limits.SEED_MIN, le=limits.SEED_MAX)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=limits.MOST_STOP_STRINGS)] | None = None
    user: str | None = None
    prediction: Prediction | None = None  # OpenAI's of chat completions; served for completions as well

    top_k: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKEN_ID)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=limits.MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: TopCount | None = None
    logprobs_mode: Annotated[LogprobsMode, Meta(description=LOGPROBS_MODE)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKEN_ID, description=TRUNCATE)] | None = None
    truncation_side: Annotated[Side, Meta(description=TRUNCATION_SIDE)] | None = None
    return_token_ids: Annotated[bool, Meta(description=RETURN_IDS)] | None = None
    return_tokens_as_token_ids: Annotated[bool, Meta(description=AS_IDS)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=limits.MAX_CACHE_SALT)] | None = None
    timeout: Timeout | None = None
    speculative: Annotated[bool, Meta(description=SPECULATIVE)] | None = None

    # What the output must follow: at most one of these, see `services.openai.structured_output`.
    response_format: OptionalJson = msgspec.UNSET
    structured_outputs: OptionalJson = msgspec.UNSET
    guided_json: OptionalJson = msgspec.UNSET
    guided_regex: OptionalJson = msgspec.UNSET
    guided_grammar: OptionalJson = msgspec.UNSET
    guided_choice: OptionalJson = msgspec.UNSET
    guided_json_object: OptionalJson = msgspec.UNSET
    json_schema: OptionalJson = msgspec.UNSET
    regex: OptionalJson = msgspec.UNSET
    ebnf: OptionalJson = msgspec.UNSET
    grammar: OptionalJson = msgspec.UNSET
    structural_tag: OptionalJson = msgspec.UNSET
    whitespace: Whitespace | None = None  # between JSON tokens: none, bounded, or a regex
    guided_whitespace_pattern: Whitespace | None = None
    lenient: bool | None = None  # approximate what has no exact form, and say so


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """What was called, and with what: JSON as text, as the model wrote it, or an object."""

    name: str
    arguments: OptionalJson = msgspec.UNSET


class CustomCall(msgspec.Struct, frozen=True, kw_only=True):
    """Which custom tool was called, and with what text."""

    name: str
    input: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an assistant's message."""

    type: Literal["function", "custom"] = "function"
    id: str | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the conversation. Further fields are handed to the model's chat template.

    Roles are system, developer, user, assistant and tool. An assistant's message has content, `tool_calls` or both; its
    `reasoning_content` (or `reasoning`) is for templates that show it.
    """

    role: Annotated[str, Meta(max_length=64, extra_json_schema={"enum": list(ROLES)})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: OptionalJson = msgspec.UNSET
    audio: OptionalJson = msgspec.UNSET


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: msgspec.Raw
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: OptionalJson = msgspec.UNSET
    chat_template: Annotated[str, Meta(min_length=1, max_length=limits.MAX_CHAT_TEMPLATE)] | None = None
    tools: OptionalJson = msgspec.UNSET
    tool_choice: OptionalJson = msgspec.UNSET
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Budget | None = None
    max_thinking_tokens: Budget | None = None  # the same
    include_reasoning: bool | None = None  # false: it is not told
    separate_reasoning: bool | None = None  # false: it stays in the content, as the model wrote it


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | Annotated[list[TokenId | str | list[TokenId]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)] | None = None  # 0 with echo: the prompt alone
    logprobs: TopCount | None = None
    echo: bool | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: OptionalJson = msgspec.UNSET
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: OptionalJson = msgspec.UNSET
    tools: list[msgspec.Raw] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """Handed on as they are."""

    top_k: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKEN_ID)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=limits.MAX_LOGIT_BIAS)] | None = None
    seed: Annotated[int, Meta(ge=limits.SEED_MIN, le=limits.SEED_MAX)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=limits.MAX_CACHE_SALT)] | None = None
    timeout: Timeout | None = None
    speculative: bool | None = None
    thinking_token_budget: Budget | None = None
    chat_template_kwargs: OptionalJson = msgspec.UNSET


def extras_of(request: Extras) -> dict[str, Any]:
    """By name, those that a GenerationRequest has too."""
    return {name: getattr(request, name) for name in SHARED}


SHARED = tuple(name for name in Extras.__struct_fields__ if name in GenerationRequest.__struct_fields__)
