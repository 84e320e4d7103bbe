"""A message's conversation and tools, as chat templates read them.

Source: Anthropic API reference, "Create a Message": `messages`, `system`, `tools`, `tool_choice`, `thinking`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.protocol import limits
from penstock.protocol.errors import InvalidRequest, invalid, unsupported
from penstock.protocol.messages import Grammar, Reasoning
from penstock.services.client.model_info import ModelInfo
from penstock.services.openai.chat import ChatPrompt, template_arguments
from penstock.services.openai.images import Images, Message, joined, unread
from penstock.services.openai.messages.request import (
    ROLES,
    CountRequest,
    InputBlock,
    InputMessage,
    MessageRequest,
    MessageToolChoice,
    Thinking,
    ToolDefinition,
    Word,
)
from penstock.services.openai.structured_output import schema
from penstock.services.openai.tools import Choice, Function, check_name, check_names, check_schema
from penstock.services.openai.tools import asked as asked_tools
from penstock.services.openai.validation import given, misfit, missing, needed

BILLING = "x-anthropic-billing-header:"  # begins a block that Anthropic's own programs put into `system`
# What messages call the fields that the tokenizer and the engine name in errors.
FIELD_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
    **{f"tools[{number}].function.parameters": f"tools[{number}].input_schema" for number in range(limits.MAX_TOOLS)},
}
THINKING_EFFORT = "high"  # of a request that only says that the model is to think
HIGHEST: Mapping[str, str] = {"max": "xhigh"}  # what chats call Anthropic's other efforts


def message_prompt(request: MessageRequest | CountRequest, max_tokens: int, model: ModelInfo) -> ChatPrompt:
    """The conversation of a message, answered with `max_tokens` at most. Raises InvalidRequest and Unsupported naming
    the field."""
    thinking = request.thinking
    budget = request.thinking_token_budget if isinstance(request, MessageRequest) else None
    if budget is not None and thinking is not None:
        message = "thinking and thinking_token_budget cannot both be given"
        raise InvalidRequest(message, param="thinking_token_budget")
    if thinking is not None:
        budget = budget_of(thinking, max_tokens)
    prefilled = request.messages[-1].role == "assistant"
    images = Images(model)
    messages = conversation_of(request, images)
    choice = choice_of(request.tool_choice)
    tools = tools_of(request.tools or ())
    if not messages:
        raise invalid("messages", "is empty")
    arguments = request.chat_template_kwargs
    parallel = not (request.tool_choice and request.tool_choice.disable_parallel_tool_use)
    return ChatPrompt(
        messages=msgspec.json.encode(messages),
        images=tuple(images.found),
        tools=asked_tools([one for one, _ in tools], [shown for _, shown in tools], choice, parallel=parallel),
        reasoning=Reasoning(effort=effort_of(request) or "", budget=budget),
        template_arguments=template_arguments(arguments) if given(arguments) else None,
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
    )


def conversation_of(request: MessageRequest | CountRequest, images: Images) -> list[dict[str, Any]]:
    """The conversation as chat messages; what images show is put to `images`."""
    found: list[dict[str, Any]] = []
    if request.system is not None and (system := system_text(request.system, images)):
        found.append({"role": "system", "content": system})
    for number, message in enumerate(request.messages):
        place = f"messages[{number}]"
        if message.role == "assistant":
            found.append(answered(message, place, images))
        elif message.role in ("user", "system"):
            asked(found, message, place, images)
        else:
            raise invalid(f"{place}.role", f": {message.role!r} is not one of {', '.join(ROLES)}")
    return found


def asked(found: list[dict[str, Any]], message: InputMessage, place: str, images: Images) -> None:
    """What a user says; results of tools come before it, as messages of their own."""
    if isinstance(message.content, str):
        found.append({"role": message.role, "content": message.content})
        return
    said = []
    for number, block in enumerate(message.content):
        path = f"{place}.content[{number}]"
        if block.type != "tool_result":
            said.append(part_of(block, path, images) if message.role == "user" else text_of(block, path, images))
            continue
        result = result_of(block.content or "", f"{path}.content", images)
        called = needed(block.tool_use_id, f"{path}.tool_use_id")
        found.append({"role": "tool", "tool_call_id": called, "content": result})
    if said:
        found.append({"role": message.role, "content": joined(said)})


def result_of(content: str | list[InputBlock], path: str, images: Images) -> str | list[Message]:
    """What a tool gave."""
    if isinstance(content, str):
        return content
    return joined([part_of(block, f"{path}[{number}]", images) for number, block in enumerate(content)])


def part_of(block: InputBlock, path: str, images: Images) -> str | Message:
    """A block that may be an image. Raises as `text_of` and `Images` do."""
    if block.type != "image":
        return text_of(block, path, images)
    place = f"{path}.source"
    images.check_room(path)
    source = source_of(block, place)
    if source.type == "url":
        return images.add(text_needed(source.url, f"{place}.url"), None, f"{place}.url")
    if source.type == "base64":
        media_type = text_needed(source.media_type, f"{place}.media_type")
        return images.add_base64(text_needed(source.data, f"{place}.data"), media_type, place)
    if source.type == "file":
        raise unsupported(f"{place}.type", ": this server keeps no files; give the image as base64 or url")
    raise unsupported(f"{place}.type", f": {source.type!r} is not supported; images of type base64 and url are read")


def answered(message: InputMessage, place: str, images: Images) -> dict[str, Any]:
    """What the assistant said, thought and called."""
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    said, thought, calls = [], [], []
    for number, block in enumerate(message.content):
        path = f"{place}.content[{number}]"
        match block.type:
            case "thinking":
                thought.append(needed(block.thinking, f"{path}.thinking"))
            case "redacted_thinking":
                continue  # nobody but who wrote it can read it
            case "tool_use":
                arguments = msgspec.json.encode(needed(block.input, f"{path}.input")).decode()
                function = {"name": needed(block.name, f"{path}.name"), "arguments": arguments}
                calls.append({"id": needed(block.id, f"{path}.id"), "type": "function", "function": function})
            case _:
                said.append(text_of(block, path, images))
    found: dict[str, Any] = {"role": "assistant", "content": "\n".join(said) if said or not calls else None}
    if thought:
        found["reasoning_content"] = "".join(thought)
    if calls:
        found["tool_calls"] = calls
    return found


def tools_of(tools: Sequence[ToolDefinition]) -> list[tuple[Function, dict[str, Any]]]:
    """Each tool, and how chat templates show it."""
    found = []
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if tool.type not in (None, "custom"):
            message = f": {tool.type!r} is a tool of Anthropic's servers; this one serves tools of the client's"
            raise unsupported(f"{place}.type", message)
        if not given(tool.input_schema):
            raise missing(f"{place}.input_schema")
        check_schema(tool.input_schema, f"{place}.input_schema")
        name = check_name(tool.name, f"{place}.name")
        shown: dict[str, Any] = {"name": name, "parameters": tool.input_schema}
        if tool.description is not None:
            shown["description"] = tool.description
        if tool.strict is not None:
            shown["strict"] = tool.strict
        function = Function(name=name, field=place, strict=bool(tool.strict))
        found.append((function, {"type": "function", "function": shown}))
    check_names([function for function, _ in found])
    return found


def choice_of(choice: MessageToolChoice | None) -> Choice:
    if choice is None:
        return Choice()
    if choice.type == "tool":
        name = needed(choice.name, "tool_choice.name")
        return Choice(mode="required", named=((name, "tool_choice.name"),), one=True)
    return Choice(mode={"auto": "auto", "any": "required", "none": "none"}[choice.type])


def effort_of(request: MessageRequest | CountRequest) -> str | None:
    """How much to reason, as chats say it; None: as the model's template has it."""
    effort = request.output_config.effort if request.output_config else None
    if request.thinking is not None and request.thinking.type == "disabled":
        return "none"
    if effort is None and request.thinking is not None and request.thinking.type == "enabled":
        return THINKING_EFFORT
    return HIGHEST.get(effort, effort) if effort else None


