"""Items of calls that other servers and clients made: as calls of functions and their results, which templates know.

Source: OpenAI API reference, "Create a model response", `input`. What an item holds of its own result stands behind its
call. What says nothing to a model that only reads text is left out, and the response says so.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.protocol.errors import NotBuilt
from penstock.services.openai.responses.request import Item, Part

REASONS: Mapping[str, str] = {
    "item_reference": "items are not kept one by one; previous_response_id goes on from a response that is kept",
    "compaction_trigger": "this server compacts no conversations; the client can ask for a summary in words",
    "configuration_update": "the request's own fields configure it",
    "input_image": "this server reads text only",
    "input_file": "this server reads text only",
    "input_audio": "this server reads text only",
    "computer_call": "this server reads text only, and a screen's picture is none",
    "computer_call_output": "this server reads text only, and a screen's picture is none",
}
SEALED = b"penstock-reasoning-1\n"  # what begins the reasoning that this server has given out as encrypted content
# Items that say nothing to the model.
SILENT: Mapping[str, str] = {
    "mcp_list_tools": "tools of MCP servers are not called from here",
    "mcp_approval_request": "tools of MCP servers are not called from here",
    "mcp_approval_response": "tools of MCP servers are not called from here",
}
IMAGE = "[an image, which this server does not read]"


class Call(msgspec.Struct, frozen=True):
    """A call that an item tells of, and its result where the item holds it."""

    name: str
    arguments: str
    id: str
    result: str | None = None


def call_of(item: Item, place: str) -> Call | None:
    """The call of an item that is one; None where it is none."""
    name = (item.id or f"call_{place.strip('input[]')}")
    called = item.call_id or name
    match item.type:
        case "local_shell_call":
            return Call("local_shell", encoded(item.action), called)
        case "shell_call":
            return Call("shell", encoded(item.action), called)
        case "apply_patch_call":
            return Call("apply_patch", encoded(item.operation), called)
        case "web_search_call":
            return Call("web_search", encoded(item.action), called, item.status or "completed")
        case "file_search_call":
            found = [str(each.get("text") or "") for each in item.results or () if isinstance(each, dict)]
            result = "\n".join(found) or item.status or "completed"
            return Call("file_search", encoded({"queries": item.queries or []}), called, result)
        case "code_interpreter_call":
            logs = [str(each.get("logs") or IMAGE) for each in item.outputs or () if isinstance(each, dict)]
            result = "\n".join(logs) or item.status or "completed"
            return Call("code_interpreter", encoded({"code": item.code or ""}), called, result)
        case "image_generation_call":
            return Call("image_generation", encoded({"prompt": item.revised_prompt or ""}), called, IMAGE)
        case "mcp_call":
            full = f"{item.server_label}__{item.name}" if item.server_label else item.name or "mcp"
            result = item.output if isinstance(item.output, str) else encoded(item.error) if item.error else ""
            return Call(full, text_arguments(item), called, result)
        case "tool_search_call":
            return Call("tool_search", text_arguments(item), called)
        case "program":
            return Call("program", encoded({"code": item.code or ""}), called)
        case _:
            return None


def result_of(item: Item) -> str | None:
    """The text of an item that is a result, but for those whose output is text or parts; None where it is none."""
    match item.type:
        case "shell_call_output":
            parts = item.output if isinstance(item.output, list) else []
            return "\n".join(text for part in parts for text in (part.stdout, part.stderr) if text)
        case "apply_patch_call_output":
            return item.output if isinstance(item.output, str) and item.output else item.status or "completed"
        case "tool_search_output":
            return encoded([tool.name for tool in item.tools or ()])
        case "program_output":
            return item.result or ""
        case _:
            return None


def text_arguments(item: Item) -> str:
    """Arguments as JSON text, in whichever of the two forms they came."""
    return item.arguments if isinstance(item.arguments, str) else encoded(item.arguments or {})


def encoded(value: Any) -> str:
    return msgspec.json.encode({} if value is None else value).decode()


def sealed(text: str) -> str:
    """Reasoning as `encrypted_content`: clients that keep nothing else of it send it back. It hides nothing."""
    return base64.b64encode(SEALED + text.encode()).decode()


def unsealed(content: str | None) -> str | None:
    """The reasoning that this server gave out as encrypted content; None for what another one encrypted."""
    try:
        data = base64.b64decode(content or "", validate=True)
        return data.removeprefix(SEALED).decode() if data.startswith(SEALED) else None
    except (binascii.Error, ValueError):
        return None


def summary_of(item: Item) -> str:
    """What of a compaction can be read."""
    parts: list[Part] = [*(item.content if isinstance(item.content, list) else ()), *(item.summary or ())]
    said = item.content if isinstance(item.content, str) else "\n".join(part.text for part in parts if part.text)
    return said or unsealed(item.encrypted_content) or ""


def refusal(param: str, kind: str) -> NotBuilt:
    return NotBuilt(f"{param}: {kind!r} is not supported; {REASONS.get(kind, 'no such item is known')}", param=param)
