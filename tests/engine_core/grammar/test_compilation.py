"""Compiling within limits: what is served, what is refused, and why."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest

from penstock.engine_core.grammar import compilation
from penstock.engine_core.grammar.compilation import compile_grammar
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar
from tests.engine_core.grammar.vocabulary import END, OTHER_END, accepts, tokens


def compiled(kind: str, source: str = "") -> compilation.Compiled:
    return compile_grammar(Grammar(kind=kind, source=source, param="guided"), tokens())


def refused(kind: str, source: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        compiled(kind, source)
    assert caught.value.param == "guided"
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 700
    return caught.value


def test_what_compiles_can_be_followed() -> None:
    found = compiled("regex", "[a-c]{2}")
    assert accepts(found.source, "ab")
    assert found.approximations == ()
    assert 0 < found.seconds < 2


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("regex", "(a", "unclosed group"), ("regex", "(?=a)b", "look-around"), ("regex", r"(a)\1", "backreferences"),
        ("regex", "\\bx", "not supported"), ("grammar", "start: foo", "unknown name"), ("grammar", "s: 'a'", ""),
        ("json_schema", "{", "not JSON"), ("json_schema", '{"minimum":5,"maximum":3,"type":"integer"}', ""),
        ("grammar", "root ::= root", "no text completes"), ("grammar", 'start: "a" start', "without a choice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(kind: str, source: str, why: str) -> None:
    assert why in refused(kind, source).message


def test_the_trial_takes_tokens_that_a_mask_allows_and_no_end() -> None:
    allowed = {3, 40, 41, 1000, 4000, END, OTHER_END}
    bits = np.zeros(tokens().words * 32, np.uint8)
    bits[list(allowed)] = 1
    mask = np.packbits(bits, bitorder="little").view(np.uint32)
    found = [compilation.chosen(mask, turn, tokens()) for turn in range(200)]
    assert set(found) == allowed - {END, OTHER_END}
    ends = np.zeros_like(bits)
    ends[[END, OTHER_END]] = 1
    assert compilation.chosen(np.packbits(ends, bitorder="little").view(np.uint32), 3, tokens()) is None
    assert compilation.chosen(np.zeros(tokens().words, np.uint32), 0, tokens()) is None


def test_the_library_is_quoted_without_our_own_spelling_of_a_schema() -> None:
    crossed = [{"type": "string", "pattern": f"{letter}.{{12}}x"} for letter in "abcdefgh"]
    for words in (1, 1000):
        schema = {"properties": {"a": {"allOf": crossed}, "b": {"enum": [f"word {n}" for n in range(words)]}}}
        message = refused("json_schema", json.dumps({"type": "object", "required": ["a"], **schema})).message
        assert message.startswith("it cannot be compiled: Unable to determine if regex is empty")


def test_an_automaton_that_is_slow_to_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "SLOW", 0.01)
    assert refused("regex", "a{100000}").code == "grammar_too_complex"


BOMBS = {
    "nested quantifiers": ("regex", "(((a+)+)+)+b"),
    "counted in counted": ("regex", "(([a-z]{1,200}){1,200}){1,200}"),
    "exponential alternation": ("regex", "(a|aa|aaa|a*)*b" * 20),
    "states that double": ("regex", "[ab]*a[ab]{18}"),
    "unicode classes": ("regex", r"[\p{L}\p{N}\p{P}]{1,2000}"),
    "a megabyte of choices": ("choice", json.dumps([f"value{n:06}" for n in range(60_000)])),
    "a megabyte of enum": ("json_schema", json.dumps({"enum": [f"value{n:06}" for n in range(60_000)]})),
    "deep json": ("json_schema", '{"a":' * 10_000 + "1" + "}" * 10_000),
    "deep schema": ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    "deep groups": ("regex", "(" * 10_000 + "a" + ")" * 10_000),
    "deep lark": ("grammar", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "no base": ("json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {
        "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}}})),
    "a circle": ("json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})),
    "huge minItems": ("json_schema", json.dumps({"type": "array", "minItems": 10**9, "items": {"type": "integer"}})),
    "huge minLength": ("json_schema", json.dumps({"type": "string", "minLength": 10**9})),
    "many optional": ("json_schema", json.dumps({
        "type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(600)}})),
    "rules that triple": (
        "grammar", "\n".join(["root ::= r0", *(f"r{n} ::= {f'r{n + 1} ' * 3}" for n in range(40)), 'r40 ::= "a"'])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_compiles(name: str) -> None:
    with contextlib.suppress(InvalidRequest):
        compiled(*BOMBS[name])


def test_six_hundred_optional_properties_are_served() -> None:
    kind, source = BOMBS["many optional"]
    found = compiled(kind, source)
    assert accepts(found.source, '{"p0": 1, "p599": 2}')
    assert accepts(found.source, "{}")
