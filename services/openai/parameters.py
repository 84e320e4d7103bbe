"""Parameters of requests for text: checked against the model and the server's limits, and made the engine's."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.protocol import limits
from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import InvalidRequest, Unsupported, invalid, unsupported
from penstock.protocol.messages import Grammar, Sampling, SubmitText, TraceContext
from penstock.services.client.model_info import ModelInfo
from penstock.services.openai.schema import GRAMMAR_FIELDS, GenerationRequest, Prediction
from penstock.services.openai.structured_output import grammar_of
from penstock.services.openai.validation import LIMIT_OPTIONS, decode, missing

SEED_BITS = 63  # of a seed that the client left to us
MOST_NAMED = 16  # wrong keys in one message
TOKEN_KEY = re.compile(r"[0-9]{1,10}")
# Parameters that a model has defaults for, with the values that change nothing.
NO_ALIASES: Mapping[str, str] = {}
NEUTRAL: Mapping[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
STRUCTURE_FIELDS = (*GRAMMAR_FIELDS, "whitespace", "guided_whitespace_pattern", "lenient")


class Lengths(msgspec.Struct, frozen=True):
    """How much output and which log-probabilities a request asks for, whatever its endpoint calls them."""

    max_tokens: int | None
    max_tokens_param: str
    logprobs: int = -1
    prompt_logprobs: int = -1
    clamp: bool = False  # what does not fit becomes what does
    late: bool = False  # whether it fits is said once the prompt's length is known


def submission(
    request: GenerationRequest,
    lengths: Lengths,
    model: ModelInfo,
    n: int,
    trace: TraceContext,
    grammar: Grammar | None = None,
    **fields: Any,
) -> SubmitText:
    """The message, arriving now, with further `fields`: those of its prompt. `grammar` comes from an
    API that has its own fields for it.

    Raises InvalidRequest naming the parameter.
    """
    for name in STRUCTURE_FIELDS:
        if (asked := getattr(request, name)) is not None and asked is not msgspec.UNSET:
            grammar = grammar_of(request)
            break
    stop = request.stop or ()
    return SubmitText(
        **fields,
        sampling=sampling_of(request, lengths, model),
        grammar=grammar,
        prediction="" if request.prediction is None else predicted_text(request.prediction),
        speculate=request.speculative is not False,
        n=n,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=bool(request.include_stop_str_in_output),
        bad_words=tuple(request.bad_words or ()),
        skip_special_tokens=request.skip_special_tokens is not False,
        stream=bool(request.stream),
        priority=request.priority or 0,
        truncate=request.truncate_prompt_tokens or 0,
        keep_first=request.truncation_side == "right",
        clamp=lengths.clamp,
        with_token_ids=bool(request.return_token_ids or request.return_tokens_as_token_ids),
        cache_salt=request.cache_salt or "",
        trace=trace,
        arrival=time.time(),
    )


def with_own_seed(submit: SubmitText) -> SubmitText:
    """The same with fresh randomness: equal prompts that nobody gave a seed are to have different outputs."""
    sampling = msgspec.structs.replace(submit.sampling, seed=secrets.randbits(SEED_BITS))
    return msgspec.structs.replace(submit, sampling=sampling)


def sampling_of(request: GenerationRequest, lengths: Lengths, model: ModelInfo) -> Sampling:
    """How the request's tokens are chosen. Raises InvalidRequest naming the parameter.

    The types of `requests` have checked each value alone; here stand the checks against the model and each other.
    """
    most = lengths.max_tokens
    if most is not None and most > model.max_model_len and not (lengths.clamp or lengths.late):
        room = f"{model.max_model_len} tokens (--max-model-len)"
        message = f"is {most}; the model's context holds {room}"
        raise invalid(lengths.max_tokens_param, message, "context_length_exceeded")
    bound = model.max_model_len if most is None else min(most, model.max_model_len)
    if (request.min_tokens or 0) > bound:
        raise invalid("min_tokens", f"is {request.min_tokens}; at most {bound} tokens can come")
    if request.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "must be at least 1, or -1 for what leaves room for the output")
    processed = request.logprobs_mode == "processed_logprobs"
    if processed and lengths.logprobs < 0:
        raise invalid("logprobs_mode", "needs logprobs")
    allowed = request.allowed_token_ids
    chosen = dict(NEUTRAL)
    for source in (model.generation, request):
        for name in NEUTRAL:
            if (value := getattr(source, name)) is not None:
                chosen[name] = value
    chosen["top_k"] = max(chosen["top_k"], 0)
    if chosen["top_p"] == 0.0:  # the smallest set that holds more than nothing: the best token
        chosen["top_k"], chosen["top_p"] = 1, 1.0
    return Sampling(
        **chosen,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=secrets.randbits(SEED_BITS) if request.seed is None else request.seed,
        max_tokens=lengths.max_tokens,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=token_ids(request.stop_token_ids, "stop_token_ids", model) if request.stop_token_ids else (),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=bias_pairs(request.logit_bias, model) if request.logit_bias else (),
        allowed_token_ids=token_ids(allowed, "allowed_token_ids", model) if allowed else (),
        logprobs=lengths.logprobs,
        prompt_logprobs=lengths.prompt_logprobs,
        processed_logprobs=processed,
    )


def token_ids(asked: list[int], param: str, model: ModelInfo) -> tuple[int, ...]:
    """Ids without repetitions, each in the vocabulary."""
    ids = tuple(dict.fromkeys(asked))
    if max(ids) >= model.vocab_size:
        raise invalid(param, f": token id {max(ids)} is not in the vocabulary of {model.vocab_size}")
    return ids


def bias_pairs(asked: dict[str, float], model: ModelInfo) -> tuple[tuple[int, float], ...]:
    """`logit_bias` by token id; JSON has only strings as keys."""
    wrong = [key for key in asked if not TOKEN_KEY.fullmatch(key) or int(key) >= model.vocab_size]
    if wrong:
        named = ", ".join(repr(key[:32]) for key in wrong[:MOST_NAMED])
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise invalid("logit_bias", f": no token ids of the vocabulary of {model.vocab_size}: {named}{more}")
    return tuple({int(key): float(value) for key, value in asked.items()}.items())


def choices(request: GenerationRequest, prompts: int) -> int:
    """How many choices each prompt gets. Raises InvalidRequest when the request makes too many in all."""
    n = request.n or 1
    if n * prompts > limits.MAX_CHOICES:
        message = f"{prompts} prompts with n={n} make {n * prompts} choices; at most {limits.MAX_CHOICES} are served"
        raise InvalidRequest(message, param="n")
    return n


class UsageWanted(msgspec.Struct, frozen=True):
    """Where a stream tells its usage: in a chunk at its end, in every chunk."""

    at_end: bool = False
    always: bool = False


def wants_usage(request: GenerationRequest) -> UsageWanted:
    """As the stream's options say. Raises InvalidRequest for options without a stream, Unsupported."""
    options = request.stream_options
    if options is None:
        return UsageWanted()
    if not request.stream:
        raise invalid("stream_options", "is allowed only when stream is true")
    if options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "is not supported")
    included = bool(options.include_usage)
    return UsageWanted(included, included and bool(options.continuous_usage_stats))


