"""Calls as structural tags: in each model's own spelling, with arguments that follow their schema."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.engine_core.grammar.calls import NO_PARAMETERS, Function, calls_alone, calls_in_text, read_functions
from penstock.engine_core.parsers.dialect import UNTYPED, CallFormat, Dialect
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import CustomInput
from tests.engine_core.grammar.vocabulary import automaton, ids, tokens
from tests.engine_core.parsers.outputs import elements, pairs

PERSON: Any = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
F = Function("f", PERSON, True, "tools[0].function")
G = Function("g", NO_PARAMETERS, False, "tools[1].function")
ALL = [Dialect(calls=calls) for calls in CallFormat] + [Dialect(calls=CallFormat.MISTRAL, listed=True)]
SPELLING = {
    CallFormat.HERMES: '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    CallFormat.LLAMA: '{{"name": "{name}", "parameters": {arguments}}}',
    CallFormat.MISTRAL: "[TOOL_CALLS]{name}[ARGS]{arguments}",
}


def written(dialect: Dialect, name: str, arguments: dict[str, Any]) -> str:
    if dialect.calls is CallFormat.PYTHONIC:
        keywords = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        return f"[{name}({keywords})]"
    if dialect.calls is CallFormat.QWEN3_CODER:
        return elements([(name, arguments)])
    if dialect.calls is CallFormat.GLM45:
        return pairs([(name, arguments)])
    if dialect.listed:
        return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments}])
    assert dialect.calls is not None
    return SPELLING[dialect.calls].format(name=name, arguments=json.dumps(arguments))


def accepts(form: dict[str, Any], text: str) -> bool:
    matcher = tokens().matcher(automaton("structural_tag", json.dumps({"format": form})).source)
    return all(matcher.consume_token(token) for token in ids(text)) and matcher.is_accepting()


@pytest.mark.parametrize("dialect", ALL, ids=str)
def test_a_call_that_must_be(dialect: Dialect) -> None:
    form = calls_alone(dialect, [F, G], several=True)
    assert accepts(form, written(dialect, "f", {"a": "x"}))
    assert accepts(form, written(dialect, "f", {"a": "x", "b": 3}))
    assert accepts(form, written(dialect, "g", {}))
    wrong_type = {"a": "x", "b": "y"} if dialect.calls in UNTYPED else {"a": 3}  # there any text is a string
    for wrong in (written(dialect, "f", wrong_type), written(dialect, "f", {}), written(dialect, "h", {}), "hello", ""):
        assert not accepts(form, wrong)


@pytest.mark.parametrize("dialect", ALL, ids=str)
def test_calls_among_text(dialect: Dialect) -> None:
    form = calls_in_text(dialect, [F, G], several=True)
    assert accepts(form, "hello there")
    assert accepts(form, written(dialect, "f", {"a": "x", "c": True}))
    assert not accepts(form, written(dialect, "f", {"a": "x", "b": "y"}))
    assert not accepts(form, written(dialect, "h", {}))


@pytest.mark.parametrize("syntax", ["lark", "regex"])
@pytest.mark.parametrize("dialect", ALL, ids=str)
def test_the_input_of_a_custom_tool_follows_its_grammar(dialect: Dialect, syntax: str) -> None:
    definition = 'start: "say \\"" WORD "\\"" LF?\nWORD: /\\w+/\n%import common.LF'
    if syntax == "regex":
        definition = r'^say "\w+"\n?$'
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
              "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "c", "parameters": schema}}]
    custom = CustomInput(name="c", syntax=syntax, definition=definition)
    functions = read_functions(tools, ("c",), ("c",), (custom,))
    for form in (calls_alone(dialect, functions, several=True), calls_in_text(dialect, functions, several=True)):
        assert accepts(form, written(dialect, "c", {"input": 'say "hello"'}))
        assert accepts(form, written(dialect, "c", {"input": 'say "hello"\n'}))
        for wrong in ({"input": "say hello"}, {"input": 'say "hello"\n\n'}, {}, {"input": 'say ""'}):
            assert not accepts(form, written(dialect, "c", wrong))


def test_a_custom_tool_of_any_text_is_a_function_with_one_string() -> None:
    tools = [{"type": "function", "function": {"name": "c", "parameters": PERSON}}]
    (function,) = read_functions(tools, ("c",), (), (CustomInput(name="c"),))
    assert function.custom is None


@pytest.mark.parametrize("calls", sorted(UNTYPED, key=str))
def test_values_in_elements(calls: CallFormat) -> None:
    properties: Any = {
        "text": {"type": "string", "description": "any"}, "word": {"type": "string", "enum": ["red", "blue"]},
        "count": {"type": ["integer", "null"]}, "any": {},
    }  # fmt: skip
    function = Function("f", {"type": "object", "properties": properties}, True, "tools[0].function")
    form = calls_alone(Dialect(calls=calls), [function], several=False)
    write = elements if calls is CallFormat.QWEN3_CODER else pairs
    for arguments in ({}, {"text": "<b>5</b>\n\n"}, {"word": "red"}, {"count": 3}, {"count": None}, {"any": [1, 2]},
                      {"text": "", "word": "blue", "count": 0, "any": "x"}):  # fmt: skip
        assert accepts(form, write([("f", arguments)]))
    for arguments in ({"word": "green"}, {"count": "x"}, {"other": 1}, {"word": "red", "text": "x"}):
        assert not accepts(form, write([("f", arguments)]))


@pytest.mark.parametrize("calls", sorted(UNTYPED, key=str))
@pytest.mark.parametrize("value", [{"type": "string", "pattern": "^a"}, {"type": ["string", "null"], "minLength": 2},
                                   {"$ref": "#/$defs/x"}])  # fmt: skip
def test_a_strict_string_that_elements_cannot_hold(calls: CallFormat, value: Any) -> None:
    strict = Function("f", {"type": "object", "properties": {"a": value}}, True, "tools[0].function")
    with pytest.raises(InvalidRequest) as caught:
        calls_alone(Dialect(calls=calls), [strict], several=False)
    assert caught.value.param == "tools[0].function.parameters"
    loose = msgspec.structs.replace(strict, strict=False)
    assert calls_alone(Dialect(calls=calls), [loose], several=False)


@pytest.mark.parametrize("dialect", ALL, ids=str)
def test_one_call_or_several(dialect: Dialect) -> None:
    one = written(dialect, "g", {})
    several = {
        CallFormat.HERMES: f"{one}\n{one}", CallFormat.LLAMA: f"{one}; {one}", CallFormat.MISTRAL: one + one,
        CallFormat.PYTHONIC: "[g(), g()]", CallFormat.QWEN3_CODER: f"{one}\n{one}", CallFormat.GLM45: f"{one}\n{one}",
    }  # fmt: skip
    assert dialect.calls is not None
    text = several[dialect.calls]
    if dialect.listed:
        text = '[TOOL_CALLS] [{"name": "g", "arguments": {}}, {"name": "g", "arguments": {}}]'
    for make in (calls_alone, calls_in_text):
        assert accepts(make(dialect, [G], several=True), text)
        assert not accepts(make(dialect, [G], several=False), text)
        assert accepts(make(dialect, [G], several=False), one)


def test_optional_arguments_in_python() -> None:
    loose = msgspec.structs.replace(F, parameters={key: PERSON[key] for key in ("type", "properties")})
    form = calls_alone(Dialect(calls=CallFormat.PYTHONIC), [loose], several=False)
    for text in ("[f()]", '[f(a="x")]', "[f(b=3)]", "[f(c=true)]", "[f(b=3, c=false)]", '[f(a="x", c=true)]'):
        assert accepts(form, text)
    for text in ("[f(, b=3)]", "[f(b=3, b=3)]", "[f(c=true, b=3)]", "[f(3)]"):
        assert not accepts(form, text)


def test_a_strict_schema_that_python_cannot_hold() -> None:
    strict = msgspec.structs.replace(F, parameters={**PERSON, "minProperties": 1})
    with pytest.raises(InvalidRequest) as caught:
        calls_alone(Dialect(calls=CallFormat.PYTHONIC), [strict], several=False)
    assert caught.value.param == "tools[0].function.parameters"
    loose = msgspec.structs.replace(strict, strict=False)
    assert calls_alone(Dialect(calls=CallFormat.PYTHONIC), [loose], several=False)


def test_schemas_that_are_not_strict_are_held_as_far_as_they_can_be() -> None:
    odd: Any = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}, "required": ["x"]}
    loose = Function("f", odd, False, "tools[0].function")
    form = calls_alone(Dialect(calls=CallFormat.HERMES), [loose], several=False)
    assert accepts(form, written(Dialect(calls=CallFormat.HERMES), "f", {"x": [1]}))


def test_functions_of_a_request() -> None:
    tools: list[Any] = [{"function": {"name": name}} for name in "fgh"]
    tools[0]["function"]["parameters"] = PERSON
    found = read_functions(tools, ("g", "f"), ("f",))
    assert [(each.name, each.strict, each.place) for each in found] == [
        ("f", True, "tools[0].function"), ("g", False, "tools[1].function")
    ]  # fmt: skip
    assert found[1].parameters == NO_PARAMETERS
