"""Tools of a response as those of a chat: namespaces flattened, tools that run at OpenAI left out.

A function `name` in a namespace `space` is `space__name` to the model, and in the output itself again, with its
namespace. Source: OpenAI API reference, "Create a model response", `tools` and `tool_choice`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from penstock.protocol.errors import InvalidRequest, NotBuilt
from penstock.services.openai.field_aliases import Term
from penstock.services.openai.responses.request import ResponseTool, ResponseToolChoice
from penstock.services.openai.validation import given

SEPARATOR = "__"
# Types of tools that run at OpenAI, or in its client by an agreement between both. Some have a date behind them.
BUILT_IN = re.compile(
    r"(web_search|web_search_preview|file_search|code_interpreter|image_generation|local_shell|shell|apply_patch|mcp"
    r"|computer|computer_use|computer_use_preview|tool_search|programmatic_tool_calling)(_\d{4}_\d{2}_\d{2})?"
)


class ToolName(msgspec.Struct, frozen=True):
    """What a tool is called in the API."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ToolShown(msgspec.Struct, frozen=True, kw_only=True, tag="function"):
    """One of the request's functions."""

    name: str
    description: str | None
    parameters: msgspec.Raw
    strict: bool


class FormatShown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`format` of a custom tool."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class CustomShown(msgspec.Struct, frozen=True, kw_only=True, tag="custom"):
    """One of the request's custom tools."""

    name: str
    description: str | None
    format: FormatShown


class NamespaceShown(msgspec.Struct, frozen=True, kw_only=True, tag="namespace"):
    """One of the request's namespaces."""

    name: str
    description: str
    tools: tuple[ToolShown | CustomShown, ...]


Shown = ToolShown | CustomShown | NamespaceShown


class Toolbox(msgspec.Struct, frozen=True):
    """A request's tools: for the chat, by the model's names, as the response shows them, and what was left out."""

    chat: tuple[dict[str, Any], ...] = ()
    names: Mapping[str, ToolName] = {}
    shown: tuple[Shown, ...] = ()
    ignored: tuple[str, ...] = ()
    places: tuple[str, ...] = ()  # of the chat's tools in the request

    def terms(self) -> tuple[Term, ...]:
        """What a chat's error calls each tool, in the request's words."""
        return tuple(
            Term(re.compile(rf"tools\[{number}\](\.(function|custom)\b)?"), place)
            for number, place in enumerate(self.places)
        )


