"""The forms of prompts (text, token ids, or a dict with either), the requests made from them, and their adapters."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.engine_core.models.pooler import ClassifierSpec
from penstock.protocol import limits
from penstock.protocol.errors import InvalidRequest, invalid, unsupported
from penstock.protocol.messages import Adapter, SubmitText, TraceContext
from penstock.services.client.model_info import ModelInfo
from penstock.services.llm.params import SamplingParams, as_chat, as_completion, encoded, json_of
from penstock.services.openai.chat import chat_submission
from penstock.services.openai.classification import ClassifyRequest, classifier_of
from penstock.services.openai.classification import submissions as classification_submissions
from penstock.services.openai.completions import check_ids, lengths, prompt_submission
from penstock.services.openai.embeddings import (
    REQUEST,
    EmbeddingRequest,
    check_dimensions,
    check_pooler,
    text_submission,
    texts_of,
)
from penstock.services.openai.images import b2a_base64, read_inline
from penstock.services.openai.parameters import choices, submission, with_own_seed
from penstock.services.openai.schema import TokenId
from penstock.services.openai.scoring import ScoreRequest, Sheet, Strings, pairs_of
from penstock.services.openai.tools import as_functions
from penstock.services.openai.validation import decode, misfit
from penstock.services.tracing.tracer import parse

PromptForm = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt: `prompt` or `prompt_token_ids`. `prediction` is expected output, used as drafts. `traceparent` and
    `tracestate`, if valid, name its trace (W3C Trace Context)."""

    prompt: str | None = None
    prompt_token_ids: list[TokenId] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=limits.MAX_CACHE_SALT)] | None = None
    prediction: str | None = None
    traceparent: str = ""
    tracestate: str = ""

    @property
    def content(self) -> str | list[int]:
        found = self.prompt if self.prompt is not None else self.prompt_token_ids
        assert found is not None
        return found


class Request(msgspec.Struct, frozen=True):
    """A request without an id, and the fields that its outputs need."""

    submit: SubmitText
    prompt: str | None
    params: SamplingParams


def parse_prompts(prompts: PromptForm | Sequence[PromptForm]) -> list[Prompt]:
    """All prompts, also of a single one. Raises InvalidRequest naming the first invalid one."""
    if isinstance(prompts, str | Mapping):
        return [parse_prompt(prompts, "prompts")]
    found = list(prompts)
    if found and isinstance(found[0], int):
        return [parse_prompt(found, "prompts")]
    return [parse_prompt(prompt, f"prompts[{number}]") for number, prompt in enumerate(found)]


def parse_prompt(form: object, path: str) -> Prompt:
    if isinstance(form, str):
        return Prompt(prompt=form)
    fields = dict(form) if isinstance(form, Mapping) else {"prompt_token_ids": form}
    if fields.pop("multi_modal_data", None) is not None:
        message = ": a prompt has no place for images; LLM.chat takes them in messages"
        raise unsupported(f"{path}.multi_modal_data", message)
    if not isinstance(ids := fields.get("prompt_token_ids", ()), list | tuple | None):
        if hasattr(ids, "tolist"):  # an array or a tensor
            ids = ids.tolist()
        elif not isinstance(ids, Sequence):
            raise invalid(path, "must be text, token ids or a dict", "invalid_type")
        fields["prompt_token_ids"] = list(ids)
    try:
        prompt = msgspec.convert(fields, Prompt)
    except msgspec.ValidationError as error:
        raise misfit(str(error), path) from error
    if (prompt.prompt is None) == (prompt.prompt_token_ids is None):
        raise invalid(path, "must hold either prompt or prompt_token_ids")
    return prompt


