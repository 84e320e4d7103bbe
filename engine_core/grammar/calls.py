"""Tool calls as structural tags, in the spelling that the model was taught."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.engine_core.parsers.dialect import ARGS, CallFormat, Dialect
from penstock.engine_core.parsers.mistral import MARKER as TOOL_CALLS
from penstock.engine_core.parsers.values import kinds_of
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import CustomInput

Format = dict[str, Any]  # of a structural tag
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# What a schema may say of an object that has no form of its own: its members are written one by one.
OBJECT_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "title",
     "description")
)  # fmt: skip
# What it may say of a string that is written without quotes.
PLAIN_KEYS = frozenset(
    ("type", "description", "title", "default", "examples", "$defs", "definitions", "$comment", "deprecated")
)


class Function(msgspec.Struct, frozen=True):
    """A tool that may be called."""

    name: str
    parameters: Any  # JSON Schema
    strict: bool  # its arguments follow their schema exactly, else as far as that can be held
    place: str  # how errors name it
    custom: CustomInput | None = None  # its only argument, `input`, follows this


def read_functions(
    tools: Sequence[Any], names: Sequence[str], strict: Sequence[str], customs: Sequence[CustomInput] = ()
) -> list[Function]:
    """The functions of these names among a request's tools, in the order of the tools."""
    found = []
    inputs = {custom.name: custom for custom in customs if custom.syntax}
    for index, tool in enumerate(tools):
        function = tool["function"]
        if function["name"] in names:
            parameters = function.get("parameters")
            schema = NO_PARAMETERS if parameters is None else parameters
            name = function["name"]
            place = f"tools[{index}].function"
            found.append(Function(name, schema, name in strict, place, inputs.get(name)))
    return found


def calls_alone(dialect: Dialect, functions: Sequence[Function], *, several: bool) -> Format:
    """An output that is one call, or several."""
    match dialect.calls:
        case CallFormat.HERMES:
            return joined([hermes(function) for function in functions], "\n", several)
        case CallFormat.LLAMA:
            return joined([json_call(function, "parameters") for function in functions], "; ", several)
        case CallFormat.MISTRAL if dialect.listed:
            tags = [json_call(function, "arguments") for function in functions]
            return sequence(marker(TOOL_CALLS), text(" ["), joined(tags, ", ", several), text("]"))
        case CallFormat.MISTRAL:
            return joined([mistral(function) for function in functions], "", several)
        case CallFormat.PYTHONIC:
            return sequence(text("["), joined([pythonic(function) for function in functions], ", ", several), text("]"))
        case CallFormat.QWEN3_CODER | CallFormat.GLM45:
            return joined([tagged(function, dialect.calls) for function in functions], "\n", several)
        case None:
            raise AssertionError("a request with tools for a model whose calls nobody can read is refused")


def calls_in_text(dialect: Dialect, functions: Sequence[Function], *, several: bool) -> Format:
    """Text in which calls may stand, or that is calls, wherever this model may write them."""
    match dialect.calls:
        case CallFormat.HERMES:
            return triggered("<tool_call>", [hermes(function) for function in functions], several)
        case CallFormat.QWEN3_CODER | CallFormat.GLM45:
            return triggered("<tool_call>", [tagged(function, dialect.calls) for function in functions], several)
        case CallFormat.MISTRAL if not dialect.listed:
            return triggered(TOOL_CALLS, [mistral(function) for function in functions], several)
        case _:  # calls are all of the output; other text must not look like one
            other = {"type": "regex", "pattern": r"([^\s\[{](?s:.*))?"}
            return either(calls_alone(dialect, functions, several=several), other)


def hermes(function: Function) -> Format:
    return tag(f'<tool_call>\n{{"name": {quoted(function)}, "arguments": ', schema(function), "}\n</tool_call>")


def json_call(function: Function, key: str) -> Format:
    return tag(f'{{"name": {quoted(function)}, "{key}": ', schema(function), "}")


def mistral(function: Function) -> Format:
    return tag(f"{TOOL_CALLS}{function.name}{ARGS}", schema(function), "")


def pythonic(function: Function) -> Format:
    """Keyword arguments, the required ones first. Raises InvalidRequest for a schema that says more than that."""
    found = one_by_one(function, "in Python")
    properties, required, optional = found.properties, found.required, found.optional

    def argument(name: str, before: str) -> Format:
        value = value_of(properties[name], lenient=not function.strict)
        if function.custom is not None:
            value = input_of(function.custom, quoted=True)
        return sequence(text(f"{before}{name}="), value)

    first = [argument(name, ", " if at else "") for at, name in enumerate(required)]
    rest = [{"type": "optional", "content": argument(name, ", ")} for name in optional]
    if required or not optional:
        arguments = sequence(*first, *rest)
    else:  # whichever comes first has no comma
        chains = [sequence(argument(name, ""), *rest[at + 1 :]) for at, name in enumerate(optional)]
        arguments = {"type": "optional", "content": either(*chains)}
    return tag(f"{function.name}(", arguments, ")")


