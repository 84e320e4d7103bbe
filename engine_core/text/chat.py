"""Conversations as clients send them, checked and brought into the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.limits import MAX_JSON_DEPTH

MAX_MESSAGES = 1 << 14  # of one conversation: templates look back and ahead over all of them
SPOKEN = ("tool_calls", "reasoning_content", "reasoning")  # with one of these an assistant's message needs no content
TEXT_PARTS: Mapping[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_json(data: bytes, param: str) -> Any:
    """Raises InvalidRequest for what is not JSON or is nested too deep."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest(f"{param} must be valid JSON", param=param) from None
    except RecursionError:
        raise too_deep(param) from None
    if deeper(value, MAX_JSON_DEPTH):
        raise too_deep(param)
    return value


def too_deep(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must not be nested more than {MAX_JSON_DEPTH} deep", param=param)


def deeper(value: Any, limit: int) -> bool:
    """Whether arrays and objects in `value` are nested more than `limit` deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return bool(level)


def read_messages(data: bytes) -> list[dict[str, Any]]:
    """The messages of a chat, in OpenAI's form, with text content as one string and tool arguments as objects.

    Raises InvalidRequest naming the place.
    """
    messages = read_json(data, "messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must be a list of 1 to {MAX_MESSAGES} messages", param="messages")
    return [read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def read_message(message: Any, place: str) -> dict[str, Any]:
    """One message; `place` is how errors name it."""
    if not isinstance(message, dict):
        raise InvalidRequest(f"{place} must be an object", param=place)
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{place}.role must be a string", param=f"{place}.role")
    # Clients send answers back with every key that they know, and templates ask whether a key is there: null says as
    # much as no key, and so do no calls.
    read = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not read.get("tool_calls"):
        read.pop("tool_calls", None)
    if "content" in read:
        read["content"] = read_content(read["content"], f"{place}.content")
    elif read["role"] == "assistant":  # whose turn may have been silent
        read |= {} if any(key in read for key in SPOKEN) else {"content": None}
    else:
        raise InvalidRequest(f"{place}.content is missing", param=f"{place}.content")
    if "tool_calls" in read:
        read["tool_calls"] = read_tool_calls(read["tool_calls"], f"{place}.tool_calls")
    return read


def read_content(content: Any, place: str) -> str | None:
    """Text as it is, or a list of text parts as their lines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{place} must be a string or a list of parts", param=place)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            param = f"{place}[{index}].type"
            raise InvalidRequest(f"{param} is {kind!r:.80}; this model reads parts of type 'text' only", param=param)
        if not isinstance(part.get(field), str):
            param = f"{place}[{index}].{field}"
            raise InvalidRequest(f"{param} must be a string", param=param)
        texts.append(part[field])
    return "\n".join(texts)


def read_tool_calls(calls: Any, place: str) -> list[Any]:
    """Calls with `function.arguments` as an object: templates print it as JSON. Text that is no object stays text."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"{place} must be a list", param=place)
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            param = f"{place}[{index}].function"
            raise InvalidRequest(f"{param} must be an object", param=param)
        known = {**function, "arguments": read_arguments(function.get("arguments"), place)}
        read.append({**call, "type": call.get("type") or "function", "function": known})
    return read


def read_arguments(arguments: Any, place: str) -> Any:
    """A call's arguments, which OpenAI's form has as the text of a JSON object."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    if deeper(value, MAX_JSON_DEPTH):
        raise too_deep(place)
    return value if isinstance(value, dict) else arguments