def prompt_logprobs(request: GenerationRequest) -> int:
    """As `Sampling.prompt_logprobs`. Raises InvalidRequest for a stream, whose chunks have no place for them."""
    if request.prompt_logprobs is None:
        return -1
    if request.stream:
        raise invalid("prompt_logprobs", "cannot be streamed")
    return request.prompt_logprobs


def check_limits(
    request: GenerationRequest,
    options: ApiConfig,
    logprobs: tuple[str, int | None],
    names: Mapping[str, str] = NO_ALIASES,
) -> None:
    """Raise InvalidRequest for the first parameter that asks for more than its option allows. `logprobs` is the
    parameter of the most likely tokens, with its value; `names`: what the API calls other parameters."""
    asked = {
        "n": request.n,
        "prompt_logprobs": request.prompt_logprobs,
        "stop": len(request.stop) if isinstance(request.stop, list) else int(request.stop is not None),
        "logit_bias": len(request.logit_bias or ()),
        logprobs[0]: logprobs[1],
    }
    for param, amount in asked.items():
        if amount and amount > (most := limit_of(param, options)):
            option, own = LIMIT_OPTIONS[param], names.get(param, param)
            raise invalid(own, f"asks for {amount}; at most {most} are allowed ({option})", "limit_exceeded")


def limit_of(param: str, options: ApiConfig) -> int:
    """What the option of `param` says."""
    found = getattr(options, LIMIT_OPTIONS[param].removeprefix("--").replace("-", "_"))
    assert isinstance(found, int)
    return found


