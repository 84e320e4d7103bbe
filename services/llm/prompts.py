"""The forms in which prompts come: text, token ids, or a dict with one of them; and the messages they become."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.protocol import limits
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import SubmitText, TraceContext
from penstock.services.client.model_info import ServedModel
from penstock.services.client.submission import submission, with_own_seed
from penstock.services.llm.params import SamplingParams, chat_request, completion_request, encoded
from penstock.services.openai.chat import chat_submission, tools_of
from penstock.services.openai.completions import check_ids, lengths, prompt_submission
from penstock.services.openai.parameters import choices
from penstock.services.openai.schema import TokenId
from penstock.services.openai.tools import as_functions
from penstock.services.openai.validation import misfit
from penstock.services.tracing.propagation import parse

PromptForm = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt: `prompt` or `prompt_token_ids`. `prediction` is text that the output is expected to repeat.
    `traceparent` and `tracestate` name the trace that it belongs to, where they are valid (W3C Trace Context)."""

    prompt: str | None = None
    prompt_token_ids: list[TokenId] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=limits.MAX_CACHE_SALT)] | None = None
    prediction: str | None = None
    traceparent: str = ""
    tracestate: str = ""


class Order(msgspec.Struct, frozen=True):
    """A request that can be sent, and what its output needs of it. The message has no id yet."""

    submit: SubmitText
    prompt: str | None
    params: SamplingParams


def listed(prompts: PromptForm | Sequence[PromptForm]) -> list[Prompt]:
    """Every prompt; one alone is a list of one. Raises InvalidRequest naming the one that is wrong."""
    if isinstance(prompts, str | Mapping):
        return [prompt_of(prompts, "prompts")]
    found = list(prompts)
    if not found:
        return []
    if isinstance(found[0], int):
        return [prompt_of(found, "prompts")]
    return [prompt_of(prompt, f"prompts[{number}]") for number, prompt in enumerate(found)]


def prompt_of(form: object, path: str) -> Prompt:
    """One prompt. Raises InvalidRequest."""
    if isinstance(form, str):
        return Prompt(prompt=form)
    fields = dict(form) if isinstance(form, Mapping) else {"prompt_token_ids": form}
    if not isinstance(fields.get("prompt_token_ids", ()), list | tuple | None):
        fields["prompt_token_ids"] = ids_of(fields["prompt_token_ids"], path)
    try:
        prompt = msgspec.convert(fields, Prompt)
    except msgspec.ValidationError as error:
        raise misfit(str(error), path) from error
    if (prompt.prompt is None) == (prompt.prompt_token_ids is None):
        raise InvalidRequest(f"{path} must hold either prompt or prompt_token_ids", param=path, code="invalid_value")
    return prompt


def ids_of(value: object, path: str) -> list[object]:
    """The items of an array or another sequence."""
    listing = getattr(value, "tolist", None)
    if callable(listing):
        return list(listing())
    if isinstance(value, Sequence):
        return list(value)
    raise InvalidRequest(f"{path} must be text, token ids or a dict", param=path, code="invalid_type")