def budget_of(thinking: Thinking, max_tokens: int) -> int | None:
    if thinking.type != "enabled":
        if thinking.budget_tokens is not None:
            raise invalid("thinking.budget_tokens", "goes with thinking of type enabled")
        return None
    budget = needed(thinking.budget_tokens, "thinking.budget_tokens")
    assert isinstance(budget, int)
    if budget >= max_tokens:
        raise invalid("thinking.budget_tokens", "must be less than max_tokens")
    return budget


def grammar_of(request: MessageRequest | CountRequest) -> Grammar | None:
    """The grammar of `output_config.format`."""
    form = request.output_config.format if request.output_config else None
    if form is None:
        return None
    path = "output_config.format.schema"
    if not given(form.schema):
        raise missing(path)
    return schema(form.schema, path)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """`source` of a document or an image."""

    type: Word
    media_type: Word | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[InputBlock] | None = None


def source_of(block: InputBlock, place: str) -> Source:
    """Raises InvalidRequest naming the field that is wrong."""
    try:
        return msgspec.convert(needed(block.source, place), Source)
    except msgspec.ValidationError as error:
        raise misfit(str(error), place, Source) from error


def system_text(system: str | list[InputBlock], images: Images) -> str:
    """What `system` tells the model. A block for Anthropic's billing is for nobody here, and differs from request to
    request, which would keep the prefix from being reused."""
    if isinstance(system, str):
        return system
    found = [text_of(block, f"system[{number}]", images) for number, block in enumerate(system)]
    return "\n".join(text for text in found if not text.startswith(BILLING))


