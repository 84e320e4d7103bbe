"""Input items: checked one by one, as the messages that a chat template renders, and as they are listed.

Source: OpenAI API reference, "Create a model response" (`input`) and "List input items".
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from penstock.protocol.errors import Unsupported, invalid, unsupported
from penstock.services.openai.chat import as_function
from penstock.services.openai.images import Images, Message, joined, unread
from penstock.services.openai.responses.request import ROLES, Item, Part, ResponseTool
from penstock.services.openai.responses.tools import flat
from penstock.services.openai.schema import CustomCall
from penstock.services.openai.validation import missing, needed

T = TypeVar("T")
Messages = list[dict[str, Any]]
PREFIXES: Mapping[str, str] = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


def items_of(given: str | list[Item]) -> list[Item]:
    """The input as items: a text is what a user says."""
    return [Item(type="message", role="user", content=given)] if isinstance(given, str) else given


def tools_within(items: list[Item]) -> list[tuple[str, ResponseTool]]:
    """Tools that the conversation itself has brought, with their places: found by a search, or added on the way."""
    return [
        (f"input[{number}].tools[{at}]", tool)
        for number, item in enumerate(items)
        if item.type in ("tool_search_output", "additional_tools")
        for at, tool in enumerate(item.tools or ())
    ]


class History:
    """The conversation as chat messages. `ignored` is what of it says nothing to this server's model."""

    def __init__(self, items: list[Item], images: Images) -> None:
        """What images show is put to `images`. Raises InvalidRequest or Unsupported naming the item that is wrong."""
        self._images = images
        self.messages: Messages = []
        self.ignored: list[str] = []
        for number, item in enumerate(items):
            self._take(item, f"input[{number}]")
        for message in self.messages:
            message.setdefault("content", None)

    def _take(self, item: Item, place: str) -> None:
        match item.type or ("message" if item.role is not None else None):
            case "message":
                say(self.messages, item, place, self._images)
            case "reasoning":
                self._think(item, place)
            case "function_call":
                name = flat(needed(item.name, f"{place}.name"), item.namespace)
                needed(item.arguments, f"{place}.arguments")
                call_id = needed(item.call_id, f"{place}.call_id")
                self._call(function_call(call_id, name, text_arguments(item)))
            case "custom_tool_call":
                name = flat(needed(item.name, f"{place}.name"), item.namespace)
                custom = CustomCall(name=name, input=needed(item.input, f"{place}.input"))
                self._call(as_function(needed(item.call_id, f"{place}.call_id"), custom))
            case "function_call_output" | "custom_tool_call_output":
                called = needed(item.call_id, f"{place}.call_id")
                self._result(called, self._output(item, f"{place}.output"))
            case "local_shell_call_output":
                called = item.call_id or needed(item.id, f"{place}.id")
                self._result(called, self._output(item, f"{place}.output"))
            case "compaction" | "compaction_summary" | "context_compaction":
                self._compaction(item, place)
            case "additional_tools":
                pass  # see `tools_within`
            case None:
                raise missing(f"{place}.type")
            case kind if kind in SILENT:
                self.ignored.append(f"{place}: {kind} was left out: {SILENT[kind]}")
            case kind:
                self._other(item, place, kind)

    def _other(self, item: Item, place: str, kind: str) -> None:
        """A call that another server made, or what came of one."""
        if (call := call_of(item, place)) is not None:
            self._call(function_call(call.id, call.name, call.arguments))
            if call.result is not None:
                self._result(call.id, call.result)
        elif (result := result_of(item)) is not None:
            self._result(needed(item.call_id, f"{place}.call_id"), result)
        else:
            raise refusal(f"{place}.type", kind)

    def _think(self, item: Item, place: str) -> None:
        said = "".join(part.text or "" for part in parts_of(item.content))
        thought = said or unsealed(item.encrypted_content)
        if thought is None:
            thought = "".join(part.text or "" for part in item.summary or ())
            if item.encrypted_content and not thought:
                self.ignored.append(f"{place}: reasoning was left out: another server encrypted it")
        if thought:
            spoken(self.messages, "content", "tool_calls")["reasoning_content"] = thought

    def _compaction(self, item: Item, place: str) -> None:
        if summary := summary_of(item):
            self.messages.append({"role": "user", "content": summary})
        else:
            self.ignored.append(f"{place}: a compaction was left out: another server encrypted it")

    def _call(self, call: dict[str, Any]) -> None:
        spoken(self.messages).setdefault("tool_calls", []).append(call)

    def _result(self, call_id: str, content: str | list[Message]) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _output(self, item: Item, place: str) -> str | list[Message]:
        """What a tool gave. The model is told of what it cannot read: it asked for it."""
        output: str | list[Part] | dict[str, Any] = needed(item.output, place)
        if isinstance(output, dict):
            raise invalid(place, "must be a string or a list of parts", "invalid_type")
        if not isinstance(output, list):
            return output
        told = {"input_file": FILE} if self._images.seen else {"input_image": IMAGE, "input_file": FILE}
        left_out = [part for part in output if part.type in told]
        if left_out:
            self.ignored.append(f"{place}: {left_out[0].type} was left out: this server reads {self._images.read} only")
        shown = [Part(type="text", text=told[part.type]) if part.type in told else part for part in output]
        return content_of(shown, place, self._images)


