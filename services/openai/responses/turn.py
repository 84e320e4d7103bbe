"""One response from its request to its last word: what the engine is asked, what is told of it, what is kept.

Source: OpenAI API reference, "Create a model response".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.protocol.config import CLAMP_ALL, ApiConfig
from penstock.protocol.errors import InvalidRequest, NotFound, RequestError, invalid, unsupported
from penstock.protocol.images import ImageFile
from penstock.protocol.messages import Finish, Grammar, PieceKind, Reasoning, Sampling, SubmitText, TraceContext
from penstock.services.client.model_info import ModelInfo
from penstock.services.client.output_collector import OutputCollector, Segment
from penstock.services.openai.answers import ChatTokenLogprob, Remarks
from penstock.services.openai.chat import ChatPrompt, as_function, template_arguments
from penstock.services.openai.images import GivenImage, Images, restored, with_data
from penstock.services.openai.output_blocks import Block, blocks_of
from penstock.services.openai.parameters import Lengths, check_limits, submission
from penstock.services.openai.responses.items import (
    History,
    Messages,
    encoded,
    function_call,
    items_of,
    listed,
    tools_within,
    without_data,
)
from penstock.services.openai.responses.output import (
    CallItem,
    CustomCallItem,
    IncompleteDetails,
    Naming,
    OutputItem,
    ReasoningItem,
    ReasoningShown,
    ResponseAnswer,
    ResponseError,
    ResponseUsage,
    output_items,
    shaped,
)
from penstock.services.openai.responses.request import LOGPROBS, SEALED_REASONING, Item, ResponseRequest, TextFormat
from penstock.services.openai.responses.store import KEEPS_NONE, ResponseStore, Stored
from penstock.services.openai.responses.tools import Toolbox, choice_of, flat, toolbox
from penstock.services.openai.schema import CustomCall, GenerationRequest, extras_of
from penstock.services.openai.structured_output import schema
from penstock.services.openai.tools import asked
from penstock.services.openai.validation import given, missing

# What responses call the fields that the tokenizer and the engine name in errors.
FIELD_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
}
CONTINUED = ("completed", "incomplete")
PATIENCE = 1.0  # seconds that an answer waits for the disk
MESSAGES = msgspec.json.Decoder(Messages)
REQUEST = msgspec.json.Decoder(ResponseRequest)


class Turn:
    """`prompt` is the conversation; `opening` the response as it begins, once the sampling is known."""

    def __init__(
        self,
        request: ResponseRequest,
        store: ResponseStore,
        model: ModelInfo,
        name: str,
        earlier: Messages | None = None,
    ) -> None:
        """`earlier` is the conversation so far. Raises InvalidRequest and Unsupported naming the field."""
        check_options(request, store)
        images = Images(model)
        before = restored(earlier or [], images, "previous_response_id")
        self.id = store.new_id()
        self._store = store
        self._name = name
        self._created = int(time.time())
        items = items_of(request.input)
        history = History(items, images)
        if images.found:  # the body is large, and nothing of it is to be held while the answer is made
            request = apart(request, without_data(items))
            items = items_of(request.input)
        self.request = request
        self._items = items
        self._images: tuple[ImageFile, ...] = ()  # of the conversation, once they are read
        self._saving: asyncio.Future[str] | None = None
        self._messages = [*before, *history.messages]
        self._opening: ResponseAnswer | None = None
        asked = [(f"tools[{number}]", tool) for number, tool in enumerate(request.tools or ())]
        self._tools = toolbox([*asked, *tools_within(self._items)])
        self._ignored = (*self._tools.ignored, *history.ignored, *without_effect(request))
        self.naming = Naming(self._tools.names, SEALED_REASONING in (request.include or ()))
        self.prompt = response_prompt(request, self._messages, tuple(images.found), self._tools)

    @property
    def field_names(self) -> Mapping[str, str]:
        return {**self._tools.field_names, **FIELD_NAMES}

    def submission(self, options: ApiConfig, model: ModelInfo, trace: TraceContext) -> SubmitText:
        """What the engine is asked, without an id. Raises InvalidRequest naming the parameter."""
        request = self.request
        logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
        parameters = GenerationRequest(
            stream=request.stream,
            temperature=request.temperature,
            top_p=request.top_p,
            stop=request.stop,
            truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
            **extras_of(request),
        )
        check_limits(parameters, options, ("top_logprobs", request.top_logprobs))
        lengths = Lengths(
            request.max_output_tokens, "max_output_tokens", logprobs=(request.top_logprobs or 0) if logprobs else -1,
            clamp=options.clamp_max_tokens == CLAMP_ALL,
        )  # fmt: skip
        grammar = grammar_of(request.text.format if request.text else None)
        return submission(parameters, lengths, model, 1, trace, grammar, **self.prompt.fields)

    @property
    def kept(self) -> bool:
        return self.request.store is not False and self._store.keeps

    def open(self, sampling: Sampling, images: tuple[ImageFile, ...] = ()) -> None:
        """The request is on its way with this sampling, and the images of its conversation have been read."""
        self._images = images
        self.prompt = msgspec.structs.replace(self.prompt, images=())
        request = self.request
        reasoning = request.reasoning
        self._opening = ResponseAnswer(
            id=self.id,
            created_at=self._created,
            status="in_progress",
            background=bool(request.background),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=self._name,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            reasoning=ReasoningShown(reasoning.effort, reasoning.summary) if reasoning else ReasoningShown(),
            temperature=sampling.temperature,
            text={"format": format_shown(request)},
            tool_choice="auto" if request.tool_choice is None else request.tool_choice,
            tools=self._tools.shown,
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation=request.truncation or "disabled",
            user=request.user,
            penstock=Remarks(ignored=self._ignored) if self._ignored else msgspec.UNSET,
        )

    @property
    def opening(self) -> ResponseAnswer:
        assert self._opening is not None
        return self._opening

    def complete(
        self, collector: OutputCollector, blocks: list[Block], logprobs: list[ChatTokenLogprob]
    ) -> ResponseAnswer:
        """The whole response, which is kept if its request did not say otherwise."""
        (choice,) = collector.choices
        cut = choice.finish == Finish.LENGTH
        answer = msgspec.structs.replace(
            self.opening,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails() if cut else None,
            output=output_items(blocks, choice.finish, logprobs, self.naming),
            usage=ResponseUsage.of(collector.usage),
            penstock=Remarks.of(collector, self._ignored),
        )
        self.keep(answer)
        return answer

    def whole(self, collector: OutputCollector) -> ResponseAnswer:
        """The whole response of a reply that has ended; one that said nothing has a block of text."""
        (choice,) = collector.choices
        logprobs = shaped(choice.take_logprobs())
        return self.complete(collector, blocks_of(choice.take() or [Segment(PieceKind.CONTENT, "")]), logprobs)

    def failed(self, error: RequestError) -> ResponseAnswer:
        """The response that could not go on. It is kept only where somebody may ask what became of it."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        code = "invalid_prompt" if error.status == 400 else code
        answer = msgspec.structs.replace(
            self.opening,
            status="failed",
            error=ResponseError(code, error.message),  # type: ignore[arg-type]
        )
        if self.request.background:
            self.keep(answer)
        return answer

    def keep(self, answer: ResponseAnswer) -> None:
        if self.kept:
            messages = [*with_data(self._messages, self._images), *said(answer.output)]
            items = msgspec.json.encode(listed(self._items))
            stored = Stored(answer.status, msgspec.json.encode(answer), items, encoded(messages))
            self._saving = self._store.put(self.id, stored)

    async def saved(self) -> None:
        """Wait until whatever is kept can be found by every process; a disk that takes long is not waited for."""
        if self._saving is not None:
            await asyncio.wait([self._saving], timeout=PATIENCE)


