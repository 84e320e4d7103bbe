"""Parameters that Penstock knows and does not serve yet, and those it accepts without effect.

A refused parameter passes when its value asks for nothing: null, or one of the values listed with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.protocol.errors import NotBuilt
from penstock.services.openai import validation as decoding

FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
VALUE = msgspec.json.Decoder()
LONGEST_NEUTRAL = 256  # bytes of JSON; longer values ask for something

# Name → values that ask for nothing.
REFUSED: Mapping[str, tuple[object, ...]] = {
    # tools, in OpenAI's old form
    "functions": ([],),
    "function_call": ("none",),
    # structured output
    "stop_regex": (),
    # reasoning
    "reasoning": (),
    "stream_reasoning": (True,),
    "verbosity": ("medium",),
    # other kinds of input and output
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "moderation": (),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "prompt_embeds": (),
    # other ways to decode
    "best_of": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "suffix": ("",),
    "spaces_between_special_tokens": (True,),
    "return_hidden_states": (False,),
    "logprob_token_ids": ([],),
    "no_stop_trim": (False,),
    "typical_p": (1, 1.0),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "lora_path": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "repetition_detection": (),
}

# Refused for one endpoint alone, where another serves it.
REFUSED_IN_CHAT: Mapping[str, tuple[object, ...]] = {"echo": (False,), "prompt": (), "suffix": ("",)}
REFUSED_IN_COMPLETIONS: Mapping[str, tuple[object, ...]] = {
    "top_logprobs": (),
    # of chats alone
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "max_thinking_tokens": (),
    "include_reasoning": (True,),
    "separate_reasoning": (False,),
    "chat_template": (),
}

# Why, and what to do, where there is more to say.
REASONS: Mapping[str, str] = {
    "functions": "functions is OpenAI's deprecated form of tools and not built; give tools instead",
    "function_call": "function_call is OpenAI's deprecated form of tool_choice and not built; give that instead",
}

WITHOUT_EFFECT: tuple[str, ...] = (
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "guided_decoding_backend",  # there is one
    "request_id",  # X-Request-Id is the way to name a request
)


def fields_of(body: bytes) -> Mapping[str, msgspec.Raw]:
    """A body's members by name. Raises InvalidRequest for what is no JSON object."""
    return decoding.decode(body, FIELDS)


def check(fields: Mapping[str, msgspec.Raw], also: Mapping[str, tuple[object, ...]], n: int) -> None:
    """Raise NotBuilt for the first refused parameter that asks for something.

    `also` is refused for this endpoint; `best_of` passes when it equals `n`.
    """
    check_table(fields, {**also, **REFUSED}, REASONS, n)


def check_table(
    fields: Mapping[str, msgspec.Raw],
    table: Mapping[str, tuple[object, ...]],
    reasons: Mapping[str, str],
    n: int = 1,
) -> None:
    """The same for the parameters of `table`, with what `reasons` says of them."""
    for name, raw in fields.items():
        neutral = table.get(name)
        if neutral is None:
            continue
        if len(raw) > LONGEST_NEUTRAL or not asks_for_nothing(decoding.decode(raw, VALUE, name), name, neutral, n):
            raise NotBuilt(reasons.get(name, f"{name} is not built yet"), param=name)


def asks_for_nothing(value: object, name: str, neutral: tuple[object, ...], n: int) -> bool:
    if value is None or (name == "best_of" and type(value) is int and value == n):
        return True
    return any(type(value) is type(other) and value == other for other in neutral)
