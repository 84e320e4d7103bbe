"""POST /v1/completions. Source: OpenAI API reference, "Create completion"."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import msgspec

from penstock.protocol import limits
from penstock.protocol.config import CLAMP_ALL
from penstock.protocol.errors import InvalidRequest, invalid
from penstock.protocol.messages import SubmitText
from penstock.services.client.model_info import ModelInfo
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.answers import ResponseOptions
from penstock.services.openai.app_state import AppState
from penstock.services.openai.generation import GenerateRequest, Parsed, generate, new_identity
from penstock.services.openai.parameters import (
    REASONS,
    UNSUPPORTED_IN_COMPLETIONS,
    Lengths,
    check_limits,
    check_unsupported,
    choices,
    prompt_logprobs,
    submission,
    wants_usage,
    with_own_seed,
)
from penstock.services.openai.schema import CompletionRequest
from penstock.services.openai.sse import SSEEncoder
from penstock.services.openai.validation import read_request

REQUEST = msgspec.json.Decoder(CompletionRequest)
DEFAULT_MAX_TOKENS = 16  # OpenAI's

Prompt = str | list[int]


async def parse_completion(app: AppState, context: RequestContext) -> Parsed:
    """Each prompt is an internal request of its own; choices are numbered prompt by prompt."""
    options, model = app.config.api, app.model
    request, fields = await read_request(await context.read_json(), REQUEST, model, context)
    check_limits(request, options, ("logprobs", request.logprobs))
    prompts = prompts_of(request, model)
    n = choices(request, len(prompts))
    check_unsupported(fields, UNSUPPORTED_IN_COMPLETIONS, REASONS, n)
    usage = wants_usage(request)
    length = msgspec.structs.replace(lengths(request), clamp=options.clamp_max_tokens == CLAMP_ALL)
    common = submission(request, length, model, n, context.trace)
    submits = tuple(prompt_submission(common, request, prompt) for prompt in prompts)
    identity = new_identity("cmpl-", app, context)
    told = ResponseOptions(
        logprobs=request.logprobs is not None,
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=bool(request.echo),
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
    )
    encoder = SSEEncoder(identity, chat=False, choices=n * len(prompts), usage=usage, told=told)
    asked = GenerateRequest(id=identity.id, prompts=submits, user=request.user, least_aborted=1)
    return asked, encoder


create_completion = functools.partial(generate, parse_completion)


def prompt_submission(asked: SubmitText, request: CompletionRequest, prompt: Prompt) -> SubmitText:
    """One prompt of `request` as a message; `asked` is what `submission` made of the rest."""
    made = msgspec.structs.replace(
        asked,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_ids=None if isinstance(prompt, str) else struct.pack(f"<{len(prompt)}i", *prompt),
        add_special_tokens=request.add_special_tokens is not False,
        echo=bool(request.echo),
    )
    return made if request.seed is not None else with_own_seed(made)


def prompts_of(request: CompletionRequest, model: ModelInfo) -> list[Prompt]:
    """The prompts of a request. Raises InvalidRequest."""
    cut, first = bool(request.truncate_prompt_tokens), request.truncation_side == "right"
    prompts = texts(request.prompt, "prompt", model, any_length=cut, keep_first=first)
    if len(prompts) > limits.MAX_PROMPTS:
        raise invalid("prompt", f"holds {len(prompts)} prompts; at most {limits.MAX_PROMPTS} are served at once")
    return prompts


def texts(
    given: str | Sequence[int | str | list[int]], param: str, model: ModelInfo, *, any_length: bool, keep_first: bool
) -> list[Prompt]:
    """The texts of a field: one text, texts, one list of token ids, or lists of them. Raises InvalidRequest naming the
    one that is wrong.

    `any_length`: they are yet to be truncated, to their first tokens with `keep_first`. Of token ids only what that can
    keep is returned: a body holds millions, and what is cut off is not worth the time of every stream.
    """
    if isinstance(given, str):
        return [given]
    if any_length:
        kept = slice(model.max_model_len) if keep_first else slice(-model.max_model_len, None)
        ids = bool(given) and isinstance(given[0], int)
        given = given[kept] if ids else [item[kept] if isinstance(item, list) else item for item in given]
    kinds = {type(item) for item in given}
    if len(kinds) != 1:
        message = f"{param} mixes texts, token ids and lists of token ids" if kinds else f"{param} is empty"
        raise InvalidRequest(message, param=param, code="invalid_type")
    found: list[Prompt] = [list(given)] if kinds == {int} else list(given)  # type: ignore[arg-type]
    for number, text in enumerate(found):
        if not isinstance(text, str):
            check_ids(text, param if kinds == {int} else f"{param}[{number}]", model, any_length=any_length)
    return found


def check_ids(ids: list[int], path: str, model: ModelInfo, *, any_length: bool = False) -> None:
    if not ids:
        raise invalid(path, "is empty")
    if len(ids) > model.max_model_len and not any_length:
        message = f"has {len(ids)} tokens; the model's context holds {model.max_model_len} (--max-model-len)"
        raise invalid(path, message, "context_length_exceeded")
    if max(ids) >= model.vocab_size:
        raise invalid(path, f": token id {max(ids)} is not in the vocabulary of {model.vocab_size}")


def lengths(request: CompletionRequest) -> Lengths:
    """Output length and logprobs under the names they have in completions; echo with logprobs asks for the prompt's.

    Raises InvalidRequest when there would be nothing to answer.
    """
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "is 0, which leaves nothing to answer: with echo it is the prompt alone")
    logprobs = -1 if request.logprobs is None else request.logprobs
    return Lengths(
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        max_tokens_param="max_tokens",
        logprobs=logprobs,
        prompt_logprobs=max(prompt_logprobs(request), logprobs if request.echo else -1),
    )
