"""Lark grammars read into rules: repetitions, imports, what is ignored, and errors with their line."""

from __future__ import annotations

import re

import pytest

from penstock.engine_core.grammar.ebnf import ROOT, written
from penstock.engine_core.grammar.lark import COMMON, pattern_rules, read
from penstock.engine_core.grammar.patterns import PatternError
from penstock.protocol.errors import InvalidRequest


def takes(source: str, text: str) -> bool:
    """Whether a grammar without recursion derives the text."""
    kind, pattern = written(read(source))
    assert kind == "regex"
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda match: re.escape(chr(int(match[1], 16))), pattern)
    return re.fullmatch(python, text) is not None


@pytest.mark.parametrize(
    ("source", "texts", "others"),
    [
        ('start: "a"~2..3', ("aa", "aaa"), ("a", "aaaa")), ('start: "a"{2}', ("aa",), ("aaa",)),
        ('start: "a"{,1} "b"', ("b", "ab"), ("aab",)), ('start: ("a" | "b")+', ("abba",), ("",)),
        ('start: a\n  | "b" // or this\na: "a" -> one', ("a", "b"), ("ab",)), ('?start: x\n!x: "a"', ("a",), ()),
        ('start: ROOT root\nROOT: "a"\nroot: "b"', ("ab",), ("a",)), ('start: A.\nA.2: "a"', (), ()),
        ('%import common.INT -> N\nstart: N "-" N', ("1-22",), ("-",)), ('start: "a".."c"', ("b",), ("d",)),
        ('start: "A"i', ("a", "A"), ("b",)), ('start: A B\nA: "a"\nB: "b"\n%ignore " "', ("ab", "a  b"), (" ab",)),
        ('%llguidance {}\nstart: "\\x61\\u0062"', ("ab",), ()),
    ],
)  # fmt: skip
def test_what_a_grammar_derives(source: str, texts: tuple[str, ...], others: tuple[str, ...]) -> None:
    if not texts:
        with pytest.raises(InvalidRequest):
            read(source)
    assert all(takes(source, text) for text in texts)
    assert not any(takes(source, text) for text in others)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("start: %json {}", 1), ("start: A\nA: /a/ & /b/", 2), ("start: <|im_end|>", 1), ("start: @other", 1),
        ("start: A\n%import common.NONE -> A", 2), ("start: /a/x", 1), ('start: "b".."a"', 1), ("start: A\nA: ~/a/", 2),
        ("start: (", 1), ('start: "a"\n\nstart: "b"', 3), ("start: " + "(" * 70, 1), ("start: *", 1), ('"a"', 1),
        ('start: "a"~3..2', 1), ('start: "a"{0,99999}', 1), ("start: /(/", 1), ('start: "\\q"', 1),
        ("%import other.X", 1),
        ('start: A\nA: "a".."bc"', 2),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_line(source: str, line: int) -> None:
    with pytest.raises(InvalidRequest, match=f"line {line}:") as caught:
        read(source)
    assert caught.value.code == "invalid_grammar"


def test_a_grammar_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read("start: A\n" + "// x\n" * 50_000)
    assert caught.value.code == "grammar_too_complex"


def test_the_start_rule_is_the_root() -> None:
    assert list(read('a: "a"\nstart: a')) == ["a", ROOT]


def test_the_library_can_be_read() -> None:
    for pattern in COMMON.values():
        pattern_rules(pattern)


@pytest.mark.parametrize("pattern", ["a(?=b)", "a^b", "(", r"\bword", "[a&&b]", "[[:alpha:]]", r"\p{Greek}+"])
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        pattern_rules(pattern)
