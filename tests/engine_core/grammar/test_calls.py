"""Calls as structural tags: in each model's own spelling, with arguments that follow their schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import msgspec
import pytest

from penstock.engine_core.grammar.calls import NO_PARAMETERS, Function, calls_alone, calls_in_text, read_functions
from penstock.engine_core.parsers.dialect import Dialect, OutputParser, call_parser
from penstock.engine_core.parsers.formats import UNTYPED, CallFormat
from penstock.engine_core.parsers.values import parameter_kinds
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import CustomInput
from tests.engine_core.grammar.vocabulary import END, allowed, automaton, ids, tokens, vocabulary
from tests.engine_core.parsers.outputs import WRITERS, calls_of, content_of, parsed

PERSON: Any = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
F = Function("f", PERSON, True, "tools[0].function")
G = Function("g", NO_PARAMETERS, False, "tools[1].function")
ALL = [Dialect(calls=calls) for calls in CallFormat] + [Dialect(calls=CallFormat.MISTRAL, listed=True)]


def written(dialect: Dialect, *calls: tuple[str, dict[str, Any]]) -> str:
    """The calls as the parsers' tests have them, in the one spelling that is forced."""
    inner = f"[{', '.join(python(*each) for each in calls)}]"
    if dialect.calls is CallFormat.PYTHONIC:
        return inner
    if dialect.calls is CallFormat.LFM2:
        return f"<|tool_call_start|>{inner}<|tool_call_end|>"
    if dialect.calls is CallFormat.OLMO3:
        lines = "\n".join(python(*each) for each in calls)
        return f"<function_calls>\n{lines}\n</function_calls>"
    assert dialect.calls is not None
    form = "listed" if dialect.listed else next(form for calls, form in WRITERS if calls is dialect.calls)
    return WRITERS[dialect.calls, form](calls)


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})"


def accepts(form: dict[str, Any], text: str) -> bool:
    matcher = tokens().matcher(automaton("structural_tag", json.dumps({"format": form})).source)
    return all(matcher.consume_token(token) for token in ids(text)) and matcher.is_accepting()


@pytest.mark.parametrize("dialect", ALL, ids=str)
def test_a_call_that_must_be(dialect: Dialect) -> None:
    form = calls_alone(dialect, [F, G], several=True)
    assert accepts(form, written(dialect, ("f", {"a": "x"})))
    assert accepts(form, written(dialect, ("f", {"a": "x", "b": 3})))
    assert accepts(form, written(dialect, ("g", {})))
    wrong_type = {"a": "x", "b": "y"} if dialect.calls in UNTYPED else {"a": 3}  # there any text is a string
    for wrong in (("f", wrong_type), ("f", {}), ("h", {})):
        assert not accepts(form, written(dialect, wrong))
    assert not accepts(form, "hello")
    assert not accepts(form, "")


@pytest.mark.parametrize("dialect", ALL, ids=str)
def test_calls_among_text(dialect: Dialect) -> None:
    form = calls_in_text(dialect, [F, G], several=True)
    said = "<|channel|>commentary<|message|>So.<|end|><|start|>assistant" if dialect.channels else ""
    assert accepts(form, "<|channel|>final<|message|>hello there" if dialect.channels else "hello there")
    assert accepts(form, said + written(dialect, ("g", {})))
    assert accepts(form, written(dialect, ("f", {"a": "x", "c": True})))
    assert not accepts(form, written(dialect, ("f", {"a": "x", "b": "y"})))
    assert not accepts(form, written(dialect, ("h", {})))


@pytest.mark.sweep
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
        assert accepts(form, written(dialect, ("c", {"input": 'say "hello"'})))
        assert accepts(form, written(dialect, ("c", {"input": 'say "hello"\n'})))
        for wrong in ({"input": "say hello"}, {"input": 'say "hello"\n\n'}, {}, {"input": 'say ""'}):
            assert not accepts(form, written(dialect, ("c", wrong)))


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
    write = WRITERS[next(each for each in WRITERS if each[0] is calls)]
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
    one, text = written(dialect, ("g", {})), written(dialect, ("g", {}), ("g", {}))
    for make in (calls_alone, calls_in_text):
        together = accepts(make(dialect, [G], several=True), text)
        assert together != dialect.channels  # where the first call ends the output
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
    assert accepts(form, written(Dialect(calls=CallFormat.HERMES), ("f", {"x": [1]})))


