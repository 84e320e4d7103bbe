"""Tools of a response: namespaces flattened, tools that run at OpenAI left out.

A function `name` in a namespace `space` is `space__name` to the model, and in the output itself again, with its
namespace. Source: OpenAI API reference, "Create a model response", `tools` and `tool_choice`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from penstock.protocol.errors import invalid, unsupported
from penstock.services.openai.responses.request import ResponseTool, ResponseToolChoice
from penstock.services.openai.tools import (
    Choice,
    CustomFormat,
    CustomGrammar,
    CustomTool,
    Function,
    check_name,
    check_names,
    check_schema,
    custom_input,
    function_shown,
)
from penstock.services.openai.validation import given, needed

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
    """A request's tools: as the model knows them, as chat templates and as the response show them, and what was left
    out."""

    functions: tuple[Function, ...] = ()
    template: tuple[dict[str, Any], ...] = ()
    names: Mapping[str, ToolName] = {}  # by the model's
    shown: tuple[Shown, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def field_names(self) -> dict[str, str]:
        """What the request calls the tools that the tokenizer names in errors."""
        return {f"tools[{number}].function": function.field for number, function in enumerate(self.functions)}


def flat(name: str, namespace: str | None) -> str:
    """What the model calls a tool."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith(SEPARATOR) else SEPARATOR) + name


def toolbox(tools: Sequence[tuple[str, ResponseTool]]) -> Toolbox:
    """Each tool comes with its place in the request. Raises InvalidRequest and Unsupported naming what is wrong."""
    functions, template, names, shown, ignored = [], [], {}, [], []
    for place, tool in tools:
        if BUILT_IN.fullmatch(tool.type):
            ignored.append(f"{place}: {tool.type} does not run here and was left out")
            continue
        if tool.type not in ("function", "custom", "namespace"):
            raise unsupported(f"{place}.type", f": {tool.type!r} is not supported; function, custom and namespace are")
        shown.append(shown_of(tool, place))
        for inner_place, inner, namespace in members(tool, place):
            name = flat(needed(inner.name, f"{inner_place}.name"), namespace)
            function, as_template = function_of(inner, check_name(name, f"{inner_place}.name"), inner_place)
            functions.append(function)
            template.append(as_template)
            kind: Literal["function", "custom"] = "custom" if inner.type == "custom" else "function"
            names[name] = ToolName(kind, inner.name or "", namespace)
    check_names(functions)
    return Toolbox(tuple(functions), tuple(template), names, tuple(shown), tuple(ignored))


def members(tool: ResponseTool, place: str) -> Iterator[tuple[str, ResponseTool, str | None]]:
    """The tool itself, or those of its namespace."""
    if tool.type != "namespace":
        yield place, tool, None
        return
    for number, inner in enumerate(tool.tools or ()):
        inner_place = f"{place}.tools[{number}]"
        if inner.type not in ("function", "custom"):
            raise unsupported(f"{inner_place}.type", f": {inner.type!r} is not supported; function and custom are")
        yield inner_place, inner, needed(tool.name, f"{place}.name")


def function_of(tool: ResponseTool, name: str, place: str) -> tuple[Function, dict[str, Any]]:
    """The tool as the model knows it, and as chat templates show it."""
    if tool.type == "custom":
        grammar = None
        if tool.format is not None and tool.format.type == "grammar":
            syntax = needed(tool.format.syntax, f"{place}.format.syntax")
            definition = needed(tool.format.definition, f"{place}.format.definition")
            if not definition:
                raise invalid(f"{place}.format.definition", "is empty")
            grammar = CustomGrammar(definition=definition, syntax=syntax)
        form = CustomFormat(type="grammar" if grammar else "text", grammar=grammar)
        custom = CustomTool(name=name, description=tool.description, format=form)
        function = Function(name=name, field=place, strict=grammar is not None, custom=custom_input(custom, place))
        return function, function_shown(custom)
    shown: dict[str, Any] = {"name": name}
    if tool.description is not None:
        shown["description"] = tool.description
    if given(tool.parameters):
        check_schema(tool.parameters, f"{place}.parameters")
        shown["parameters"] = tool.parameters
    if tool.strict is not None:
        shown["strict"] = tool.strict
    return Function(name=name, field=place, strict=bool(tool.strict)), {"type": "function", "function": shown}


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


def choice_of(choice: str | ResponseToolChoice | None, tools: Toolbox) -> Choice:
    """`tool_choice`. Raises InvalidRequest and Unsupported naming what is wrong."""
    if choice is None or isinstance(choice, str):
        return Choice(mode=choice or "auto")
    if choice.type in ("function", "custom"):
        name = flat(needed(choice.name, "tool_choice.name"), choice.namespace)
        return Choice(mode="required", named=((name, "tool_choice.name"),), one=True)
    if choice.type != "allowed_tools":
        message = f": {choice.type!r} is not supported; function, custom and allowed_tools are"
        raise unsupported("tool_choice.type", message)
    allowed: list[tuple[str, str]] = []
    for number, tool in enumerate(choice.tools or ()):
        place = f"tool_choice.tools[{number}]"
        if BUILT_IN.fullmatch(tool.type):
            continue
        if tool.type not in ("function", "custom", "namespace"):
            raise unsupported(f"{place}.type", f": {tool.type!r} is not supported; function, custom and namespace are")
        name = needed(tool.name, f"{place}.name")
        if tool.type != "namespace":
            allowed.append((flat(name, tool.namespace), f"{place}.name"))
            continue
        inside = [model_name for model_name, one in tools.names.items() if one.namespace == name]
        if not inside:
            raise invalid(f"{place}.name", f": {name!r} is none of the request's namespaces")
        allowed += [(model_name, f"{place}.name") for model_name in inside]
    if not allowed:
        raise invalid("tool_choice.tools", "names none of the request's tools")
    return Choice(mode=choice.mode or "auto", named=tuple(allowed))