def tagged(function: Function, calls: CallFormat) -> Format:
    """An element for each argument, the required ones first. Raises InvalidRequest for a schema that says more."""
    found = one_by_one(function, "in elements")
    if calls is CallFormat.QWEN3_CODER:
        begin, end = f"<tool_call>\n<function={function.name}>\n", "</function>\n</tool_call>"
        around = ("<parameter=", ">\n", "\n</parameter>\n")
    else:
        begin, end = f"<tool_call>{function.name}\n", "</tool_call>"
        around = ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")

    def argument(name: str) -> Format:
        value = element(function, name, found.properties[name], *around[1:])
        return sequence(marker(around[0]), text(name), value)

    arguments = [argument(name) for name in found.required]
    arguments += [{"type": "optional", "content": argument(name)} for name in found.optional]
    return tag(begin, sequence(*arguments), end)


def element(function: Function, name: str, value: Any, begin: str, end: str) -> Format:
    """An argument's value; strings stand as they are. Raises InvalidRequest for what only holds for quoted ones."""
    if function.custom is not None:
        return tag(begin, input_of(function.custom, quoted=False), end)
    kinds = kinds_of(value)
    words = value.get("enum") if isinstance(value, dict) else None
    if kinds and "string" not in kinds:
        return tag(begin, value_of(value, lenient=not function.strict), end)
    if kinds == {"string"} and words:
        return tag(begin, either(*(text(word) for word in words)), end)
    told = value.keys() - PLAIN_KEYS if isinstance(value, dict) else frozenset()
    if function.strict and told:
        place = f"{function.place}.parameters"
        message = f"{place}: {min(told)} of {name} cannot be held where strings have no quotes"
        raise InvalidRequest(message, param=place, code="unsupported_schema")
    return tag(begin, {"type": "any_text"}, end)


class Parameters(msgspec.Struct, frozen=True):
    """A function's, each with its schema, for calls that write them one by one."""

    properties: dict[str, Any]
    required: list[str]
    optional: list[str]


def one_by_one(function: Function, how: str) -> Parameters:
    """Raises InvalidRequest for a strict schema that says more of its object than which properties it has."""
    found = function.parameters if isinstance(function.parameters, dict) else {}
    if function.strict and (strange := sorted(found.keys() - OBJECT_KEYS)):
        place = f"{function.place}.parameters"
        message = f"{place}: {strange[0]} cannot be held in a call as this model writes it, {how}"
        raise InvalidRequest(message, param=place, code="unsupported_schema")
    shared = {key: found[key] for key in ("$defs", "definitions") if key in found}
    properties = {
        name: {**shared, **value} if isinstance(value, dict) else value
        for name, value in (found.get("properties") or {}).items()
    }
    required = [name for name in properties if name in found.get("required", ())]
    return Parameters(properties, required, [name for name in properties if name not in required])


def schema(function: Function) -> Format:
    if function.custom is not None:
        return sequence(text('{"input": '), input_of(function.custom, quoted=True), text("}"))
    return value_of(function.parameters, lenient=not function.strict)


def input_of(custom: CustomInput, *, quoted: bool) -> Format:
    """What a custom tool's input follows, as it is or as a JSON string."""
    found: Format = {"type": "regex", "pattern": custom.definition}
    if custom.syntax == "lark":
        found = {"type": "grammar", "grammar": custom.definition}
    return {**found, "quoted": True} if quoted else found


def quoted(function: Function) -> str:
    return json.dumps(function.name, ensure_ascii=False)


def value_of(of: Any, *, lenient: bool) -> Format:
    return {"type": "json_schema", "json_schema": of, "lenient": lenient}


def text(value: str) -> Format:
    """These characters, whatever they read like."""
    return {"type": "const_string", "value": value}


def marker(value: str) -> Format:
    """A text in which control tokens stand for themselves."""
    return tag(value, text(""), "")


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements) or [text("")]}


def either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def joined(tags: list[Format], separator: str, several: bool) -> Format:
    return {
        "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True,
        "stop_after_first": not several,
    }  # fmt: skip


def triggered(trigger: str, tags: list[Format], several: bool) -> Format:
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not several}