VALUE = msgspec.json.Decoder()
LONGEST_NEUTRAL = 256  # bytes of JSON; longer values ask for something

# Name → values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
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
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
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
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "repetition_detection": (),
}

# With what one endpoint refuses and another serves.
UNSUPPORTED_IN_CHAT: Mapping[str, tuple[object, ...]] = {"echo": (False,), "prompt": (), **UNSUPPORTED}
UNSUPPORTED_IN_COMPLETIONS: Mapping[str, tuple[object, ...]] = {
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
    **UNSUPPORTED,
}

# Why, and what to do, where there is more to say.
REASONS: Mapping[str, str] = {
    "functions": "functions is OpenAI's deprecated form of tools and not supported; give tools instead",
    "function_call": "function_call is OpenAI's deprecated form of tool_choice and not supported; give that instead",
    "reasoning": "reasoning is not supported; give reasoning_effort or thinking_token_budget instead",
    "best_of": "best_of is not supported; n gives several choices",
    "use_beam_search": "use_beam_search is not supported; n and a temperature give several choices",
    "stop_regex": "stop_regex is not supported; give stop instead",
    "no_stop_trim": "no_stop_trim is not supported; give include_stop_str_in_output instead",
    "lora_path": "lora_path is not supported; give an adapter's name as model instead",
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


def check_unsupported(
    fields: Mapping[str, msgspec.Raw],
    table: Mapping[str, tuple[object, ...]],
    reasons: Mapping[str, str],
    n: int = 1,
) -> None:
    """Raise Unsupported, with the text in `reasons`, for the first parameter of `table` that has an effect. `best_of`
    passes when it equals `n`."""
    for name, raw in fields.items():
        neutral = table.get(name)
        if neutral is None:
            continue
        if len(raw) > LONGEST_NEUTRAL or not is_neutral(decode(raw, VALUE, name), name, neutral, n):
            raise Unsupported(reasons.get(name, f"{name} is not supported"), param=name)


def is_neutral(value: object, name: str, neutral: tuple[object, ...], n: int) -> bool:
    if value is None or (name == "best_of" and type(value) is int and value == n):
        return True
    return any(type(value) is type(other) and value == other for other in neutral)


def predicted_text(prediction: Prediction) -> str:
    """The text that the output is expected to repeat, in one piece. Raises InvalidRequest.

    Source: OpenAI API reference, "Create chat completion", `prediction`. OpenAI refuses it beside n, logprobs,
    penalties and tools; here a draft changes no token, so it goes with all of them.
    """
    content = prediction.content
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        place = f"prediction.content[{number}]"
        if part.type != "text":
            raise invalid(f"{place}.type", f": {part.type!r} is not 'text', which a prediction is made of")
        if part.text is None:
            raise missing(f"{place}.text")
    return "".join(part.text or "" for part in content)
