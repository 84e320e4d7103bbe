"""A chat's tools: which may be called, which must be, and how exactly.

Source: OpenAI API reference, "Create chat completion", `tools`, `tool_choice` and `parallel_tool_calls`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol import limits
from protocol.errors import InvalidRequest, NotBuilt
from protocol.messages import ToolUse
from services.api.decoding import check_depth, decode, given
from services.api.requests import ChatRequest, OptionalJson

FunctionName = Annotated[str, Meta(min_length=1, max_length=limits.MAX_TOOL_NAME, pattern=r"^[a-zA-Z0-9_.-]+$")]


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. `strict`: its arguments follow `parameters` exactly."""

    name: FunctionName
    description: str | None = None
    parameters: OptionalJson = msgspec.UNSET
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One of `tools`; those of type `function` are served."""

    type: Annotated[str, Meta(max_length=64)]
    function: FunctionTool | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """A function by its name."""

    name: FunctionName


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the request's tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` other than none, auto and required: the one function to call, or the tools that may be."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
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
    functions = functions_of(request.tools)
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
    return Asked(bytes(request.tools), use)


def functions_of(raw: msgspec.Raw | msgspec.UnsetType) -> list[FunctionTool]:
    """The request's functions, each with a name of its own."""
    if not given(raw):
        return []
    found: dict[str, FunctionTool] = {}
    for number, tool in enumerate(decode(raw, TOOLS, "tools")):
        place = f"tools[{number}]"
        if tool.type != "function":
            message = f"{place}.type: {tool.type!r} is not built; tools of type function are"
            raise NotBuilt(message, param=f"{place}.type")
        if tool.function is None:
            param = f"{place}.function"
            raise InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
        if tool.function.name in found:
            param = f"{place}.function.name"
            raise InvalidRequest(f"{param}: another tool has this name", param=param, code="invalid_value")
        parameters = tool.function.parameters
        if given(parameters) and not bytes(parameters).startswith((b"{", b"true", b"false")):
            param = f"{place}.function.parameters"
            raise InvalidRequest(f"{param} must be a JSON Schema", param=param, code="invalid_type")
        found[tool.function.name] = tool.function
    check_depth(decode(raw, VALUES, "tools"), "tools")
    return list(found.values())


def chosen(choice: str | ToolChoice, functions: list[FunctionTool], *, parallel: bool) -> ToolUse:
    """What may be called and what must be."""
    names = tuple(function.name for function in functions)
    strict = tuple(function.name for function in functions if function.strict)
    if isinstance(choice, str):
        return ToolUse(names=names, required=choice == "required", parallel=parallel, strict=strict)
    if choice.type == "function":
        if choice.function is None:
            raise missing("tool_choice.function")
        known(choice.function, names, "tool_choice.function.name")
        return ToolUse(names=(choice.function.name,), required=True, parallel=False, bound=True, strict=strict)
    if choice.allowed_tools is None:
        raise missing("tool_choice.allowed_tools")
    allowed = choice.allowed_tools
    for number, tool in enumerate(allowed.tools):
        known(tool.function, names, f"tool_choice.allowed_tools.tools[{number}].function.name")
    return ToolUse(
        names=tuple(dict.fromkeys(tool.function.name for tool in allowed.tools)),
        required=allowed.mode == "required",
        parallel=parallel,
        bound=True,
        strict=strict,
    )


def known(function: NamedFunction, names: tuple[str, ...], param: str) -> None:
    if function.name not in names:
        message = f"{param}: {function.name!r} is none of the request's tools"
        raise InvalidRequest(message, param=param, code="invalid_value")


def missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
