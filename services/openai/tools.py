"""A chat's tools: which may be called, which must be, and how exactly.

Source: OpenAI API reference, "Create chat completion", `tools`, `tool_choice` and `parallel_tool_calls`.

A custom tool takes text, which may have to follow a grammar. To the model it is a function with one string, `input`;
the tokenizer takes the text out of the call again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.protocol import limits
from penstock.protocol.errors import InvalidRequest, NotBuilt
from penstock.protocol.messages import CustomInput, ToolUse
from penstock.services.openai.schema import ChatRequest, OptionalJson
from penstock.services.openai.validation import check_depth, decode, given

# In Python `$` matches before a last line break too; the pattern is also told to clients, whose `$` does not.
NAME = r"^[a-zA-Z0-9_.-]+$(?!\n)"
FunctionName = Annotated[str, Meta(min_length=1, max_length=limits.MAX_TOOL_NAME, pattern=NAME)]


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. `strict`: its arguments follow `parameters` exactly."""

    name: FunctionName
    description: str | None = None
    parameters: OptionalJson = msgspec.UNSET
    strict: bool | None = None


class CustomGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """`custom.format.grammar`."""

    definition: Annotated[str, Meta(min_length=1)]
    syntax: Literal["lark", "regex"]


class CustomFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`custom.format`: any text, or text that follows a grammar."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that takes text."""

    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One of `tools`; those of type `function` and `custom` are served."""

    type: Annotated[str, Meta(max_length=64)]
    function: FunctionTool | None = None
    custom: CustomTool | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """A function by its name."""

    name: FunctionName


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool by its name."""

    type: Literal["function", "custom"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the request's tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` other than none, auto and required: the one tool to call, or the tools that may be."""

    type: Literal["function", "custom", "allowed_tools"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class Asked(msgspec.Struct, frozen=True):
    """What the tokenizer is told: `tools` for the template, `use` for the answer; None: no call is expected."""

    tools: bytes | None = None
    use: ToolUse | None = None


TOOLS = msgspec.json.Decoder(Annotated[list[Tool], Meta(max_length=limits.MAX_TOOLS)])
VALUES = msgspec.json.Decoder(list[object])
CHOICE = msgspec.json.Decoder(Literal["none", "auto", "required"] | ToolChoice)


def tools_asked(request: ChatRequest) -> Asked:
    """Raises InvalidRequest and NotBuilt naming the field. Under `none` the model is not shown the tools."""
    functions, customs = functions_of(request.tools)
    choice = decode(request.tool_choice, CHOICE, "tool_choice") if given(request.tool_choice) else "auto"
    if not functions:
        if choice not in ("none", "auto"):
            message = "tool_choice is only allowed when tools are given"
            raise InvalidRequest(message, param="tool_choice", code="invalid_value")
        return Asked()
    if choice == "none":
        return Asked()
    use = chosen(choice, functions, parallel=request.parallel_tool_calls is not False)
    assert given(request.tools)
    if not customs:
        return Asked(bytes(request.tools), use)
    return Asked(as_functions(request.tools), msgspec.structs.replace(use, customs=customs))


def functions_of(raw: msgspec.Raw | msgspec.UnsetType) -> tuple[list[FunctionTool], tuple[CustomInput, ...]]:
    """The request's tools as functions, each with a name of its own, and which of them are custom tools."""
    if not given(raw):
        return [], ()
    found: dict[str, FunctionTool] = {}
    customs: list[CustomInput] = []
    for number, tool in enumerate(decode(raw, TOOLS, "tools")):
        place = f"tools[{number}]"
        if tool.type not in ("function", "custom"):
            message = f"{place}.type: {tool.type!r} is not built; tools of type function and custom are"
            raise NotBuilt(message, param=f"{place}.type")
        given_tool = tool.function if tool.type == "function" else tool.custom
        if given_tool is None:
            raise missing(f"{place}.{tool.type}")
        if given_tool.name in found:
            param = f"{place}.{tool.type}.name"
            raise InvalidRequest(f"{param}: another tool has this name", param=param, code="invalid_value")
        if isinstance(given_tool, CustomTool):
            customs.append(custom_input(given_tool, f"{place}.custom"))
            found[given_tool.name] = FunctionTool(name=given_tool.name, strict=bool(customs[-1].syntax))
            continue
        parameters = given_tool.parameters
        if given(parameters) and not bytes(parameters).startswith((b"{", b"true", b"false")):
            param = f"{place}.function.parameters"
            raise InvalidRequest(f"{param} must be a JSON Schema", param=param, code="invalid_type")
        found[given_tool.name] = given_tool
    check_depth(decode(raw, VALUES, "tools"), "tools")
    return list(found.values()), tuple(customs)


def custom_input(tool: CustomTool, place: str) -> CustomInput:
    """What the text of a custom tool follows."""
    if tool.format is None or tool.format.type == "text":
        return CustomInput(name=tool.name)
    if tool.format.grammar is None:
        raise missing(f"{place}.format.grammar")
    return CustomInput(
        name=tool.name, syntax=tool.format.grammar.syntax, definition=tool.format.grammar.definition
    )


def as_functions(raw: msgspec.Raw) -> bytes:
    """The tools as the template shows them: custom ones as functions of one string."""
    values = decode(raw, VALUES, "tools")
    tools = decode(raw, TOOLS, "tools")
    return msgspec.json.encode(
        [value if tool.custom is None or tool.type != "custom" else function_shown(tool.custom)
         for value, tool in zip(values, tools, strict=True)]
    )  # fmt: skip


def function_shown(tool: CustomTool) -> dict[str, Any]:
    """A custom tool as a function. Its grammar is told in words too: models do better with what they know of."""
    text: dict[str, Any] = {"type": "string"}
    if tool.format is not None and tool.format.grammar is not None:
        kind = "Lark grammar" if tool.format.grammar.syntax == "lark" else "regular expression"
        text["description"] = f"Text that follows this {kind}:\n{tool.format.grammar.definition}"
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": parameters}}


def chosen(choice: str | ToolChoice, functions: list[FunctionTool], *, parallel: bool) -> ToolUse:
    """What may be called and what must be."""
    names = tuple(function.name for function in functions)
    strict = tuple(function.name for function in functions if function.strict)
    if isinstance(choice, str):
        return ToolUse(names=names, required=choice == "required", parallel=parallel, strict=strict)
    if choice.type in ("function", "custom"):
        one = named(choice, "tool_choice")
        known(one, names, f"tool_choice.{choice.type}.name")
        return ToolUse(names=(one.name,), required=True, parallel=False, bound=True, strict=strict)
    if choice.allowed_tools is None:
        raise missing("tool_choice.allowed_tools")
    allowed = choice.allowed_tools
    listed: dict[str, None] = {}
    for number, tool in enumerate(allowed.tools):
        place = f"tool_choice.allowed_tools.tools[{number}]"
        one = named(tool, place)
        known(one, names, f"{place}.{tool.type}.name")
        listed[one.name] = None
    return ToolUse(
        names=tuple(listed),
        required=allowed.mode == "required",
        parallel=parallel,
        bound=True,
        strict=strict,
    )


def named(tool: ToolChoice | NamedTool, place: str) -> NamedFunction:
    """The tool that is named, under its type."""
    found = tool.function if tool.type == "function" else tool.custom
    if found is None:
        raise missing(f"{place}.{tool.type}")
    return found


def known(function: NamedFunction, names: tuple[str, ...], param: str) -> None:
    if function.name not in names:
        message = f"{param}: {function.name!r} is none of the request's tools"
        raise InvalidRequest(message, param=param, code="invalid_value")


def missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
