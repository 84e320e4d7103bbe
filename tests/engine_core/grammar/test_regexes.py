"""Texts and patterns as the automaton library writes them. What a grammar can force in one piece: never estimated too
small, and refused before anything follows it."""

from __future__ import annotations

import json
import random

import pytest
from llguidance import LLMatcher

from penstock.engine_core.grammar.regexes import (
    LONGEST,
    any_of,
    check_schema,
    escaped,
    lark_regex,
    lark_size,
    quoted,
    regex_size,
)
from penstock.engine_core.grammar.sources import source_of
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar
from tests.engine_core.grammar.vocabulary import accepts, tokens

TEXTS = [  # of every kind of character
    'a"b', "c\\d", "new\nline", "é√", "</s>", "/slash/", "\x01ctl", "a.b*c", "[x]", "{3}", "tab\t", "😀", "\x00", "^|()"
]  # fmt: skip


def test_any_text_is_matched_and_nothing_else() -> None:
    found = LLMatcher.grammar_from_regex(any_of(TEXTS))
    for text in TEXTS:
        assert accepts(found, text), text
        assert accepts(f"start: {quoted(text)}", text), text
    for text in ("", "a", "axb*c", "ctl", "x", "ccc"):
        assert not accepts(found, text)


def test_letters_and_digits_stand_for_themselves() -> None:
    assert [escaped(character) for character in "aZ9"] == ["a", "Z", "9"]
    assert escaped("]") == "\\x{5d}"


def test_a_pattern_between_slashes_keeps_its_meaning() -> None:
    for pattern, text in (("a/b", "a/b"), (r"[/\]]+", "/]/"), ("\\d{2}", "42"), ("a\nb", "a\nb")):
        assert accepts(f"start: /{lark_regex(pattern)}/", text), pattern


def test_literals_are_json() -> None:
    assert json.loads(quoted('é"\n')) == 'é"\n'


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("", 0), ("(abc)", 3), ("(ab){10}", 20), ("(a|bcd){3,}", 9), ("((a{100}){100}){100}", 1_000_000),
        ("[a-z]{5}x", 21), (r"\x41{7}", 28), (r"\x{1f600}{2}", 8), (r"\p{L}{1,5000}", 4), ("(a*b+c?)", 3),
        ("(?:ab|c){4}d", 9), ("(?P<n>ab){2}", 4), ("a{2}{3}", 6), ("(?i)ab", 2), ("[]a]{3}", 12), (r"[\]a]{3}", 12),
        (r"\{9\}", 3), ("(a", 1), ("(a))", 1), ("a{999999999999999}", 999_999_999_999), ("a|bb", 8),
        ("(\u00e9){3}", 6), (r"\.{3}", 3),
    ],
)  # fmt: skip
def test_the_size_of_a_pattern(pattern: str, length: int) -> None:
    assert regex_size(pattern) == length


def test_no_forced_pattern_is_estimated_too_small() -> None:
    """Random patterns of literals, groups and counts force exactly their one text."""
    rng = random.Random(3)

    def made(depth: int) -> tuple[str, int]:
        match rng.randrange(4 if depth else 1):
            case 0:
                return "ab", 2
            case 1:
                one, two = made(depth - 1), made(depth - 1)
                return one[0] + two[0], one[1] + two[1]
            case 2:
                inner, length = made(depth - 1)
                return f"(?:{inner})", length
            case _:
                inner, length = made(depth - 1)
                count = rng.randrange(1, 5)
                return f"({inner}){{{count}}}", length * count

    for _ in range(300):
        pattern, length = made(5)
        assert length <= regex_size(pattern) <= 4 * length


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ('start: "abc"', 3), ("start: A\nA: /c{1000}/", 1000),
        ('start: A b\nA: B~1000\nB: /c{1000}/ | "x"\nb: "q"', 1_000_000),
        ("start: A\nA: B{3,}\nB: C C\nC: /xy/", 12), ("start: A\nA: A A", 0),
        ('start: A\nA: ("a" | /b{7}/)~2..9', 14),
        ('start: %json {"minLength": 777}', 777), ("start: x~1000000\nx: /ab/", 2),
    ],
)  # fmt: skip
def test_the_size_of_a_terminal(text: str, length: int) -> None:
    """Rules count nothing: the library's limits on items hold them. Quotes may be counted."""
    assert length <= lark_size(text) <= 4 * max(3, length)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "x" * (LONGEST + 1)}, {"properties": {"a": {"enum": ["b", "x" * (LONGEST + 1)]}}},
        {"properties": {"x" * (LONGEST + 1): {}}}, {"items": [{"pattern": f"^a{{{LONGEST + 1}}}$"}]},
        {"allOf": [{"pattern": "^a*$"}, {"minLength": LONGEST + 1}]},
    ],
)  # fmt: skip
def test_schemas_that_force_too_much(schema: object) -> None:
    with pytest.raises(InvalidRequest, match=str(LONGEST)):
        check_schema(schema)


def test_schemas_that_do_not() -> None:
    check_schema({"maxLength": 10**9, "pattern": "^[a-z]{1,900000}$", "const": ["x" * LONGEST, 1, None]})


TERMINAL = "start: A\nA: /(a{1000}){1000}/"


@pytest.mark.parametrize(
    ("kind", "source", "whitespace"),
    [
        ("regex", "(a{1000}){1000}", ""), ("grammar", TERMINAL, ""),
        ("grammar", 'root ::= (("a"{1000}){1000})', ""), ("choice", json.dumps(["b", "a" * (LONGEST + 1)]), ""),
        ("json_schema", json.dumps({"const": "a" * (LONGEST + 1)}), "none"),
        ("json_schema", '{"type":"array"}', "( {1000}){1000}"),
        ("structural_tag", '{"format":{"type":"regex","pattern":"(a{1000}){1000}"}}', ""),
        ("structural_tag", json.dumps({"format": {"type": "grammar", "grammar": TERMINAL}}), ""),
    ],
)  # fmt: skip
def test_every_kind_is_looked_at(kind: str, source: str, whitespace: str) -> None:
    with pytest.raises(InvalidRequest):
        source_of(Grammar(kind=kind, source=source, param="x", whitespace=whitespace or "bounded"), tokens())