def test_functions_of_a_request() -> None:
    tools: list[Any] = [{"function": {"name": name}} for name in "fgh"]
    tools[0]["function"]["parameters"] = PERSON
    found = read_functions(tools, ("g", "f"), ("f",))
    assert [(each.name, each.strict, each.place) for each in found] == [
        ("f", True, "tools[0].function"), ("g", False, "tools[1].function")
    ]  # fmt: skip
    assert found[1].parameters == NO_PARAMETERS


TIGHT: Any = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "enum": ["red", "b\"l\\ü", "5"]}, "count": {"type": "integer", "enum": [0, -7, 12]},
        "on": {"type": "boolean"}, "none": {"type": "null"},
    },
    "required": ["word", "on"], "additionalProperties": False,
}  # fmt: skip


def walk(form: dict[str, Any], dice: random.Random) -> str:
    """One of the texts that a form allows."""
    matcher = tokens().matcher(automaton("structural_tag", json.dumps({"format": form})).source)
    written: list[int] = []
    while not matcher.is_stopped() and not (matcher.is_accepting() and dice.random() < 0.5):
        choices = sorted(allowed(matcher.compute_bitmask()) - tokens().eos) or [END]
        # Blanks may go on for ever.
        words = [token for token in choices if vocabulary().raw(token).strip()] or choices
        written.append(dice.choice(words))
        assert matcher.consume_token(written[-1])
        assert len(written) < 1000
    return vocabulary().decode(written, skip_special_tokens=False)


@pytest.mark.parametrize("dialect", ALL, ids=str)
def test_whatever_a_grammar_forces_is_read_and_follows_its_schema(dialect: Dialect) -> None:
    assert dialect.calls is not None
    functions = [
        Function(name, schema, True, "tools[0].function") for name, schema in (("f", TIGHT), ("a-b", NO_PARAMETERS))
    ]
    kinds = parameter_kinds([{"function": {"name": "f", "parameters": TIGHT}}])
    schemas = {function.name: function.parameters for function in functions}
    dice = random.Random(7)
    for _ in range(6):
        text = walk(calls_alone(dialect, functions, several=True), dice)
        machine = OutputParser(None, call_parser(dialect.calls, frozenset(schemas), kinds))
        pieces = parsed(machine, list(text))
        assert machine.complete, text
        assert not content_of(pieces).strip(), text
        for name, arguments in calls_of(pieces):
            jsonschema.validate(json.loads(arguments), schemas[name])


NESTED: Any = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"type": "string"}},
        "inner": {
            "type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}, "required": ["x"]
        },
        "either": {"type": ["string", "integer"]}, "any": {}, "word": {"type": "string", "enum": ["red"]},
    },
}  # fmt: skip


@pytest.mark.parametrize("calls", [CallFormat.GEMMA4, CallFormat.FUNCTIONGEMMA])
def test_values_in_a_notation_of_their_own(calls: CallFormat) -> None:
    form = calls_alone(Dialect(calls=calls), [Function("f", NESTED, False, "tools[0].function")], several=False)
    write = WRITERS[calls, "noted"]
    for arguments in ({}, {"list": []}, {"list": ["a", "b, \"c\"]"]}, {"inner": {"x": 1}},
                      {"inner": {"x": 1, "y": "z"}}, {"either": "x"}, {"either": 5}, {"any": None}, {"any": ["x", 2]},
                      {"any": {"k": "v"}},
                      {"list": ["a"], "word": "red"}):  # fmt: skip
        assert accepts(form, write([("f", arguments)])), arguments
    for arguments in ({"list": "a"}, {"list": [1]}, {"inner": {"y": "z"}}, {"inner": {"x": "1"}}, {"either": None},
                      {"word": "blue"}, {"other": 1}):  # fmt: skip
        assert not accepts(form, write([("f", arguments)])), arguments


@pytest.mark.parametrize("value", [
    {"type": "string", "minLength": 2}, {"type": ["string", "null"], "pattern": "a"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
    {"type": "object", "properties": {"x": {"type": "integer"}}, "minProperties": 1},
])  # fmt: skip
def test_a_strict_value_that_a_notation_of_its_own_cannot_hold(value: Any) -> None:
    strict = Function("f", {"type": "object", "properties": {"a": value}}, True, "tools[0].function")
    with pytest.raises(InvalidRequest, match="of a cannot be held in the model's own notation"):
        calls_alone(Dialect(calls=CallFormat.GEMMA4), [strict], several=False)
    loose = msgspec.structs.replace(strict, strict=False)
    assert calls_alone(Dialect(calls=CallFormat.GEMMA4), [loose], several=False)
