"""POST /v1/chat/completions, and the conversations of every API: their messages, checked part by part, as JSON for the
model's template. Source: OpenAI API reference, "Create chat completion"."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from penstock.protocol.config import CLAMP_ALL
from penstock.protocol.errors import InvalidRequest, Unsupported, invalid, unsupported
from penstock.protocol.messages import Grammar, Reasoning, SubmitText, Tokenize, ToolUse, TraceContext
from penstock.services.client.model_info import ModelInfo
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.answers import ResponseOptions
from penstock.services.openai.app_state import AppState
from penstock.services.openai.generation import GenerateRequest, Parsed, generate, new_identity
from penstock.services.openai.images import GivenImage, Images, Message, joined, unread
from penstock.services.openai.parameters import (
    REASONS,
    UNSUPPORTED_IN_CHAT,
    Lengths,
    UsageWanted,
    check_limits,
    check_unsupported,
    prompt_logprobs,
    submission,
    wants_usage,
)
from penstock.services.openai.schema import ROLES, ChatMessage, ChatRequest, ContentPart, CustomCall, TokenizeRequest
from penstock.services.openai.sse import SSEEncoder
from penstock.services.openai.tools import NO_TOOLS, Asked, tools_asked
from penstock.services.openai.validation import decode, given, missing, needed, read_request

REQUEST = msgspec.json.Decoder(ChatRequest)
MESSAGES = msgspec.json.Decoder(list[ChatMessage])
VALUES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
CALLS = msgspec.json.Decoder(list[msgspec.Raw])
OBJECT = msgspec.json.Decoder(dict[str, object])
# Names that the template is given by the server itself, or that would choose another template.
RESERVED_ARGUMENTS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)


async def parse_chat(app: AppState, context: RequestContext) -> Parsed:
    """POST /v1/chat/completions."""
    options, model = app.config.api, app.model
    request, fields = await read_request(await context.read_json(), REQUEST, model, context)
    n = request.n or 1
    check_limits(request, options, ("top_logprobs", request.top_logprobs))
    check_unsupported(fields, UNSUPPORTED_IN_CHAT, REASONS, n)
    if request.chat_template is not None and not app.config.tokenizer.trust_request_chat_template:
        message = "chat_template is taken only by a server that was started with --trust-request-chat-template"
        raise Unsupported(message, param="chat_template")
    usage = UsageWanted() if request.stream_options is None else wants_usage(request)
    clamp = options.clamp_max_tokens == CLAMP_ALL
    submit, images = chat_submission(request, model, n, context.trace, clamp=clamp)
    identity = new_identity("chatcmpl-", app, context)
    told = ResponseOptions(
        logprobs=bool(request.logprobs),
        prompt_logprobs=request.prompt_logprobs is not None,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        reasoning=request.include_reasoning is not False,
        customs=frozenset(custom.name for custom in submit.tool_use.customs) if submit.tool_use else frozenset(),
    )
    encoder = SSEEncoder(identity, chat=True, choices=n, usage=usage, told=told)
    asked = GenerateRequest(id=identity.id, prompts=(submit,), user=request.user, images=images, least_aborted=1)
    return asked, encoder


create_chat_completion = functools.partial(generate, parse_chat)


def chat_submission(
    request: ChatRequest, model: ModelInfo, n: int, trace: TraceContext, *, clamp: bool = False
) -> tuple[SubmitText, tuple[GivenImage, ...]]:
    """What the engine is asked, and the images that it needs. `clamp` as in `Lengths`.

    Raises InvalidRequest or Unsupported naming the parameter.
    """
    prompt = chat_prompt(request, model)
    found = submission(
        request, lengths(request, clamp=clamp), model, n, trace, **prompt.fields,
        chat_template=request.chat_template,
    )  # fmt: skip
    if found.grammar is not None:
        check_structure(prompt.tools.use, found.grammar)
    return found, prompt.images


def check_structure(use: ToolUse | None, grammar: Grammar | None) -> None:
    """Raise InvalidRequest for an answer that must be a call and must follow a grammar. A `response_format` is for
    answers that are no calls, so it goes with every `tool_choice`."""
    if use is None or not use.required or grammar is None or grammar.param.partition(".")[0] == "response_format":
        return
    raise invalid(grammar.param, "and tool_choice: the choice makes every answer a call, which follows no grammar")


def lengths(request: ChatRequest, *, clamp: bool = False) -> Lengths:
    """Output length and logprobs under the names they have in chat. Raises InvalidRequest where they contradict.

    Without a length the answer may take all the room that the prompt leaves.
    """
    most, param = request.max_completion_tokens, "max_completion_tokens"
    if most is None:
        most, param = request.max_tokens, "max_tokens"
    elif request.max_tokens is not None and request.max_tokens != most:
        raise invalid("max_tokens", "and max_completion_tokens differ; give one of them")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    return Lengths(
        max_tokens=most,
        max_tokens_param=param,
        logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
        prompt_logprobs=-1 if request.prompt_logprobs is None else prompt_logprobs(request),
        clamp=clamp,
    )


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as the tokenizer renders it, whatever API it came by."""

    messages: bytes  # JSON, as chat templates read them
    images: tuple[GivenImage, ...] = ()  # yet to be read
    tools: Asked = NO_TOOLS
    reasoning: Reasoning = Reasoning()
    template_arguments: bytes | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template writes its own unless told otherwise

    @property
    def fields(self) -> dict[str, Any]:
        """Those of a SubmitText, but for the images."""
        return {
            "messages": self.messages,
            "tools": self.tools.tools,
            "tool_use": self.tools.use,
            "reasoning": self.reasoning,
            "template_arguments": self.template_arguments,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "add_special_tokens": self.add_special_tokens,
        }

    def tokenize(self, *, with_strings: bool = False) -> Tokenize:
        """The call that asks for its token ids, without the images."""
        fields = self.fields
        del fields["tool_use"]
        return Tokenize(with_strings=with_strings, **fields)


