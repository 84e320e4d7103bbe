"""A chat's tools: which may be called, which must be, and how exactly.

Source: OpenAI API reference, "Create chat completion", `tools`, `tool_choice` and `parallel_tool_calls`.

A custom tool takes text, which may have to follow a grammar. To the model it is a function with one string, `input`;
the tokenizer takes the text out of the call again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.protocol import limits
from penstock.protocol.errors import invalid, unsupported
from penstock.protocol.messages import CustomInput, ToolUse
from penstock.services.openai.schema import ChatRequest, OptionalJson
from penstock.services.openai.validation import decode, given, misfit, missing

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


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as the model knows it, whatever API it came by; a custom tool is a function of one string."""

    name: str
    field: str  # of the request; errors name it
    strict: bool = False
    custom: CustomInput | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools may be called: all of them, or those `named`, each with the field that names it."""

    mode: str = "auto"  # none, auto or required
    named: tuple[tuple[str, str], ...] | None = None
    one: bool = False  # exactly one call


class Asked(msgspec.Struct, frozen=True):
    """What the tokenizer is told: `tools` for the template, `use` for the answer; None: no call is expected."""

    tools: bytes | None = None
    use: ToolUse | None = None


NO_TOOLS = Asked()
TOOLS = msgspec.json.Decoder(Annotated[list[Tool], Meta(max_length=limits.MAX_TOOLS)])
VALUES = msgspec.json.Decoder(list[object])
CHOICE = msgspec.json.Decoder(Literal["none", "auto", "required"] | ToolChoice)


def tools_asked(request: ChatRequest) -> Asked:
    """Raises InvalidRequest and Unsupported naming the field. Under `none` the model is not shown the tools."""
    functions = functions_of(request.tools)
    choice = decode(request.tool_choice, CHOICE, "tool_choice") if given(request.tool_choice) else "auto"
    if not functions or choice == "none":
        check_choice(functions, choice in ("none", "auto"))
        return NO_TOOLS
    use = tool_use(functions, choice_of(choice), parallel=request.parallel_tool_calls is not False)
    assert given(request.tools)
    return Asked(as_functions(request.tools) if use.customs else bytes(request.tools), use)


def asked(functions: Sequence[Function], template: Sequence[object], choice: Choice, *, parallel: bool) -> Asked:
    """The tools of a request that is no chat; `template` holds them as chat templates show them."""
    if not functions or choice.mode == "none":
        check_choice(functions, choice.named is None and choice.mode != "required")
        return NO_TOOLS
    return Asked(msgspec.json.encode(template), tool_use(functions, choice, parallel=parallel))


def check_choice(functions: Sequence[Function], free: bool) -> None:
    """Raise InvalidRequest for a choice among no tools."""
    if not functions and not free:
        raise invalid("tool_choice", "is only allowed when tools are given")


def functions_of(raw: msgspec.Raw | msgspec.UnsetType) -> list[Function]:
    """The tools of a chat, each with a name of its own."""
    if not given(raw):
        return []
    found: list[Function] = []
    tools = decode(raw, TOOLS, "tools")
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if tool.type not in ("function", "custom"):
            message = f": {tool.type!r} is not supported; tools of type function and custom are"
            raise unsupported(f"{place}.type", message)
        given_tool = tool.function if tool.type == "function" else tool.custom
        if given_tool is None:
            raise missing(f"{place}.{tool.type}")
        place = f"{place}.{tool.type}"
        if isinstance(given_tool, CustomTool):
            custom = custom_input(given_tool, place)
            function = Function(name=given_tool.name, field=place, strict=bool(custom.syntax), custom=custom)
        else:
            check_schema(given_tool.parameters, f"{place}.parameters")
            function = Function(name=given_tool.name, field=place, strict=bool(given_tool.strict))
        found.append(function)
    check_names(found)
    return found


def check_schema(schema: msgspec.Raw | msgspec.UnsetType, param: str) -> None:
    """Raise InvalidRequest for parameters that are neither an object nor a boolean."""
    if given(schema) and not bytes(schema).startswith((b"{", b"true", b"false")):
        raise invalid(param, "must be a JSON Schema", "invalid_type")


def check_name(name: str, param: str) -> str:
    """`name`, if a function may be called so. Raises InvalidRequest."""
    try:
        return msgspec.convert(name, FunctionName)
    except msgspec.ValidationError as error:
        raise misfit(str(error), param) from error


def check_names(functions: Sequence[Function]) -> None:
    """Raise InvalidRequest where two functions have one name."""
    names: set[str] = set()
    for function in functions:
        if function.name in names:
            raise invalid(f"{function.field}.name", ": another tool has this name")
        names.add(function.name)


def custom_input(tool: CustomTool, place: str) -> CustomInput:
    """What the text of a custom tool follows."""
    if tool.format is None or tool.format.type == "text":
        return CustomInput(name=tool.name)
    if tool.format.grammar is None:
        raise missing(f"{place}.format.grammar")
    return CustomInput(name=tool.name, syntax=tool.format.grammar.syntax, definition=tool.format.grammar.definition)


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


def choice_of(choice: str | ToolChoice) -> Choice:
    """A chat's `tool_choice`."""
    if isinstance(choice, str):
        return Choice(mode=choice)
    if choice.type in ("function", "custom"):
        return Choice(mode="required", named=(named(choice, "tool_choice"),), one=True)
    if choice.allowed_tools is None:
        raise missing("tool_choice.allowed_tools")
    place = "tool_choice.allowed_tools.tools"
    allowed = tuple(named(tool, f"{place}[{number}]") for number, tool in enumerate(choice.allowed_tools.tools))
    return Choice(mode=choice.allowed_tools.mode, named=allowed)


def named(tool: ToolChoice | NamedTool, place: str) -> tuple[str, str]:
    """The tool that is named under its type, and the field that names it."""
    found = tool.function if tool.type == "function" else tool.custom
    if found is None:
        raise missing(f"{place}.{tool.type}")
    return found.name, f"{place}.{tool.type}.name"


def tool_use(functions: Sequence[Function], choice: Choice, *, parallel: bool) -> ToolUse:
    """What may be called and what must be. Raises InvalidRequest for a choice of no tool of the request's."""
    names = tuple(function.name for function in functions)
    for name, param in choice.named or ():
        if name not in names:
            raise invalid(param, f": {name!r} is none of the request's tools")
    return ToolUse(
        names=names if choice.named is None else tuple(dict.fromkeys(name for name, _ in choice.named)),
        required=choice.mode == "required",
        parallel=parallel and not choice.one,
        bound=choice.named is not None,
        strict=tuple(function.name for function in functions if function.strict),
        customs=tuple(function.custom for function in functions if function.custom is not None),
    )
