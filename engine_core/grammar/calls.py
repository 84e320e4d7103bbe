"""Tool calls as structural tags, in the spelling that the model was taught."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import msgspec

from penstock.engine_core.parsers import harmony
from penstock.engine_core.parsers.dialect import Dialect
from penstock.engine_core.parsers.formats import FORMS, MISTRAL_LIST, Spelling
from penstock.engine_core.parsers.values import TEXT, kinds_of
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

SCALARS = frozenset(("boolean", "integer", "null", "number"))


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
    spelling = spelling_of(dialect)
    calls = [call(function, spelling) for function in functions]
    body = joined(calls, spelling.between, several and not dialect.channels)  # the end of a message to a tool is theirs
    around = [marker(each) for each in (spelling.first, spelling.last)] if spelling.first else []
    return sequence(around[0], body, around[1]) if around else body


def calls_in_text(dialect: Dialect, functions: Sequence[Function], *, several: bool) -> Format:
    """Text in which calls may stand, or that is calls, wherever this model may write them."""
    spelling = spelling_of(dialect)
    alone = calls_alone(dialect, functions, several=several)
    if dialect.channels:
        said = tag(f"{harmony.CHANNEL}commentary{harmony.MESSAGE}", {"type": "any_text"}, harmony.END)
        before = {"type": "optional", "content": sequence(said, marker(BEGIN_MESSAGE))}
        return either(sequence(before, alone), answered({"type": "any_text"}))
    if not spelling.trigger:  # calls are all of the output; other text must not look like one
        return either(alone, {"type": "regex", "pattern": r"([^\s\[{](?s:.*))?"})
    calls = [call(function, spelling) for function in functions]
    if spelling.first:
        calls = [tag(spelling.first, joined(calls, spelling.between, several), spelling.last)]
    return triggered(spelling.trigger, calls, several)


BEGIN_MESSAGE = f"{harmony.START}assistant"  # of a further one; the prompt has begun the first


def answered(content: Format) -> Format:
    """Content as the final message of an output on channels."""
    return sequence(marker(f"{harmony.CHANNEL}final{harmony.MESSAGE}"), content)


def spelling_of(dialect: Dialect) -> Spelling:
    assert dialect.calls is not None, "a request with tools for a model whose calls nobody can read is refused"
    return MISTRAL_LIST if dialect.listed else FORMS[dialect.calls].spelling


def call(function: Function, spelling: Spelling) -> Format:
    """One call. Raises InvalidRequest for a strict schema that says what its notation cannot hold."""
    arguments = schema(function) if spelling.argument is None else one_by_one(function, spelling, spelling.argument)
    begin, index, rest = [
        part.replace("{name}", function.name).replace("{quoted}", json.dumps(function.name, ensure_ascii=False))
        for part in spelling.begin.partition("{index}")
    ]
    if index:
        arguments = sequence({"type": "regex", "pattern": "[0-9]{1,4}"}, marker(rest), arguments)
    return tag(begin, arguments, spelling.end)


def one_by_one(function: Function, spelling: Spelling, around: tuple[str, str, str]) -> Format:
    """Arguments each with its name. Raises InvalidRequest as `call`."""

    def argument(name: str, of: Any) -> Format:
        before, begin, end = around
        key = sequence(marker(before), text(name)) if before else text(name)
        if spelling.quote is None:
            return sequence(key, element(function, name, of, begin, end))
        value = marked_value(function, name, of, spelling.quote)
        return sequence(key, text(begin), value)

    return members(read_parameters(function), argument, spelling.comma)


def members(found: Parameters, write: Callable[[str, Any], Format], comma: str) -> Format:
    """Members of an object, the required ones first."""

    def member(name: str, before: str) -> Format:
        written = write(name, found.properties[name])
        return sequence(text(before), written) if before else written

    first = [member(name, comma if at else "") for at, name in enumerate(found.required)]
    rest = [optional(member(name, comma)) for name in found.optional]
    if found.required or not found.optional or not comma:
        return sequence(*first, *rest)
    # Whichever comes first has no comma.
    chains = [sequence(member(name, ""), *rest[at + 1 :]) for at, name in enumerate(found.optional)]
    return optional(either(*chains))


def element(function: Function, name: str, of: Any, begin: str, end: str) -> Format:
    """An argument's value; strings stand as they are. Raises InvalidRequest for what only holds for quoted ones."""
    string, other = [begin.replace("{string}", flag) for flag in ("true", "false")]
    if function.custom is not None:
        return tag(string, input_of(function.custom, quoted=False), end)
    kinds = kinds_of(of)
    words = of.get("enum") if isinstance(of, dict) else None
    if kinds and "string" not in kinds:
        return tag(other, value_of(of, lenient=not function.strict), end)
    if kinds == TEXT and words:
        return tag(string, either(*(text(word) for word in words)), end)
    check_plain(function, name, of, PLAIN_KEYS, "where strings have no quotes")
    plain = tag(string, {"type": "any_text"}, end)
    if string == other or kinds == TEXT:
        return plain
    rest = {"type": sorted(kinds - TEXT) or ["array", "boolean", "null", "number", "object"]}
    return either(plain, tag(other, value_of(rest, lenient=not function.strict), end))