def chat_prompt(request: ChatRequest | TokenizeRequest, model: ModelInfo) -> ChatPrompt:
    """The request's conversation. Raises InvalidRequest or Unsupported naming the message that is wrong."""
    continued = bool(request.continue_final_message)
    if continued and request.add_generation_prompt:
        raise invalid("continue_final_message", "and add_generation_prompt cannot both be true")
    arguments = None
    messages, images = messages_of(request.messages, model)
    if request.chat_template_kwargs and given(request.chat_template_kwargs):
        arguments = template_arguments(request.chat_template_kwargs)
    if isinstance(request, TokenizeRequest):
        tools, reasoning = Asked(None if request.tools is None else msgspec.json.encode(request.tools)), Reasoning()
    else:
        named = (request.tools and given(request.tools)) or (request.tool_choice and given(request.tool_choice))
        tools, reasoning = tools_asked(request) if named else NO_TOOLS, reasoning_of(request)
    return ChatPrompt(
        messages=messages,
        images=images,
        tools=tools,
        reasoning=reasoning,
        template_arguments=arguments,
        add_generation_prompt=not continued if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continued,
        add_special_tokens=bool(request.add_special_tokens),
    )


def reasoning_of(request: ChatRequest) -> Reasoning:
    """Raises InvalidRequest where the two names of the budget contradict each other."""
    budget, other = request.thinking_token_budget, request.max_thinking_tokens
    if budget is not None and other is not None and budget != other:
        message = "thinking_token_budget and max_thinking_tokens differ; give one of them"
        raise InvalidRequest(message, param="max_thinking_tokens")
    return Reasoning(
        effort=request.reasoning_effort or "",
        budget=other if budget is None else budget,
        split=request.separate_reasoning is not False,
    )


