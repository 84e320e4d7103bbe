"""POST /v1/chat/completions. Source: OpenAI API reference, "Create chat completion"."""

from __future__ import annotations

import secrets
import time

import msgspec

from penstock.protocol.config import CLAMP_ALL
from penstock.protocol.errors import InvalidRequest, NotBuilt
from penstock.protocol.messages import Grammar, Reasoning, SubmitText, ToolUse, TraceContext
from penstock.services.client.model_info import ServedModel
from penstock.services.client.output_collector import Reply
from penstock.services.client.submission import submission
from penstock.services.http.request_context import RequestContext
from penstock.services.http.stream_writer import attended, stream, whole
from penstock.services.openai.answers import Identity, Told, chat_answer
from penstock.services.openai.app_state import AppState
from penstock.services.openai.parameters import (
    UNSUPPORTED_IN_CHAT,
    Lengths,
    check_limits,
    check_unsupported,
    choices,
    prompt_logprobs,
    wants_usage,
)
from penstock.services.openai.schema import ROLES, ChatMessage, ChatRequest, ContentPart, CustomCall, TokenizeRequest
from penstock.services.openai.sse import Frames
from penstock.services.openai.tools import tools_asked
from penstock.services.openai.validation import check_depth, decode, given, read_fields, with_query

REQUEST = msgspec.json.Decoder(ChatRequest)


async def create_chat_completion(app: AppState, context: RequestContext) -> None:
    """POST /v1/chat/completions."""
    members = await read_fields(await context.read_json())
    request = with_query(members.decode(REQUEST), context)
    app.model.check_name(request.model)
    context.set_timeout(request.timeout, "timeout")
    check_limits(request, app.config.api)
    n = choices(request, 1)
    check_unsupported(members.fields, UNSUPPORTED_IN_CHAT, n)
    check_template(request, trusted=app.config.tokenizer.trust_request_chat_template)
    usage = wants_usage(request)
    number = app.pipeline.new_id()
    session = context.session(request.user)
    trace, clamp = context.trace, app.config.api.clamp_max_tokens == CLAMP_ALL
    submit = chat_submission(request, number, app.model, n, trace, session, clamp=clamp)
    identity = Identity("chatcmpl-" + secrets.token_hex(16), int(time.time()), app.model.name)
    now = time.monotonic()
    streaming = bool(request.stream)
    reply = Reply(1, n, stream=streaming, timings=app.traffic.timings, now=now, name=identity.id)
    app.pipeline.submit([submit], reply, now, context.client(request.user))
    async with attended(reply, app.pipeline, context):
        told = Told.of(request, submit.tool_use)
        if streaming:
            frames = Frames(identity, chat=True, choices=n, usage=usage, told=told)
            await stream(reply, frames, context)
            return
        await whole(reply)
        await context.send_json(msgspec.json.encode(chat_answer(identity, reply, told)))


def chat_submission(
    request: ChatRequest,
    number: int,
    model: ServedModel,
    n: int,
    trace: TraceContext,
    session: str = "",
    *,
    clamp: bool = False,
    late: bool = False,
) -> SubmitText:
    """The request as the message with id `number`; `clamp` and `late` as in `Lengths`.

    Raises InvalidRequest or NotBuilt naming the parameter.
    """
    chat = conversation(request)
    asked = tools_asked(request)
    length = msgspec.structs.replace(lengths(request), clamp=clamp, late=late)
    found = submission(request, length, model, n, trace)
    check_structure(asked.use, found.grammar)
    return msgspec.structs.replace(
        found,
        id=number,
        session=session,
        messages=chat.messages,
        tools=asked.tools,
        tool_use=asked.use,
        reasoning=reasoning_of(request),
        chat_template=request.chat_template,
        template_arguments=chat.template_arguments,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        add_special_tokens=bool(request.add_special_tokens),  # the template writes its own unless told otherwise
    )


def check_structure(use: ToolUse | None, grammar: Grammar | None) -> None:
    """Raise InvalidRequest for an answer that must be a call and must follow a grammar. A `response_format` is for
    answers that are no calls, so it goes with every `tool_choice`."""
    if use is None or not use.required or grammar is None or grammar.param.partition(".")[0] == "response_format":
        return
    message = f"{grammar.param} and tool_choice: the choice makes every answer a call, which follows no grammar"
    raise InvalidRequest(message, param=grammar.param, code="invalid_value")


def check_template(request: ChatRequest, *, trusted: bool) -> None:
    """Raise InvalidRequest for a template of the request's own that the server does not take."""
    if request.chat_template is not None and not trusted:
        message = "chat_template is taken only by a server that was started with --trust-request-chat-template"
        raise InvalidRequest(message, param="chat_template", code="unsupported")


def reasoning_of(request: ChatRequest) -> Reasoning:
    """Raises InvalidRequest where the two names of the budget contradict each other."""
    budget, other = request.thinking_token_budget, request.max_thinking_tokens
    if budget is not None and other is not None and budget != other:
        message = "thinking_token_budget and max_thinking_tokens differ; give one of them"
        raise InvalidRequest(message, param="max_thinking_tokens", code="invalid_value")
    return Reasoning(
        effort=request.reasoning_effort or "",
        budget=other if budget is None else budget,
        split=request.separate_reasoning is not False,
    )


def lengths(request: ChatRequest) -> Lengths:
    """Output length and logprobs under the names they have in chat. Raises InvalidRequest where they contradict.

    Without a length the answer may take all the room that the prompt leaves.
    """
    most, param = request.max_completion_tokens, "max_completion_tokens"
    if most is None:
        most, param = request.max_tokens, "max_tokens"
    elif request.max_tokens is not None and request.max_tokens != most:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens", code="invalid_value"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    return Lengths(
        max_tokens=most,
        max_tokens_param=param,
        logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
        prompt_logprobs=prompt_logprobs(request),
    )