def marked_value(function: Function, name: str, of: Any, quote: str) -> Format:
    """A value whose strings stand between two of these marks. Raises InvalidRequest for a strict schema that says what
    such a value cannot be held to."""
    if quote == '"':
        given = function.custom is not None and input_of(function.custom, quoted=True)
        return given or value_of(of, lenient=not function.strict)
    if function.custom is not None:
        return tag(quote, input_of(function.custom, quoted=False), quote)
    found = of if isinstance(of, dict) else {}
    kinds = kinds_of(found)
    words = found.get("enum", [found["const"]] if "const" in found else [])
    if words and not any(isinstance(word, dict | list) for word in words):
        told = [each if isinstance(each, str) else value_of({"const": each}, lenient=False) for each in words]
        return either(*(tag(quote, text(each), quote) if isinstance(each, str) else each for each in told))
    if kinds == {"object"} and found.get("properties"):
        check_plain(function, name, found, OBJECT_KEYS | PLAIN_KEYS, "in the model's own notation")
        inner = parameters_of(found)
        body = members(
            inner, lambda key, part: sequence(text(key + ":"), marked_value(function, key, part, quote)), ","
        )
        return sequence(text("{"), body, text("}"))
    if kinds == {"array"} and isinstance(found.get("items"), dict):
        check_plain(function, name, found, PLAIN_KEYS | {"items"}, "in the model's own notation")
        item = marked_value(function, name, found["items"], quote)
        return sequence(text("["), optional(joined([tag("", item, "")], ",", several=True)), text("]"))
    if kinds and kinds <= SCALARS:
        return value_of(found, lenient=not function.strict)
    check_plain(function, name, found, PLAIN_KEYS, "in the model's own notation")
    string = tag(quote, {"type": "any_text"}, quote)
    if kinds == TEXT:
        return string
    simple = either(string, value_of({"type": sorted(SCALARS)}, lenient=True))
    pair = sequence({"type": "regex", "pattern": r"[A-Za-z_][\w-]*"}, text(":"), simple)
    lists = sequence(text("["), optional(joined([tag("", simple, "")], ",", several=True)), text("]"))
    objects = sequence(text("{"), optional(joined([tag("", pair, "")], ",", several=True)), text("}"))
    forms = {"string": string, "array": lists, "object": objects}
    scalars = sorted((kinds or SCALARS) & SCALARS)
    some = [form for kind, form in forms.items() if not kinds or kind in kinds]
    return either(*some, *([value_of({"type": scalars}, lenient=True)] if scalars else []))


def check_plain(function: Function, name: str, of: Any, keys: Container[str], where: str) -> None:
    """Raises InvalidRequest for a strict schema that says more of a value than these keys do."""
    told = sorted(key for key in (of if isinstance(of, dict) else ()) if key not in keys)
    if function.strict and told:
        place = f"{function.place}.parameters"
        message = f"{place}: {told[0]} of {name} cannot be held {where}"
        raise InvalidRequest(message, param=place, code="unsupported_schema")


class Parameters(msgspec.Struct, frozen=True):
    """A function's, each with its schema, for calls that write them one by one."""

    properties: dict[str, Any]
    required: list[str]
    optional: list[str]


def read_parameters(function: Function) -> Parameters:
    """Raises InvalidRequest for a strict schema that says more of its object than which properties it has."""
    found = function.parameters if isinstance(function.parameters, dict) else {}
    if function.strict and (strange := sorted(found.keys() - OBJECT_KEYS)):
        place = f"{function.place}.parameters"
        message = f"{place}: {strange[0]} cannot be held in a call as this model writes it, one argument at a time"
        raise InvalidRequest(message, param=place, code="unsupported_schema")
    return parameters_of(found)


def parameters_of(found: Mapping[str, Any]) -> Parameters:
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


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


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