def check_options(request: ResponseRequest, store: ResponseStore) -> None:
    """Raise for what cannot be had, alone or together."""
    if request.stream_options is not None:
        if not request.stream:
            raise invalid("stream_options", "is allowed only when stream is true")
        if request.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "is not supported")
    if not request.background:
        return
    if request.stream:
        raise unsupported("background", "is not supported for streams; retrieve the response when it is ready")
    if store.shared:
        raise unsupported("background", "needs a server with --api-processes 1, where whoever asks finds who runs it")
    if request.store is False or not store.keeps:
        message = "background needs a response that is kept" + ("" if store.keeps else f"; {KEEPS_NONE}")
        raise InvalidRequest(message, param="background")


async def earlier_messages(name: str | None, store: ResponseStore) -> Messages:
    """The conversation until the response that this one goes on from. Raises InvalidRequest where that is not kept or
    has not come to an end."""
    if name is None:
        return []
    param = "previous_response_id"
    try:
        found = await store.get(name)
    except NotFound as error:
        raise InvalidRequest(error.message, param=param, code="previous_response_not_found") from error
    if found.status not in CONTINUED:
        raise invalid(param, f": that response is {found.status}; only one that was completed can be gone on from")
    return MESSAGES.decode(found.messages)


def without_effect(request: ResponseRequest) -> tuple[str, ...]:
    """Wishes that this server has no means to follow."""
    if request.text is None or request.text.verbosity in (None, "medium"):
        return ()
    return ("text.verbosity has no effect here; instructions can say how long to answer",)