def params_of_each(params: Params, count: int) -> list[SamplingParams | None]:
    """The parameters of each prompt. Raises InvalidRequest unless there is one for all or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        message = f"there are {len(params)} sampling_params for {count} prompts"
        raise InvalidRequest(message, param="sampling_params")
    return list(params)


def completion_requests(
    prompts: Sequence[Prompt], params: Params, model: ModelInfo, priority: Sequence[int] | None = None
) -> Iterator[Request]:
    """The request of each prompt, in order, made on demand. Raises InvalidRequest at once for every mistake that can be
    found before tokenization."""
    each = params_of_each(params, len(prompts))
    priorities = checked_priorities(priority, len(prompts))
    for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        if prompt.prompt_token_ids is not None:
            cut = one is not None and bool(one.truncate_prompt_tokens)
            check_ids(prompt.prompt_token_ids, f"prompts[{number}]", model, any_length=cut)
    templates = {id(one): CompletionTemplate(one, model) for one in {id(one): one for one in each}.values()}
    return (templates[id(one)].request(prompt, rank)
            for prompt, one, rank in zip(prompts, each, priorities, strict=True))  # fmt: skip


def checked_priorities(priority: Sequence[int] | None, count: int) -> Sequence[int]:
    if priority is None:
        return [0] * count
    if len(priority) != count:
        message = f"there are {len(priority)} priorities for {count} prompts"
        raise InvalidRequest(message, param="priority")
    for rank in priority:
        if not limits.PRIORITY_MIN <= rank <= limits.PRIORITY_MAX:
            raise invalid("priority", f": {rank} is out of range")
    return priority


class CompletionTemplate:
    """The common part of all prompts with the same parameters, checked once."""

    def __init__(self, params: SamplingParams | None, model: ModelInfo) -> None:
        self._body = as_completion(params)
        n = choices(self._body, 1)
        self._params = SamplingParams(n=n) if params is None else params
        submit = submission(self._body, lengths(self._body), model, n, TraceContext())
        self._submit = with_output_fields(submit, params)

    def request(self, prompt: Prompt, priority: int = 0) -> Request:
        submit = msgspec.structs.replace(
            prompt_submission(self._submit, self._body, prompt.content),
            priority=priority,
            cache_salt=prompt.cache_salt or "",
            prediction=prompt.prediction or "",
            trace=parse(prompt.traceparent, prompt.tracestate),
            arrival=time.time(),
        )
        return Request(submit, prompt.prompt, self._params)


def with_output_fields(submit: SubmitText, params: SamplingParams | None) -> SubmitText:
    """The message with the fields that no HTTP body has."""
    if params is None:
        return msgspec.structs.replace(submit, with_token_ids=True)
    sampling = submit.sampling
    if params.max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=None)
    return msgspec.structs.replace(submit, sampling=sampling, with_token_ids=True, detokenize=params.detokenize)


def in_trace(request: Request, headers: Mapping[str, str]) -> Request:
    """The request in the trace that `traceparent` and `tracestate` among the headers name, if they are valid."""
    known = {name.lower(): value for name, value in headers.items()}
    trace = parse(known.get("traceparent", ""), known.get("tracestate", ""))
    return msgspec.structs.replace(request, submit=msgspec.structs.replace(request.submit, trace=trace))


def chat_request(
    messages: object, params: SamplingParams | None, model: ModelInfo, *, split: bool = True, **fields: Any
) -> Request:
    """The request of a conversation. `fields` are other fields of a chat request; without `split` the output is plain
    text, as the model wrote it. Raises InvalidRequest or Unsupported."""
    tools = None if split else fields.pop("tools", None)
    body = as_chat(params, with_pictures(messages), separate_reasoning=split, **fields)
    submit, images = chat_submission(body, model, choices(body, 1), TraceContext())
    submit = msgspec.structs.replace(submit, images=read_inline(images))
    if tools:
        shown = json_of(tools)
        if any(isinstance(tool, Mapping) and tool.get("type") == "custom" for tool in tools):
            shown = as_functions(msgspec.Raw(shown))
        submit = msgspec.structs.replace(submit, tools=shown)
    if body.seed is None:
        submit = with_own_seed(submit)
    return Request(with_output_fields(submit, params), None, params or SamplingParams(n=submit.n))


def with_pictures(messages: object) -> object:
    """The messages with pictures of Pillow, in parts of vLLM's type `image_pil`, as data: URLs. Raises InvalidRequest
    for something else there."""
    if not isinstance(messages, Sequence):
        return messages
    found = []
    for at, message in enumerate(messages):
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), list):
            parts = [shown(part, f"messages[{at}].content[{number}]") for number, part in enumerate(content)]
            message = {**message, "content": parts}
        found.append(message)
    return found


def shown(part: object, place: str) -> object:
    if not isinstance(part, Mapping) or part.get("type") != "image_pil":
        return part
    param = f"{place}.image_pil"
    picture, file = part.get("image_pil"), io.BytesIO()
    if picture is None or not hasattr(picture, "save"):
        raise invalid(param, "must be a PIL.Image", "invalid_type")
    try:
        picture.save(file, "PNG", compress_level=1)
    except (OSError, ValueError) as error:  # a mode that PNG does not have, a file that is cut off, no pixels
        raise invalid(param, f"cannot be written as PNG: {error}") from error
    url = f"data:image/png;base64,{b2a_base64(file.getvalue())}"
    return {"type": "image_url", "image_url": {"url": url}}


def conversations(messages: Sequence[Any]) -> list[Sequence[Any]]:
    """All conversations, also of a single one."""
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def embedding_request(**fields: Any) -> EmbeddingRequest:
    """The options of a call as a body without an input. Raises InvalidRequest naming the option."""
    return decode(encoded({**fields, "input": ""}), REQUEST)


def embedding_submissions(
    prompts: PromptForm | Sequence[PromptForm], request: EmbeddingRequest, model: ModelInfo
) -> list[SubmitText]:
    """A message for each prompt. Raises InvalidRequest naming the first invalid one."""
    check_pooler(model)
    check_dimensions(request.dimensions, model)
    found = []
    for number, prompt in enumerate(parse_prompts(prompts)):
        path = f"prompts[{number}]"
        if prompt.prediction is not None:
            raise invalid(path, ": a vector has no prediction")
        (text,) = texts_of(prompt.content, path, model, request)
        submit = text_submission(request, model, text, path, parse(prompt.traceparent, prompt.tracestate))
        found.append(msgspec.structs.replace(submit, cache_salt=prompt.cache_salt or ""))
    return found


def classify_submissions(
    prompts: str | Sequence[str], truncate: int | None, model: ModelInfo
) -> tuple[list[SubmitText], ClassifierSpec]:
    """A message for each text, and the head that answers. Raises InvalidRequest and Unsupported."""
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    request = ClassifyRequest(input=texts, truncate_prompt_tokens=truncate)  # type: ignore[arg-type]
    return classification_submissions(request, model, TraceContext()), classifier_of(model)


def score_sheet(data_1: Strings, data_2: Strings, truncate: int | None, model: ModelInfo) -> Sheet:
    """The pairs of a call. Raises InvalidRequest and Unsupported."""
    request = ScoreRequest(text_1=data_1, text_2=data_2, truncate_prompt_tokens=truncate)
    return Sheet(request, pairs_of(request), model, TraceContext())


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter by name, with its folder. The number is vLLM's; the name and the folder's content tell adapters
    apart."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


Loras = LoRARequest | Sequence[LoRARequest | None] | None


def with_adapters(requests: Iterable[Request], loras: Loras, count: int, model: ModelInfo) -> Iterable[Request]:
    """The requests of `count` prompts with one adapter for all, or one for each. Raises InvalidRequest at once."""
    if loras is None:
        return requests
    adapters = adapters_of(loras, count, model)
    return (
        msgspec.structs.replace(request, submit=msgspec.structs.replace(request.submit, adapter=adapter))
        for request, adapter in zip(requests, adapters, strict=True)
    )


def adapted(submits: Sequence[SubmitText], loras: Loras, model: ModelInfo) -> list[SubmitText]:
    """The same for messages that ask for vectors."""
    adapters = adapters_of(loras, len(submits), model)
    return [msgspec.structs.replace(submit, adapter=adapter) for submit, adapter in zip(submits, adapters, strict=True)]


def adapters_of(loras: Loras, count: int, model: ModelInfo) -> list[Adapter | None]:
    """The adapter of each of `count` prompts. Raises InvalidRequest."""
    each = [loras] * count if loras is None or isinstance(loras, LoRARequest) else list(loras)
    if len(each) != count:
        message = f"there are {len(each)} lora_request for {count} prompts"
        raise InvalidRequest(message, param="lora_request")
    found = {lora: adapter_of(lora, model) for lora in set(each) if lora is not None}
    return [None if lora is None else found[lora] for lora in each]


def adapter_of(lora: LoRARequest, model: ModelInfo) -> Adapter:
    """What the folder holds now. Raises InvalidRequest."""
    if model.adapters is None:
        raise unsupported("lora_request", "needs enable_lora=True")
    return model.adapters.given(lora.lora_name, lora.lora_path)
