"""What a lenient rewrite gives way to: always something wider, never narrower, and told."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.schema_instances import judge
from benchmarks.schema_judge import accepts_value
from penstock.engine_core.grammar.schema.writing import rewrite
from penstock.protocol.errors import UnsupportedSchema
from tests.engine_core.grammar.schema.judging import made, refusal

STRING = {"type": "string"}
VALUES: list[Any] = [
    *({}, {"a": 1}, {"a": "x"}, {"b": 1}, {"b": "x"}, {"ab": 1}, {"ab": "s"}, {"a": 1, "b": 2}, {"a": "x", "b": "y"}),
    *([], [1], ["x"], [1, 2], [1, 1], ["x", 1], "", "a", "ab", "b", "abc", 0, 1, 2.5, None, True),
]


def never_narrower(schema: Any) -> tuple[str, ...]:
    """What was left out; every valid value must be accepted still."""
    refusal(schema)
    out = made(schema, lenient=True)
    assert out.approximations
    validator = judge(schema)
    for value in VALUES:
        if validator.is_valid(value):
            assert accepts_value(out, value), (value, out.schema)
    return out.approximations


def test_a_pattern_of_keys_that_is_not_understood_widens_what_stands_beside_it() -> None:
    schema = {"type": "object", "patternProperties": {"a(?!b)": {"type": "integer"}}, "additionalProperties": False}
    told = never_narrower(schema)
    assert told == ("patternProperties at /: lookahead is supported right after the start only",)
    out = made(schema, lenient=True)
    assert accepts_value(out, {"ac": 1})


@pytest.mark.parametrize("pattern", [r"\bab\b", r"(?<=a)b", r"(a|b)\1"])
def test_a_pattern_that_is_not_understood_is_left_out(pattern: str) -> None:
    assert refusal({"type": "string", "pattern": pattern}).keyword == "pattern"
    assert accepts_value(made({"type": "string", "pattern": pattern}, lenient=True), "ab")
    assert accepts_value(made({"not": {"type": "string", "pattern": pattern}}, lenient=True), "b")
    keys = {"type": "object", "patternProperties": {pattern: STRING}, "additionalProperties": False}
    assert accepts_value(made(keys, lenient=True), {"ab": "x", "b": "x"})


def test_names_too_many_to_be_told_apart_leave_the_object_open() -> None:
    names = {f"a rather long name of a key, number {i}": STRING for i in range(400)}
    schema = {"type": "object", "properties": names, "additionalProperties": {"type": "integer"}}
    assert refusal(schema).keyword == "additionalProperties"
    out = made(schema, lenient=True)
    assert out.approximations
    assert accepts_value(out, {"other": 3})
    assert not accepts_value(out, {"other": "x"})


OVERLAPS = {"oneOf": [{"properties": {f"k{i}": STRING}, "required": [f"k{i}"]} for i in range(30)]}


def test_one_of_beyond_the_bound_is_taken_for_any_of() -> None:
    told = never_narrower({"type": "object", **OVERLAPS})
    assert told == ("oneOf at /: taken for anyOf",)
    out = made({"type": "object", **OVERLAPS}, lenient=True)
    assert accepts_value(out, {"k3": "x"})
    assert not accepts_value(out, {"k3": 3})
    assert not accepts_value(out, {})


def test_what_needs_a_negation_is_left_out_beyond_the_bound() -> None:
    conditions = [{"if": {"required": [f"a{i}"]}, "then": {"required": [f"b{i}"]}} for i in range(40)]
    told = never_narrower({"properties": {"a": {"type": "integer"}}, "allOf": conditions, "not": {"const": 1}})
    assert "not at /: left out" in told
    assert "if at /allOf/0: left out" in told


def test_alternatives_beyond_the_bound_are_taken_together() -> None:
    schema = {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]}
    assert any("alternatives" in note for note in never_narrower(schema))


def test_a_reference_to_another_document_is_anything() -> None:
    remote = {"$ref": "https://example.org/x.json#/a"}
    schema = {"type": "object", "properties": {"a": remote, "b": {"not": remote}}, "additionalProperties": False}
    assert "nothing is fetched" in refusal(schema).message
    out = made(schema, lenient=True)
    assert any("nothing is fetched" in note for note in out.approximations)
    assert accepts_value(out, {"a": 1, "b": ["x"]})
    assert not accepts_value(out, {"c": 1})
    with pytest.raises(UnsupportedSchema):
        rewrite({"$ref": "#/nowhere"}, lenient=True)


def test_contains_beyond_the_bound_is_left_out() -> None:
    schema = {"type": "array", "maxItems": 60, "contains": {"const": 1}, "minContains": 30, **OVERLAPS}
    assert any(note.startswith("contains") for note in never_narrower({"anyOf": [schema, {"maxItems": 1}]}))


def test_a_pattern_of_keys_too_large_for_an_automaton_is_a_refusal_that_says_so() -> None:
    names = {f"a{i:03}{'bcdefgh'[i % 7] * (i % 9)}": STRING for i in range(300)}
    schema = {"type": "object", "properties": names, "patternProperties": {"^[a-z0-9]+$": {"minLength": 1}}}
    assert refusal(schema).message == "patternProperties at /: it is too large"
    assert accepts_value(made(schema, lenient=True), {"a": "x"})
