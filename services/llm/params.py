"""How an output is made, under the names that vLLM's users know, and as the request that the HTTP server would read.

A `SamplingParams` becomes the body of a completions or chat request and is decoded and checked by the code that does so
for HTTP, so a value that is refused there is refused here with the same words.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.protocol.errors import InvalidRequest
from penstock.services.openai.chat import REQUEST as CHAT
from penstock.services.openai.completions import REQUEST as COMPLETION
from penstock.services.openai.schema import ChatRequest, CompletionRequest
from penstock.services.openai.validation import decode


class RequestOutputKind(enum.IntEnum):
    """What a stream of `AsyncLLM.generate` yields. `LLM` gives whole outputs alone."""

    CUMULATIVE = 0  # each output holds all so far
    DELTA = 1  # each output holds what is new
    FINAL_ONLY = 2  # one output, at the end


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an output must follow: one of the first six. `json` is a schema as a dict or as text."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a request are chosen; what is left out changes nothing. Without any `SamplingParams` the
    model's own defaults hold (its generation_config.json).

    `logit_bias` is by token id. `logprobs=k` tells the k best of each position beside the chosen token, by the model's
    own distribution or, with `logprobs_mode="processed_logprobs"`, by that which structure, allowed and bad words,
    biases, penalties and temperature leave. `speculative` false switches drafts off. `max_tokens` None takes the room
    that the prompt leaves.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None  # raw_logprobs or processed_logprobs
    truncate_prompt_tokens: int | None = None  # keep so many of the prompt's last tokens; -1: what leaves room
    truncation_side: str | None = None  # left; right keeps the first ones
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    whitespace: str | None = None  # between JSON tokens: none, bounded, or a regex
    lenient: bool | None = None  # approximate what has no exact form of a schema
    speculative: bool | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def clone(self) -> SamplingParams:
        """The same: nothing of it can change."""
        return self


# Fields that have the same name and meaning in a request's body.
ALIKE = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words",
    "logit_bias", "allowed_token_ids", "prompt_logprobs", "logprobs_mode", "truncate_prompt_tokens",
    "truncation_side",
    "skip_special_tokens", "structured_outputs", "whitespace", "lenient", "speculative",
)  # fmt: skip


def body(params: SamplingParams | None) -> dict[str, Any]:
    """The fields of a request's body. Raises InvalidRequest for what no body can say."""
    if params is None:
        return {}
    fields = {name: getattr(params, name) for name in ALIKE}
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name}: {value} is not a finite number", param=name, code="invalid_value")
    if params.stop == []:
        fields["stop"] = None
    if params.max_tokens == 0:  # a completion may be an echo alone; nothing is echoed here
        raise InvalidRequest("max_tokens is 0; at least one token is made", param="max_tokens", code="invalid_value")
    if not params.detokenize and params.stop:
        raise InvalidRequest("stop needs detokenize to be true", param="stop", code="invalid_value")
    return {name: value for name, value in fields.items() if value is not None}


def completion_request(params: SamplingParams | None, prompt: str | list[int] = "", **more: Any) -> CompletionRequest:
    """The parameters as the body of a completion. Raises InvalidRequest naming the parameter."""
    fields: dict[str, Any] = {**body(params), "prompt": prompt or "", **given(more)}
    if params is not None:
        fields |= given({"max_tokens": params.max_tokens, "logprobs": params.logprobs})
    return decode(encoded(fields), COMPLETION)


def chat_request(params: SamplingParams | None, messages: object, **more: Any) -> ChatRequest:
    """The parameters as the body of a chat completion. Raises InvalidRequest naming the parameter."""
    fields: dict[str, Any] = {**body(params), "messages": messages, **given(more)}
    if params is not None:
        fields |= given({"max_tokens": params.max_tokens})
        if params.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": params.logprobs}
    return decode(encoded(fields), CHAT)


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def encoded(fields: dict[str, Any]) -> bytes:
    """The body as JSON. Raises InvalidRequest for what JSON cannot hold."""
    try:
        return msgspec.json.encode(fields)
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest(f"the parameters cannot be told as JSON: {error}", code="invalid_type") from error