def say(found: Messages, item: Item, place: str, images: Images) -> None:
    role = needed(item.role, f"{place}.role")
    if role not in ROLES:
        raise invalid(f"{place}.role", f": {role!r} is not one of {', '.join(ROLES)}")
    content = content_of(needed(item.content, f"{place}.content"), f"{place}.content", images, role)
    if role == "assistant":
        spoken(found, "content", "tool_calls")["content"] = content
    else:
        found.append({"role": role, "content": content})


def spoken(found: Messages, *closed_by: str) -> dict[str, Any]:
    """The assistant's message that another item of it belongs to: the last one, unless it holds one of these."""
    if not found or found[-1]["role"] != "assistant" or any(name in found[-1] for name in closed_by):
        found.append({"role": "assistant"})
    return found[-1]


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in the assistant's message, as chat templates read it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parts_of(content: str | list[Part] | None) -> list[Part]:
    return content if isinstance(content, list) else []


def content_of(content: str | list[Part], place: str, images: Images, role: str = "user") -> str | list[Message]:
    """A content or an output as templates read it: parts of text are joined by line ends, as those of a chat's messages
    are, unless there is an image among them."""
    if isinstance(content, str):
        return content
    texts: list[str | Message] = []
    for number, part in enumerate(content):
        path = f"{place}[{number}]"
        if part.type in ("input_text", "output_text", "text"):
            texts.append(needed(part.text, f"{path}.text"))
        elif part.type == "refusal":
            texts.append(needed(part.refusal, f"{path}.refusal"))
        elif part.type == "input_image" and role == "user":
            texts.append(image_of(part, path, images))
        elif part.type == "input_image":
            raise unsupported(path, ": images stand in messages of users and in outputs of tools")
        elif part.type in ("input_file", "input_audio", "input_video"):
            raise unread(part.type, f"{path}.type", images)
        elif not part.type:
            raise missing(f"{path}.type")
        else:
            raise refusal(f"{path}.type", part.type)
    return joined(texts)


def image_of(part: Part, path: str, images: Images) -> Message:
    images.check_room(path)
    if part.file_id is not None:
        raise unsupported(f"{path}.file_id", ": this server keeps no files; give the image as image_url")
    return images.add(needed(part.image_url, f"{path}.image_url"), part.detail, f"{path}.image_url")


def without_data(items: list[Item]) -> list[Item]:
    """The items without the bytes of their images: those are kept with the conversation."""
    return [msgspec.structs.replace(item, content=hollow(item.content), output=hollow(item.output)) for item in items]


def hollow(content: T) -> T | list[Part]:
    if not isinstance(content, list):
        return content
    return [
        msgspec.structs.replace(part, image_url=None) if (part.image_url or "")[:5].lower() == "data:" else part
        for part in content
    ]


def listed(items: list[Item]) -> list[dict[str, Any]]:
    """The items as GET …/input_items shows them, each with an id. They have been checked."""
    return [shown(item) for item in items]


