"""From a request's parameters to the message that carries it to a tokenizer: all of it but the prompt and the id."""

from __future__ import annotations

import secrets
import time

import msgspec

from penstock.protocol.messages import SubmitText, TraceContext
from penstock.services.client.model_info import ServedModel
from penstock.services.openai.parameters import (
    SEED_BITS,
    Lengths,
    kept_prompt,
    predicted_text,
    sampling_of,
    stop_strings,
)
from penstock.services.openai.schema import GenerationRequest
from penstock.services.openai.structured_output import grammar_of


def submission(
    request: GenerationRequest, lengths: Lengths, model: ServedModel, n: int, trace: TraceContext
) -> SubmitText:
    """The message less its id and its prompt, arriving now. Raises InvalidRequest naming the parameter."""
    return SubmitText(
        id=0,
        sampling=sampling_of(request, lengths, model),
        grammar=grammar_of(request),
        prediction=predicted_text(request),
        speculate=request.speculative is not False,
        n=n,
        stop=stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        bad_words=tuple(request.bad_words or ()),
        skip_special_tokens=request.skip_special_tokens is not False,
        stream=bool(request.stream),
        priority=request.priority or 0,
        truncate=kept_prompt(request),
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