def flat(name: str, namespace: str | None) -> str:
    """What the model calls a tool."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith(SEPARATOR) else SEPARATOR) + name


def toolbox(tools: Sequence[tuple[str, ResponseTool]]) -> Toolbox:
    """Each tool comes with its place in the request. Raises InvalidRequest and NotBuilt naming what is wrong."""
    chat, names, shown, ignored, places = [], {}, [], [], []
    for place, tool in tools:
        if BUILT_IN.fullmatch(tool.type):
            ignored.append(f"{place}: {tool.type} does not run here and was left out")
            continue
        if tool.type not in ("function", "custom", "namespace"):
            message = f"{place}.type: {tool.type!r} is not supported; function, custom and namespace are"
            raise NotBuilt(message, param=f"{place}.type")
        shown.append(shown_of(tool, place))
        for inner_place, inner, namespace in members(tool, place):
            name = flat(needed(inner.name, f"{inner_place}.name"), namespace)
            chat.append(chat_tool(inner, name, inner_place))
            kind: Literal["function", "custom"] = "custom" if inner.type == "custom" else "function"
            names[name] = ToolName(kind, inner.name or "", namespace)
            places.append(inner_place)
    return Toolbox(tuple(chat), names, tuple(shown), tuple(ignored), tuple(places))


def members(tool: ResponseTool, place: str) -> Iterator[tuple[str, ResponseTool, str | None]]:
    """The tool itself, or those of its namespace."""
    if tool.type != "namespace":
        yield place, tool, None
        return
    for number, inner in enumerate(tool.tools or ()):
        inner_place = f"{place}.tools[{number}]"
        if inner.type not in ("function", "custom"):
            message = f"{inner_place}.type: {inner.type!r} is not supported; function and custom are"
            raise NotBuilt(message, param=f"{inner_place}.type")
        yield inner_place, inner, needed(tool.name, f"{place}.name")


def chat_tool(tool: ResponseTool, name: str, place: str) -> dict[str, Any]:
    """The tool as one of a chat."""
    found: dict[str, Any] = {"name": name}
    if tool.description is not None:
        found["description"] = tool.description
    if tool.type == "custom":
        form = tool.format
        if form is not None and form.type == "grammar":
            grammar = {"syntax": needed(form.syntax, f"{place}.format.syntax"),
                       "definition": needed(form.definition, f"{place}.format.definition")}  # fmt: skip
            found["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": "custom", "custom": found}
    if given(tool.parameters):
        found["parameters"] = tool.parameters
    if tool.strict is not None:
        found["strict"] = tool.strict
    return {"type": "function", "function": found}


def shown_of(tool: ResponseTool, place: str) -> Shown:
    if tool.type == "namespace":
        inner = tuple(one_shown(each, where) for where, each, _ in members(tool, place))
        name = needed(tool.name, f"{place}.name")
        return NamespaceShown(name=name, description=tool.description or "", tools=inner)
    return one_shown(tool, place)


def one_shown(tool: ResponseTool, place: str) -> ToolShown | CustomShown:
    name = needed(tool.name, f"{place}.name")
    if tool.type == "custom":
        form = tool.format
        shown = FormatShown(type="text")
        if form is not None and form.type == "grammar":
            shown = FormatShown(type="grammar", syntax=form.syntax, definition=form.definition)
        return CustomShown(name=name, description=tool.description, format=shown)
    parameters = tool.parameters if given(tool.parameters) else msgspec.Raw(b"null")
    return ToolShown(name=name, description=tool.description, parameters=parameters, strict=bool(tool.strict))


def choice_of(choice: str | ResponseToolChoice | None, tools: Toolbox) -> msgspec.Raw | msgspec.UnsetType:
    """`tool_choice` as a chat has it."""
    if choice is None:
        return msgspec.UNSET
    if isinstance(choice, str):
        return raw("auto" if choice == "auto" and not tools.chat else choice)
    if choice.type in ("function", "custom"):
        name = flat(needed(choice.name, "tool_choice.name"), choice.namespace)
        return raw({"type": choice.type, choice.type: {"name": name}})
    if choice.type != "allowed_tools":
        message = f"tool_choice.type: {choice.type!r} is not supported; function, custom and allowed_tools are"
        raise NotBuilt(message, param="tool_choice.type")
    allowed: list[dict[str, Any]] = []
    for number, tool in enumerate(choice.tools or ()):
        place = f"tool_choice.tools[{number}]"
        if BUILT_IN.fullmatch(tool.type):
            continue
        if tool.type == "namespace":
            space = needed(tool.name, f"{place}.name")
            inside = [(flat_name, one) for flat_name, one in tools.names.items() if one.namespace == space]
            if not inside:
                message = f"{place}.name: {space!r} is none of the request's namespaces"
                raise InvalidRequest(message, param=f"{place}.name", code="invalid_value")
            allowed += [{"type": one.kind, one.kind: {"name": flat_name}} for flat_name, one in inside]
        elif tool.type in ("function", "custom"):
            name = flat(needed(tool.name, f"{place}.name"), tool.namespace)
            allowed.append({"type": tool.type, tool.type: {"name": name}})
        else:
            message = f"{place}.type: {tool.type!r} is not supported; function, custom and namespace are"
            raise NotBuilt(message, param=f"{place}.type")
    return raw({"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": allowed}})


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def needed(value: Any, param: str) -> Any:
    """A field that the type asks for."""
    if value is None:
        raise InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
    return value
