"""Patterns of one kind of character, told apart from texts without an automaton, and anchors in odd places."""

from __future__ import annotations

import itertools
import re

import pytest

from penstock.engine_core.grammar import automata, patterns, runs
from penstock.engine_core.grammar.patterns import PatternError, read
from tests.engine_core.grammar.schema.judging import python_pattern, same

TEXTS = ["".join(found) for size in range(5) for found in itertools.product("abx", repeat=size)]


@pytest.mark.parametrize("pattern", ["^[ab]{0,3}$", "^[ab]{2,}$", "^[ab]*$", "^[abx]$", "^[ab]{1,2}$", "^.{3}$"])
@pytest.mark.parametrize("taken", [["a"], ["", "ab", "abab"], ["x", "bx"], ["aaa", "aab", "aa"], ["a", "b"]])
def test_a_run_without_texts(pattern: str, taken: list[str]) -> None:
    run = runs.run_of(read(pattern))
    assert run is not None
    left = runs.run_without(run, taken)
    found = re.compile(python_pattern(patterns.written(left)))
    for text in TEXTS:
        wanted = re.search(pattern, text) is not None and text not in taken
        assert (left != patterns.NOTHING and found.search(text) is not None) is wanted, (text, found.pattern)


def test_only_anchored_patterns_of_one_kind_of_character_are_runs() -> None:
    for pattern in ("[ab]*", "^[ab]*", "^a[ab]*$", r"^\p{L}+$", "^(ab)*$", "^a|b$"):
        assert runs.run_of(read(pattern)) is None, pattern


def test_runs_in_common() -> None:
    found = [runs.run_of(read(pattern)) for pattern in ("^[a-m]{2,9}$", "^[c-z]{0,5}$", "^.+$")]
    assert runs.common_run([run for run in found if run]) == (((ord("c"), ord("m")),), 2, 5)
    apart = runs.common_run([(((97, 98),), 3, None), (((97, 98),), 0, 2)])
    assert automata.empty(automata.language(runs.pattern_of(apart)))


def test_texts_too_long_to_be_told_apart() -> None:
    with pytest.raises(PatternError):
        runs.run_without((((97, 98),), 0, None), ["a" * runs.MAX_APART, "b"])


@pytest.mark.parametrize("schema", [
    {"patternProperties": {"^[a-z]{0,250}$": {"type": "string"}}, "properties": {"abc": {"enum": ["x", 3]}}},
    {"propertyNames": {"pattern": "^[a-z]+$", "maxLength": 250}, "additionalProperties": {"type": "string"}},
    {"propertyNames": {"pattern": "^[a-z]{0,250}$"}, "properties": {"abc": {"const": 3}, "A": {}},
     "additionalProperties": {"type": "string"}},
    {"propertyNames": {"maxLength": 2, "not": {"enum": ["a", "ab"]}}},
])  # fmt: skip
def test_keys_counted_by_the_hundred(schema: dict[str, object]) -> None:
    keys = ["", "a", "ab", "abc", "abd", "A", "z" * 250, "z" * 251, "b1"]
    whole = {"type": "object", "additionalProperties": False, **schema}
    if "propertyNames" in schema and "additionalProperties" not in schema:
        del whole["additionalProperties"]
    assert same(whole, {}, *({key: value} for key in keys for value in ("x", 3)))


@pytest.mark.parametrize("pattern", [
    "a$b", "^$|^(a|b$)c?", "^(?:x$)?$", "(^|,)a(,|$)", "(a$|b)*c?$", "x^a|b", "(?:^a)+b", "^(a|b)$|^c$",
    "^a$|b", "(^a$)*",
])  # fmt: skip
def test_anchors_anywhere(pattern: str) -> None:
    found = re.compile(pattern)
    spelled = re.compile(python_pattern(automata.spelled(read(pattern))), re.DOTALL)
    for text in ["".join(each) for size in range(4) for each in itertools.product("abcx,", repeat=size)]:
        assert (spelled.search(text) is not None) is (found.search(text) is not None), (text, spelled.pattern)