def apart(request: ResponseRequest, items: list[Item]) -> ResponseRequest:
    """The request with these items, in memory of its own: what was decoded last refers to the body."""
    return REQUEST.decode(msgspec.json.encode(msgspec.structs.replace(request, input=items)))


def response_prompt(
    request: ResponseRequest, messages: Messages, images: tuple[GivenImage, ...], tools: Toolbox
) -> ChatPrompt:
    """The conversation of a response. Raises InvalidRequest and Unsupported naming the field."""
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    choice = choice_of(request.tool_choice, tools)
    conversation = [*instructions, *messages]
    if not conversation:
        raise invalid("input", "is empty")
    arguments = request.chat_template_kwargs
    return ChatPrompt(
        messages=msgspec.json.encode(conversation),
        images=images,
        tools=asked(tools.functions, tools.template, choice, parallel=request.parallel_tool_calls is not False),
        reasoning=Reasoning(
            effort=(request.reasoning.effort if request.reasoning else None) or "",
            budget=request.thinking_token_budget,
        ),
        template_arguments=template_arguments(arguments) if given(arguments) else None,
    )


def grammar_of(form: TextFormat | None) -> Grammar | None:
    """The grammar of `text.format`. Raises InvalidRequest."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar(kind="json_object", param="text.format")
    if form.type != "json_schema":
        raise invalid("text.format.type", f": {form.type!r} is not one of text, json_object, json_schema")
    if not given(form.schema):
        raise missing("text.format.schema")
    return msgspec.structs.replace(schema(form.schema, "text.format.schema"), lenient=form.strict is False)


def format_shown(request: ResponseRequest) -> dict[str, Any]:
    form = request.text.format if request.text else None
    if form is None:
        return {"type": "text"}
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "name": form.name or "", "description": form.description, "schema": form.schema,
            "strict": form.strict is not False}  # fmt: skip


def said(output: list[OutputItem]) -> Messages:
    """The output as the assistant's messages of the conversation that goes on from it."""
    found: Messages = []
    for item in output:
        called = isinstance(item, CallItem | CustomCallItem)
        if not found or (not called and (found[-1]["content"] or "tool_calls" in found[-1])):
            found.append({"role": "assistant", "content": None})
        last = found[-1]
        if isinstance(item, CustomCallItem):
            custom = CustomCall(name=model_name(item), input=item.input)
            last.setdefault("tool_calls", []).append(as_function(item.call_id, custom))
        elif isinstance(item, CallItem):
            last.setdefault("tool_calls", []).append(function_call(item.call_id, model_name(item), item.arguments))
        elif isinstance(item, ReasoningItem):
            last["reasoning_content"] = last.get("reasoning_content", "") + item.content[0].text
        else:
            last["content"] = item.content[0].text
    for message in found:
        if message["content"] is None and "tool_calls" not in message and not message.get("reasoning_content"):
            message["content"] = ""
    return found


def model_name(item: CallItem | CustomCallItem) -> str:
    """What the model calls an item's tool."""
    return flat(item.name, None if item.namespace is msgspec.UNSET else item.namespace)
