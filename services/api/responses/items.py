"""Input items: checked one by one, as the messages that a chat template renders, and as they are listed.

Source: OpenAI API reference, "Create a model response" (`input`) and "List input items".
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from protocol.errors import InvalidRequest, NotBuilt
from services.api.responses.request import ROLES, Item, Part

Messages = list[dict[str, Any]]
REASONS: Mapping[str, str] = {
    "item_reference": "items are not kept one by one; previous_response_id goes on from a response that is kept",
    "input_image": "this server reads text only",
    "input_file": "this server reads text only",
    "input_audio": "this server reads text only",
}


def items_of(given: str | list[Item]) -> list[Item]:
    """The input as items: a text is what a user says."""
    return [Item(type="message", role="user", content=given)] if isinstance(given, str) else given


def messages_of(items: list[Item]) -> Messages:
    """The same conversation as chat messages; neighbouring items of an assistant make one.

    Raises InvalidRequest or NotBuilt naming the item that is wrong.
    """
    found: Messages = []
    for number, item in enumerate(items):
        place = f"input[{number}]"
        kind = item.type or ("message" if item.role is not None else None)
        match kind:
            case "message":
                say(found, item, place)
            case "reasoning":
                thought = "".join(part.text or "" for part in [*parts_of(item.content), *(item.summary or ())])
                if thought:
                    spoken(found, "content", "tool_calls")["reasoning_content"] = thought
            case "function_call":
                function = {
                    "name": needed(item.name, f"{place}.name"),
                    "arguments": needed(item.arguments, f"{place}.arguments"),
                }
                call = {"id": needed(item.call_id, f"{place}.call_id"), "type": "function", "function": function}
                spoken(found).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                called = needed(item.call_id, f"{place}.call_id")
                content = text_of(needed(item.output, f"{place}.output"), f"{place}.output")
                found.append({"role": "tool", "tool_call_id": called, "content": content})
            case None:
                raise missing(f"{place}.type")
            case other:
                raise refusal(f"{place}.type", other)
    for message in found:
        message.setdefault("content", None)
    return found


def say(found: Messages, item: Item, place: str) -> None:
    role = needed(item.role, f"{place}.role")
    if role not in ROLES:
        param = f"{place}.role"
        raise InvalidRequest(f"{param}: {role!r} is not one of {', '.join(ROLES)}", param=param, code="invalid_value")
    content = text_of(needed(item.content, f"{place}.content"), f"{place}.content")
    if role == "assistant":
        spoken(found, "content", "tool_calls")["content"] = content
    else:
        found.append({"role": role, "content": content})


def spoken(found: Messages, *closed_by: str) -> dict[str, Any]:
    """The assistant's message that another item of it belongs to: the last one, unless it holds one of these."""
    if not found or found[-1]["role"] != "assistant" or any(name in found[-1] for name in closed_by):
        found.append({"role": "assistant"})
    return found[-1]


def parts_of(content: str | list[Part] | None) -> list[Part]:
    return content if isinstance(content, list) else []


def text_of(content: str | list[Part], place: str) -> str:
    """Text of a content or an output; its parts are joined by line ends, as those of a chat's messages are."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        path = f"{place}[{number}]"
        if part.type in ("input_text", "output_text", "text"):
            texts.append(needed(part.text, f"{path}.text"))
        elif part.type == "refusal":
            texts.append(needed(part.refusal, f"{path}.refusal"))
        else:
            raise refusal(f"{path}.type", part.type)
    return "\n".join(texts)


def needed(value: Any, param: str) -> Any:
    """A field that the item's type asks for."""
    if value is None:
        raise missing(param)
    return value


def missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")


def refusal(param: str, kind: str) -> NotBuilt:
    return NotBuilt(f"{param}: {kind!r} is not built; {REASONS.get(kind, 'this server has no such tool')}", param=param)


def listed(items: list[Item]) -> list[dict[str, Any]]:
    """The items as GET …/input_items shows them, each with an id. They have been checked."""
    return [shown(item) for item in items]


def shown(item: Item) -> dict[str, Any]:
    kind = item.type or "message"
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}[kind]
    found: dict[str, Any] = {"type": kind, "id": item.id or f"{prefix}_{secrets.token_hex(12)}", "status": "completed"}
    match kind:
        case "message":
            own = "output_text" if item.role == "assistant" else "input_text"
            parts = [Part(type=own, text=item.content)] if isinstance(item.content, str) else parts_of(item.content)
            found |= {"role": item.role, "content": [part_shown(part) for part in parts]}
        case "function_call":
            found |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case "function_call_output":
            output = item.output
            if isinstance(output, list):
                output = [part_shown(part) for part in output]  # type: ignore[misc]
            found |= {"call_id": item.call_id, "output": output}
        case _:
            summary = [{"type": "summary_text", "text": part.text or ""} for part in item.summary or ()]
            content = [{"type": "reasoning_text", "text": part.text or ""} for part in parts_of(item.content)]
            found |= {"summary": summary, "content": content}
    return found


def part_shown(part: Part) -> dict[str, Any]:
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.refusal}
    found: dict[str, Any] = {"type": part.type, "text": part.text}
    return found | {"annotations": []} if part.type == "output_text" else found


def encoded(messages: Messages) -> bytes:
    return msgspec.json.encode(messages)