def shown(item: Item) -> dict[str, Any]:
    kind = item.type or "message"
    prefix = PREFIXES.get(kind, "item")
    found: dict[str, Any] = {"type": kind, "id": item.id or f"{prefix}_{secrets.token_hex(12)}", "status": "completed"}
    match kind:
        case "message":
            own = "output_text" if item.role == "assistant" else "input_text"
            parts = [Part(type=own, text=item.content)] if isinstance(item.content, str) else parts_of(item.content)
            found |= {"role": item.role, "content": [part_shown(part) for part in parts]}
        case "function_call":
            found |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            found |= {} if item.namespace is None else {"namespace": item.namespace}
        case "function_call_output":
            output = item.output
            if isinstance(output, list):
                output = [part_shown(part) for part in output]  # type: ignore[misc]
            found |= {"call_id": item.call_id, "output": output}
        case "reasoning":
            summary = [{"type": "summary_text", "text": part.text or ""} for part in item.summary or ()]
            content = [{"type": "reasoning_text", "text": part.text or ""} for part in parts_of(item.content)]
            found |= {"summary": summary, "content": content}
        case _:  # as it was given
            given = {name: value for name, value in msgspec.to_builtins(item).items() if value is not None}
            found |= given
    return found


def part_shown(part: Part) -> dict[str, Any]:
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part.refusal}
    if part.type == "input_image":
        return {"type": part.type, "image_url": part.image_url, "file_id": None, "detail": part.detail or "auto"}
    found: dict[str, Any] = {"type": part.type, "text": part.text}
    return found | {"annotations": []} if part.type == "output_text" else found


def encoded(messages: Messages) -> bytes:
    return msgspec.json.encode(messages)


REASONS: Mapping[str, str] = {
    "item_reference": "items are not kept one by one; previous_response_id goes on from a response that is kept",
    "compaction_trigger": "this server compacts no conversations; the client can ask for a summary in words",
    "configuration_update": "the request's own fields configure it",
    "computer_call": "no model here is told how to use a screen",
    "computer_call_output": "no model here is told how to use a screen",
}
SEALED = b"penstock-reasoning-1\n"  # what begins the reasoning that this server has given out as encrypted content
# Items that say nothing to the model.
SILENT: Mapping[str, str] = {
    "mcp_list_tools": "tools of MCP servers are not called from here",
    "mcp_approval_request": "tools of MCP servers are not called from here",
    "mcp_approval_response": "tools of MCP servers are not called from here",
}
IMAGE = "[an image, which this server does not read]"
FILE = "[a file, which this server does not read]"


class Call(msgspec.Struct, frozen=True):
    """A call that an item tells of, and its result where the item holds it."""

    name: str
    arguments: str
    id: str
    result: str | None = None


def call_of(item: Item, place: str) -> Call | None:
    """The call of an item that is one; None where it is none."""
    name = item.id or f"call_{place.strip('input[]')}"
    called = item.call_id or name
    match item.type:
        case "local_shell_call":
            return Call("local_shell", json_text(item.action), called)
        case "shell_call":
            return Call("shell", json_text(item.action), called)
        case "apply_patch_call":
            return Call("apply_patch", json_text(item.operation), called)
        case "web_search_call":
            return Call("web_search", json_text(item.action), called, item.status or "completed")
        case "file_search_call":
            found = [str(each.get("text") or "") for each in item.results or () if isinstance(each, dict)]
            result = "\n".join(found) or item.status or "completed"
            return Call("file_search", json_text({"queries": item.queries or []}), called, result)
        case "code_interpreter_call":
            logs = [str(each.get("logs") or IMAGE) for each in item.outputs or () if isinstance(each, dict)]
            result = "\n".join(logs) or item.status or "completed"
            return Call("code_interpreter", json_text({"code": item.code or ""}), called, result)
        case "image_generation_call":
            return Call("image_generation", json_text({"prompt": item.revised_prompt or ""}), called, IMAGE)
        case "mcp_call":
            full = f"{item.server_label}__{item.name}" if item.server_label else item.name or "mcp"
            result = item.output if isinstance(item.output, str) else json_text(item.error) if item.error else ""
            return Call(full, text_arguments(item), called, result)
        case "tool_search_call":
            return Call("tool_search", text_arguments(item), called)
        case "program":
            return Call("program", json_text({"code": item.code or ""}), called)
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
            return json_text([tool.name for tool in item.tools or ()])
        case "program_output":
            return item.result or ""
        case _:
            return None


def text_arguments(item: Item) -> str:
    """Arguments as JSON text, in whichever of the two forms they came."""
    return item.arguments if isinstance(item.arguments, str) else json_text(item.arguments or {})


def json_text(value: Any) -> str:
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


def refusal(param: str, kind: str) -> Unsupported:
    return unsupported(param, f": {kind!r} is not supported; {REASONS.get(kind, 'no such item is known')}")