def texts(blocks: list[InputBlock], place: str, images: Images) -> str:
    return "\n".join(text_of(block, f"{place}[{number}]", images) for number, block in enumerate(blocks))


def text_of(block: InputBlock, path: str, images: Images) -> str:
    """What a block says. Raises Unsupported for one that holds no text, InvalidRequest for one that lacks something."""
    match block.type:
        case "text":
            return text_needed(block.text, f"{path}.text")
        case "document":
            return document(block, path, images)
        case "search_result":
            title, source = text_needed(block.title, f"{path}.title"), text_needed(block.source, f"{path}.source")
            said = said_by(needed(block.content, f"{path}.content"), f"{path}.content", images)
            return element("search_result", title=title, source=source, content=said)
        case "image" if images.seen:
            raise unsupported(f"{path}.type", ": images stand in messages of users and in results of tools")
    raise unread(block.type, f"{path}.type", images)


def document(block: InputBlock, path: str, images: Images) -> str:
    """A document of plain text, or of blocks of text, as the model is shown it."""
    place = f"{path}.source"
    source = source_of(block, place)
    if source.type == "text":
        if source.media_type != "text/plain":
            raise invalid(f"{place}.media_type", "must be text/plain")
        said = text_needed(source.data, f"{place}.data")
    elif source.type == "content":
        said = said_by(needed(source.content, f"{place}.content"), f"{place}.content", images)
    else:
        message = f": {source.type!r} is not supported; documents of type text and content are read"
        raise unsupported(f"{place}.type", message)
    return element("document", title=block.title, context=block.context, content=said)


def said_by(content: str | list[InputBlock], path: str, images: Images) -> str:
    return content if isinstance(content, str) else texts(content, path, images)


def element(name: str, **parts: str | None) -> str:
    """Text with what is known of it, marked as Anthropic's guide to long prompts marks documents."""
    lines = [f"<{part}>\n{text}\n</{part}>" for part, text in parts.items() if text]
    return "\n".join((f"<{name}>", *lines, f"</{name}>"))


def text_needed(value: Any, param: str) -> str:
    found = needed(value, param)
    if not isinstance(found, str):
        raise invalid(param, "must be a text", "invalid_type")
    return found