def messages_of(raw: msgspec.Raw | msgspec.UnsetType, model: ModelInfo) -> tuple[bytes, tuple[GivenImage, ...]]:
    """The messages as JSON, calls all of functions, and the images in them. Contents given in text parts are joined by
    newlines; one with an image keeps its parts."""
    if raw is msgspec.UNSET:
        raise missing("messages")
    messages = decode(raw, MESSAGES, "messages")
    if not messages:
        raise invalid("messages", "is empty")
    for number, message in enumerate(messages):
        check_message(message, f"messages[{number}]")
    if not any(isinstance(each.content, list) or (each.tool_calls and custom_calls(each)) for each in messages):
        return bytes(raw), ()
    images = Images(model)
    values: list[dict[str, Any]] = [*decode(raw, VALUES, "messages")]
    for number, (message, value) in enumerate(zip(messages, values, strict=True)):
        if custom_calls(message):
            given_calls = CALLS.decode(value["tool_calls"])
            value["tool_calls"] = [
                as_function(call.id, call.custom) if call.custom is not None else given_call
                for call, given_call in zip(message.tool_calls or (), given_calls, strict=True)
            ]
        if isinstance(message.content, list):
            value["content"] = content_of(message.content, message.role, images, f"messages[{number}]")
    return msgspec.json.encode(values), tuple(images.found)


def custom_calls(message: ChatMessage) -> bool:
    return any(call.custom is not None for call in message.tool_calls or ())


def as_function(call_id: str | None, call: CustomCall) -> dict[str, object]:
    """A call of a custom tool as the function that the model knows it as."""
    found: dict[str, object] = {} if call_id is None else {"id": call_id}
    return found | {"type": "function", "function": {"name": call.name, "arguments": {"input": call.input}}}


def content_of(content: list[ContentPart], role: str, images: Images, path: str) -> str | list[Message]:
    """Parts as the template reads them. Raises InvalidRequest or Unsupported for one that is wrong."""
    parts: list[str | Message] = []
    for number, part in enumerate(content):
        place = f"{path}.content[{number}]"
        match part.type:
            case "text":
                parts.append(needed(part.text, f"{place}.text"))
            case "refusal" if role == "assistant":
                parts.append(needed(part.refusal, f"{place}.refusal"))
            case "image_url":
                parts.append(image_of(part, role, images, place))
            case kind:
                raise unread(kind, f"{place}.type", images)
    return joined(parts)


def image_of(part: ContentPart, role: str, images: Images, place: str) -> Message:
    images.check_room(place)
    if role not in ("user", "tool"):
        raise unsupported(place, f": images stand in messages of users and tools, not of role {role}")
    param = f"{place}.image_url"
    given_url = needed(part.image_url, param)
    if isinstance(given_url, str):
        return images.add(given_url, None, param)
    return images.add(given_url.url, given_url.detail, f"{param}.url")


def check_message(message: ChatMessage, path: str) -> None:
    if message.role not in ROLES:
        if message.role == "function":
            raise unsupported(f"{path}.role", ": function is OpenAI's deprecated form of tool")
        raise invalid(f"{path}.role", f": {message.role!r} is not one of {', '.join(ROLES)}")
    if message.function_call and given(message.function_call):
        raise unsupported(f"{path}.function_call", "is OpenAI's deprecated form of tool_calls")
    if message.audio and given(message.audio):
        raise unsupported(f"{path}.audio", "is not supported")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls", ": only an assistant calls tools")
    for number, call in enumerate(message.tool_calls or ()):
        if (call.function if call.type == "function" else call.custom) is None:
            raise missing(f"{path}.tool_calls[{number}].{call.type}")
        arguments = call.function.arguments if call.function is not None else msgspec.UNSET
        if given(arguments) and not bytes(arguments).startswith((b'"', b"{")):
            why = "must be an object, or its text"
            raise invalid(f"{path}.tool_calls[{number}].function.arguments", why, "invalid_type")
    if message.role == "tool" and message.tool_call_id is None:
        raise missing(f"{path}.tool_call_id")
    if message.content is None and message.role != "assistant":  # whose turn may have been silent
        raise missing(f"{path}.content")


def template_arguments(raw: msgspec.Raw) -> bytes:
    """What the request says to the template. Raises InvalidRequest for a name that the server itself fills in."""
    for name in decode(raw, OBJECT, "chat_template_kwargs"):
        if name in RESERVED_ARGUMENTS:
            raise invalid(f"chat_template_kwargs.{name}", "cannot be given this way")
    return bytes(raw)