MESSAGES = msgspec.json.Decoder(list[ChatMessage])
VALUES = msgspec.json.Decoder(list[dict[str, object]])
OBJECT = msgspec.json.Decoder(dict[str, object])
LIST = msgspec.json.Decoder(list[object])
# Names that the template is given by the server itself, or that would choose another template.
RESERVED_ARGUMENTS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)


class Conversation(msgspec.Struct, frozen=True):
    """What the tokenizer renders."""

    messages: bytes
    template_arguments: bytes | None
    add_generation_prompt: bool
    continue_final_message: bool


def conversation(request: ChatRequest | TokenizeRequest) -> Conversation:
    """The request's conversation. Raises InvalidRequest or NotBuilt naming the message that is wrong."""
    continued = bool(request.continue_final_message)
    if continued and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
            code="invalid_value",
        )
    prompted = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    return Conversation(messages_of(request.messages), template_arguments(request), prompted, continued)


def messages_of(raw: msgspec.Raw | msgspec.UnsetType) -> bytes:
    """The messages as JSON, contents given in text parts joined by newlines and calls all of functions."""
    if raw is msgspec.UNSET:
        raise InvalidRequest("messages is missing", param="messages", code="missing_required_parameter")
    messages = decode(raw, MESSAGES, "messages")
    if not messages:
        raise InvalidRequest("messages is empty", param="messages", code="invalid_value")
    for number, message in enumerate(messages):
        check_message(message, f"messages[{number}]")
    values = decode(raw, VALUES, "messages")
    check_depth(values, "messages")
    if not any(isinstance(message.content, list) or custom_calls(message) for message in messages):
        return bytes(raw)
    for message, value in zip(messages, values, strict=True):
        if custom_calls(message):
            value["tool_calls"] = [
                as_function(call.id, call.custom) if call.custom is not None else given_call
                for call, given_call in zip(message.tool_calls or (), value["tool_calls"], strict=True)  # type: ignore[call-overload]
            ]
        if isinstance(message.content, list):
            value["content"] = "\n".join(part.text or part.refusal or "" for part in message.content)
    return msgspec.json.encode(values)


def custom_calls(message: ChatMessage) -> bool:
    return any(call.custom is not None for call in message.tool_calls or ())


def as_function(call_id: str | None, call: CustomCall) -> dict[str, object]:
    """A call of a custom tool as the function that the model knows it as."""
    found: dict[str, object] = {} if call_id is None else {"id": call_id}
    return found | {"type": "function", "function": {"name": call.name, "arguments": {"input": call.input}}}


def check_message(message: ChatMessage, path: str) -> None:
    if message.role not in ROLES:
        if message.role == "function":
            raise NotBuilt(f"{path}.role: function is OpenAI's deprecated form of tool", param=f"{path}.role")
        allowed = ", ".join(ROLES)
        raise InvalidRequest(
            f"{path}.role: {message.role!r} is not one of {allowed}", param=f"{path}.role", code="invalid_value"
        )
    if given(message.function_call):
        reason = "function_call is OpenAI's deprecated form of tool_calls"
        raise NotBuilt(f"{path}.{reason}", param=f"{path}.function_call")
    if given(message.audio):
        raise NotBuilt(f"{path}.audio is not built yet", param=f"{path}.audio")
    if message.tool_calls and message.role != "assistant":
        param = f"{path}.tool_calls"
        raise InvalidRequest(f"{param}: only an assistant calls tools", param=param, code="invalid_value")
    for number, call in enumerate(message.tool_calls or ()):
        if (call.function if call.type == "function" else call.custom) is None:
            raise missing(f"{path}.tool_calls[{number}].{call.type}")
        arguments = call.function.arguments if call.function is not None else msgspec.UNSET
        if given(arguments) and not bytes(arguments).startswith((b'"', b"{")):
            param = f"{path}.tool_calls[{number}].function.arguments"
            raise InvalidRequest(f"{param} must be an object, or its text", param=param, code="invalid_type")
    if message.role == "tool" and message.tool_call_id is None:
        raise missing(f"{path}.tool_call_id")
    if message.content is None and message.role != "assistant":  # whose turn may have been silent
        raise missing(f"{path}.content")
    for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
        check_part(part, message.role, f"{path}.content[{number}]")


def check_part(part: ContentPart, role: str, place: str) -> None:
    if part.type == "refusal" and role == "assistant":
        if part.refusal is None:
            raise missing(f"{place}.refusal")
        return
    if part.type != "text":
        message = f"{place}.type: {part.type!r} is not built; this server reads text parts only"
        raise NotBuilt(message, param=f"{place}.type")
    if part.text is None:
        raise missing(f"{place}.text")


def missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")


def template_arguments(request: ChatRequest | TokenizeRequest) -> bytes | None:
    if not given(request.chat_template_kwargs):
        return None
    arguments = decode(request.chat_template_kwargs, OBJECT, "chat_template_kwargs")
    check_depth(arguments, "chat_template_kwargs")
    for name in arguments:
        if name in RESERVED_ARGUMENTS:
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{param} cannot be given this way", param=param, code="invalid_value")
    return bytes(request.chat_template_kwargs)


def tools_of(raw: msgspec.Raw | msgspec.UnsetType) -> bytes | None:
    """Tools as the template renders them."""
    if not given(raw):
        return None
    check_depth(decode(raw, LIST, "tools"), "tools")
    return bytes(raw)
