"""Messages of a chat, checked part by part and handed on as JSON for the model's template."""

from __future__ import annotations

import msgspec

from protocol.errors import InvalidRequest, NotBuilt
from services.api.decoding import check_depth, decode, given
from services.api.requests import ChatMessage, ChatRequest, TokenizeRequest

MESSAGES = msgspec.json.Decoder(list[ChatMessage])
VALUES = msgspec.json.Decoder(list[dict[str, object]])
OBJECT = msgspec.json.Decoder(dict[str, object])
LIST = msgspec.json.Decoder(list[object])
ROLES = ("system", "user", "assistant")
LATER_ROLES = ("developer", "tool", "function")
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
    """The messages as JSON, contents given in text parts joined by newlines."""
    if raw is msgspec.UNSET:
        raise InvalidRequest("messages is missing", param="messages", code="missing_required_parameter")
    messages = decode(raw, MESSAGES, "messages")
    if not messages:
        raise InvalidRequest("messages is empty", param="messages", code="invalid_value")
    for number, message in enumerate(messages):
        check_message(message, f"messages[{number}]")
    values = decode(raw, VALUES, "messages")
    check_depth(values, "messages")
    if not any(isinstance(message.content, list) for message in messages):
        return bytes(raw)
    for message, value in zip(messages, values, strict=True):
        if isinstance(message.content, list):
            value["content"] = "\n".join(part.text or "" for part in message.content)
    return msgspec.json.encode(values)


def check_message(message: ChatMessage, path: str) -> None:
    if message.role not in ROLES:
        if message.role in LATER_ROLES:
            raise NotBuilt(f"{path}.role: {message.role} messages are not built yet", param=f"{path}.role")
        allowed = ", ".join(ROLES)
        raise InvalidRequest(
            f"{path}.role: {message.role!r} is not one of {allowed}", param=f"{path}.role", code="invalid_value"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if given(getattr(message, name)):
            raise NotBuilt(f"{path}.{name} is not built yet", param=f"{path}.{name}")
    if message.content is None:
        raise InvalidRequest(
            f"{path}.content is missing", param=f"{path}.content", code="missing_required_parameter"
        )
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            place = f"{path}.content[{number}]"
            if part.type != "text":
                raise NotBuilt(f"{place}.type: only text parts are built", param=f"{place}.type")
            if part.text is None:
                raise InvalidRequest(
                    f"{place}.text is missing", param=f"{place}.text", code="missing_required_parameter"
                )


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
