"""Texts and patterns as the automaton library writes them."""

from __future__ import annotations

import json

from llguidance import LLMatcher

from penstock.engine_core.grammar.regexes import any_of, escaped, lark_regex, quoted
from tests.engine_core.grammar.vocabulary import accepts

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
