"""The conversation of a chat: its messages, checked part by part, as JSON for the model's template."""

from __future__ import annotations

import msgspec

from penstock.protocol.errors import InvalidRequest, NotBuilt
from penstock.protocol.messages import Reasoning, SubmitText, Tokenize
from penstock.services.openai.schema import ROLES, ChatMessage, ChatRequest, ContentPart, CustomCall, TokenizeRequest
from penstock.services.openai.tools import NO_TOOLS, Asked, tools_asked
from penstock.services.openai.validation import check_depth, decode, given

MESSAGES = msgspec.json.Decoder(list[ChatMessage])
VALUES = msgspec.json.Decoder(list[dict[str, object]])
OBJECT = msgspec.json.Decoder(dict[str, object])
LIST = msgspec.json.Decoder(list[object])
# Names that the template is given by the server itself, or that would choose another template.
RESERVED_ARGUMENTS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as the tokenizer renders it, whatever API it came by."""

    messages: bytes  # JSON, as chat templates read them
    tools: Asked = NO_TOOLS
    reasoning: Reasoning = Reasoning()
    template_arguments: bytes | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template writes its own unless told otherwise

    def prompt_of(self, submit: SubmitText) -> SubmitText:
        """`submit` with this as its prompt."""
        return msgspec.structs.replace(
            submit,
            messages=self.messages,
            tools=self.tools.tools,
            tool_use=self.tools.use,
            reasoning=self.reasoning,
            template_arguments=self.template_arguments,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
        )

    def tokenize(self, number: int, *, with_strings: bool = False) -> Tokenize:
        """The call that asks for its token ids."""
        return Tokenize(
            id=number,
            messages=self.messages,
            tools=self.tools.tools,
            reasoning=self.reasoning,
            template_arguments=self.template_arguments,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            with_strings=with_strings,
        )


def chat_prompt(request: ChatRequest | TokenizeRequest) -> ChatPrompt:
    """The request's conversation. Raises InvalidRequest or NotBuilt naming the message that is wrong."""
    continued = bool(request.continue_final_message)
    if continued and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
            code="invalid_value",
        )
    messages, arguments = messages_of(request.messages), None
    if given(request.chat_template_kwargs):
        arguments = template_arguments(request.chat_template_kwargs)
    if isinstance(request, TokenizeRequest):
        tools, reasoning = Asked(tools_of(request.tools)), Reasoning()
    else:
        named = given(request.tools) or given(request.tool_choice)
        tools, reasoning = tools_asked(request) if named else NO_TOOLS, reasoning_of(request)
    return ChatPrompt(
        messages=messages,
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
        raise InvalidRequest(message, param="max_thinking_tokens", code="invalid_value")
    return Reasoning(
        effort=request.reasoning_effort or "",
        budget=other if budget is None else budget,
        split=request.separate_reasoning is not False,
    )


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


def template_arguments(raw: msgspec.Raw) -> bytes:
    """What the request says to the template. Raises InvalidRequest for a name that the server itself fills in."""
    arguments = decode(raw, OBJECT, "chat_template_kwargs")
    check_depth(arguments, "chat_template_kwargs")
    for name in arguments:
        if name in RESERVED_ARGUMENTS:
            param = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{param} cannot be given this way", param=param, code="invalid_value")
    return bytes(raw)


def tools_of(raw: msgspec.Raw | msgspec.UnsetType) -> bytes | None:
    """Tools as the template renders them."""
    if not given(raw):
        return None
    check_depth(decode(raw, LIST, "tools"), "tools")
    return bytes(raw)