def shared_out(params: Params, count: int) -> list[SamplingParams | None]:
    """The parameters of each of `count` prompts. Raises InvalidRequest unless there is one for all or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    found = list(params)
    if len(found) != count:
        message = f"there are {len(found)} sampling_params for {count} prompts"
        raise InvalidRequest(message, param="sampling_params", code="invalid_value")
    return list(found)


def orders(
    prompts: Sequence[Prompt], params: Params, model: ServedModel, priority: Sequence[int] | None = None
) -> Iterator[Order]:
    """What is to be sent for each prompt, in order, made when it is asked for. Raises InvalidRequest at once for what
    is wrong with any of them, as far as it can be known before the tokenizer has seen it."""
    each = shared_out(params, len(prompts))
    ranks = ranked(priority, len(prompts))
    for number, prompt in enumerate(prompts):
        if prompt.prompt_token_ids is not None:
            given = each[number]
            cut = given is not None and bool(given.truncate_prompt_tokens)
            check_ids(prompt.prompt_token_ids, f"prompts[{number}]", model, any_length=cut)
    drafts = [Draft(one, model) for one in distinct(each)]
    by_identity = {id(draft.given): draft for draft in drafts}
    return (
        by_identity[id(given)].order(prompt, rank) for prompt, given, rank in zip(prompts, each, ranks, strict=True)
    )


def ranked(priority: Sequence[int] | None, count: int) -> Sequence[int]:
    if priority is None:
        return [0] * count
    if len(priority) != count:
        message = f"there are {len(priority)} priorities for {count} prompts"
        raise InvalidRequest(message, param="priority", code="invalid_value")
    for rank in priority:
        if not limits.PRIORITY_MIN <= rank <= limits.PRIORITY_MAX:
            raise InvalidRequest(f"priority: {rank} is out of range", param="priority", code="invalid_value")
    return priority


def distinct(params: Sequence[SamplingParams | None]) -> list[SamplingParams | None]:
    return list({id(one): one for one in params}.values())


class Draft:
    """What all prompts with the same parameters have in common, checked once."""

    def __init__(self, given: SamplingParams | None, model: ServedModel) -> None:
        self.given = given
        self._request = completion_request(given)
        n = choices(self._request, 1)
        self._params = SamplingParams(n=n) if given is None else given
        asked = submission(self._request, lengths(self._request), model, n, TraceContext())
        self._asked = finished(asked, given)

    def order(self, prompt: Prompt, priority: int = 0) -> Order:
        """One prompt's. The ids of the output are told; its text too unless `detokenize` is false."""
        content = prompt.prompt if prompt.prompt is not None else prompt.prompt_token_ids
        assert content is not None
        submit = msgspec.structs.replace(
            prompt_submission(self._asked, self._request, 0, content),
            priority=priority,
            cache_salt=prompt.cache_salt or "",
            prediction=prompt.prediction or "",
            trace=parse(prompt.traceparent, prompt.tracestate),
            arrival=time.time(),
        )
        return Order(submit, prompt.prompt, self._params)


def traced(order: Order, headers: Mapping[str, str]) -> Order:
    """The order in the trace that `traceparent` and `tracestate` among the headers name, if they are valid."""
    known = {name.lower(): value for name, value in headers.items()}
    trace = parse(known.get("traceparent", ""), known.get("tracestate", ""))
    return msgspec.structs.replace(order, submit=msgspec.structs.replace(order.submit, trace=trace))


def finished(submit: SubmitText, params: SamplingParams | None) -> SubmitText:
    """The message with what no HTTP request asks for."""
    if params is None:
        return msgspec.structs.replace(submit, with_token_ids=True)
    sampling = submit.sampling
    if params.max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=None)
    return msgspec.structs.replace(submit, sampling=sampling, with_token_ids=True, detokenize=params.detokenize)


def chat_order(
    messages: object, params: SamplingParams | None, model: ServedModel, *, split: bool = True, **more: Any
) -> Order:
    """A conversation's. `more` are further fields of a chat request; without `split` its output is text alone, as the
    model wrote it. Raises InvalidRequest or NotBuilt."""
    tools = None if split else more.pop("tools", None)
    request = chat_request(params, messages, separate_reasoning=split, **more)
    submit = chat_submission(request, 0, model, choices(request, 1), TraceContext())
    if tools:
        given = tools_of(msgspec.Raw(encoded(tools)))
        assert given is not None, "they are not empty"
        if any(isinstance(tool, Mapping) and tool.get("type") == "custom" for tool in tools):
            given = as_functions(msgspec.Raw(given))
        submit = msgspec.structs.replace(submit, tools=given)
    if request.seed is None:
        submit = with_own_seed(submit)
    return Order(finished(submit, params), None, params or SamplingParams(n=submit.n))


def conversations(messages: Sequence[Any]) -> list[Sequence[Any]]:
    """Every conversation; one alone is a list of one."""
    if messages and isinstance(messages[0], Mapping):
        return [messages]
    return list(messages)
