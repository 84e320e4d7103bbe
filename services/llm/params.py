"""Sampling parameters under vLLM's names.

A `SamplingParams` becomes the body of a completions or chat request, which is decoded and checked by the HTTP server's
code, so errors are the same in both. Whatever is wrong for every model is refused when the object is made.
"""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.protocol import limits
from penstock.protocol.errors import InvalidRequest, invalid
from penstock.protocol.messages import TraceContext
from penstock.services.client.model_info import ModelInfo
from penstock.services.openai import chat, completions
from penstock.services.openai.parameters import submission
from penstock.services.openai.schema import ChatRequest, CompletionRequest
from penstock.services.openai.validation import decode

ANY_MODEL = ModelInfo(names=("",), max_model_len=limits.MAX_TOKEN_ID, vocab_size=limits.MAX_TOKEN_ID + 1, created=0)


class RequestOutputKind(enum.IntEnum):
    """What `AsyncLLM.generate` yields. `LLM` always returns final outputs."""

    CUMULATIVE = 0  # each output holds everything so far
    DELTA = 1  # each output holds the new part
    FINAL_ONLY = 2  # one output, at the end


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The structure of the output: one of the first six. `json` is a schema as a dict or as text."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the tokens of a request are chosen; each default changes nothing. Without `SamplingParams`, the model's own
    defaults hold (its generation_config.json). Raises InvalidRequest naming the parameter.

    `logit_bias` is by token id. `logprobs=k` adds the k most likely tokens of each position, by the model's own
    distribution or, with `logprobs_mode="processed_logprobs"`, by the one after structure, allowed and bad words,
    biases, penalties and temperature. `speculative` false switches drafts off. `max_tokens` None fills the context.
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
    truncate_prompt_tokens: int | None = None  # keep that many of the prompt's last tokens; -1: as many as fit
    truncation_side: str | None = None  # left, or right to keep the first tokens
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    whitespace: str | None = None  # between JSON tokens: none, bounded, or a regex
    lenient: bool | None = None  # approximate schema keywords without an exact form
    speculative: bool | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        body = as_completion(self)
        submission(body, completions.lengths(body), ANY_MODEL, self.n, TraceContext())

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)


# Fields with the same name and meaning in the body of a request.
SAME_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words",
    "logit_bias", "allowed_token_ids", "prompt_logprobs", "logprobs_mode", "truncate_prompt_tokens",
    "truncation_side", "skip_special_tokens", "structured_outputs", "whitespace", "lenient", "speculative",
)  # fmt: skip


def body(params: SamplingParams | None) -> dict[str, Any]:
    """The fields of a request's body. Raises InvalidRequest for values that a body cannot express."""
    if params is None:
        return {}
    fields = {name: getattr(params, name) for name in SAME_FIELDS}
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(name, f": {value} is not a finite number")
    for name, kind in (("detokenize", bool), ("output_kind", RequestOutputKind)):
        if not isinstance(value := getattr(params, name), kind):
            raise invalid(name, f"must be a {kind.__name__}, not {value!r}", "invalid_type")
    if params.stop == []:
        fields["stop"] = None
    if params.max_tokens == 0:  # a completion over HTTP may be an echo alone; nothing is echoed here
        raise invalid("max_tokens", "is 0; at least one token is made")
    if not params.detokenize and params.stop:
        raise invalid("stop", "needs detokenize to be true")
    return {**fields, "max_tokens": params.max_tokens}


def as_completion(params: SamplingParams | None) -> CompletionRequest:
    """The parameters as the body of a completion of an empty prompt. Raises InvalidRequest naming the parameter."""
    logprobs = None if params is None else params.logprobs
    return decode(encoded({**body(params), "prompt": "", "logprobs": logprobs}), completions.REQUEST)


def as_chat(params: SamplingParams | None, messages: object, **more: Any) -> ChatRequest:
    """The parameters as the body of a chat completion. Raises InvalidRequest naming the parameter."""
    fields = {**body(params), "messages": messages, **more}
    if params is not None and params.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": params.logprobs}
    return decode(encoded(fields), chat.REQUEST)


def encoded(fields: Mapping[str, Any]) -> bytes:
    """A body of the fields that are not None. Raises InvalidRequest as `json_of` does."""
    return json_of({name: value for name, value in fields.items() if value is not None})


def json_of(value: object) -> bytes:
    """Raises InvalidRequest for values that JSON cannot hold."""
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest(f"the parameters cannot be told as JSON: {error}", code="invalid_type") from error
