"""Patterns: read as ECMA-262 means them, written so that the automaton's dialect means the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.grammar import automata
from penstock.engine_core.grammar.patterns import (
    Ahead,
    Chars,
    Choice,
    Edge,
    PatternError,
    Repeat,
    Sequence,
    complemented,
    plain_char,
    read,
    single,
    split,
    united,
    written,
)
from tests.engine_core.grammar.schema.judging import python_pattern

TEXTS = (
    "",
    "a",
    "b",
    "ab",
    "aab",
    "A",
    "1",
    "a1",
    "-",
    "[",
    "&",
    "{a}",
    "a{,3}",
    "é",
    " ",
    "\n",
    '"',
    "\\",
    "/",
    "a.b",
    "^",
    "$",
)


def codes(*characters: str) -> tuple[tuple[int, int], ...]:
    return tuple((ord(c), ord(c)) for c in sorted(characters))


READ = {
    "a": Chars(codes("a")),
    "ab": Sequence((Chars(codes("a")), Chars(codes("b")))),
    "a|b": Choice((Chars(codes("a")), Chars(codes("b")))),
    "a*": Repeat(Chars(codes("a")), 0, None),
    "a+?": Repeat(Chars(codes("a")), 1, None),
    "a{2}": Repeat(Chars(codes("a")), 2, 2),
    "a{2,}": Repeat(Chars(codes("a")), 2, None),
    "a{0,3}": Repeat(Chars(codes("a")), 0, 3),
    "^a$": Sequence((Edge(False), Chars(codes("a")), Edge(True))),
    r"\Aa\Z": Sequence((Edge(False), Chars(codes("a")), Edge(True))),
    "(?:a)": Chars(codes("a")),
    "(?<name>a)": Chars(codes("a")),
    "(?P<name>a)": Chars(codes("a")),
    "(?=a)b": Sequence((Ahead(Chars(codes("a")), False), Chars(codes("b")))),
    "(?!a)b": Sequence((Ahead(Chars(codes("a")), True), Chars(codes("b")))),
    "[a-c]": Chars(((0x61, 0x63),)),
    "[ab]": Chars(((0x61, 0x62),)),
    "[]": Chars(()),
    "[^]": Chars(((0, 0x10FFFF),)),
    r"[\d]": Chars(((0x30, 0x39),)),
    r"[\b]": Chars(((8, 8),)),
    r"\x41": Chars(codes("A")),
    r"\u0041": Chars(codes("A")),
    r"\u{1F600}": Chars(codes("😀")),
    r"\ud83d\ude00": Chars(codes("😀")),
    r"\cA": Chars(((1, 1),)),
    r"\0": Chars(((0, 0),)),
    r"\p{L}": Chars((), (r"\p{L}",)),
    r"[^\p{L}a]": Chars(codes("a"), (r"\p{L}",), True),
    "(?i)a": Chars(codes("A", "a")),
    "{": Chars(codes("{")),
    "": Sequence(()),
}


@pytest.mark.parametrize("pattern", list(READ))
def test_reading(pattern: str) -> None:
    assert read(pattern) == READ[pattern]


WRONG = {
    "(": "not closed",
    "(a": "not closed",
    "a)": "not opened",
    "[a": "too early",
    "*a": "nothing is repeated",
    "^*": "an assertion is repeated",
    "a{3,2}": "upside down",
    "a{1000000}": "too long",
    "[b-a]": "upside down",
    r"\q": "not known",
    r"\xZZ": "hexadecimal",
    r"\u{110000}": "no character",
    r"(a)\1": "not regular",
    r"(?<n>a)\k<n>": "not regular",
    r"\bfoo": "word boundaries",
    "(?<=a)b": "lookbehind",
    "(?<!a)b": "lookbehind",
    "(?>a)": "not supported",
    "a++": "possessive",
    "a" * 30_000: "longer than",
    "(" * 100: "nested too deeply",
    r"\p{}": "no name",
}


@pytest.mark.parametrize("pattern", list(WRONG))
def test_what_cannot_be_read(pattern: str) -> None:
    with pytest.raises(PatternError, match=WRONG[pattern]):
        read(pattern)


PLAIN = (
    *("^a|b$", "[[a]", "[a&&b]", "[a~~b]", "[\\w-.]", "a{,3}", "{a}", "^(a|$)b?", "(a|b)*$", "^[^a]$", "x*"),
    *("[-a]", "[a-]", "\\/", "\\-", "\\.", "^$", "$", "a.b", "(?:a|b|)1", "^(?:aa?|b){1,2}$", "[\\]\\\\]", "\\$"),
)


@pytest.mark.parametrize("pattern", PLAIN)
def test_written_means_the_same(pattern: str) -> None:
    node = read(pattern)
    again = read(written(node))
    for text in TEXTS:
        assert automata.matches(node, text) is automata.matches(again, text), text


@pytest.mark.parametrize(
    "pattern", ["^a|b$", "^(a|$)b?", "^[^a]$", "x*", "[-a]", "[a-]", "^(?:aa?|b){1,2}$", "[\\]\\\\]"]
)
def test_read_means_what_python_means(pattern: str) -> None:
    node = read(pattern)
    for text in TEXTS:
        if text != "\n":  # where Python's $ stands before the newline too
            assert automata.matches(node, text) is (re.search(pattern, text) is not None), text


def test_sets_are_no_operations() -> None:
    for pattern, inside, outside in (
        ("^[a&&b]$", "ab&", "c"),
        ("^[[a]$", "[a", "]"),
        ("^[a~~b]$", "a~b", "-"),
        (r"^[\w-.]$", "a-.", "/"),
    ):
        for text in inside:
            assert automata.matches(read(written(read(pattern))), text), (pattern, text)
        assert not automata.matches(read(written(read(pattern))), outside), pattern


def test_classes_are_ascii_and_the_dot_stops_at_line_ends() -> None:
    for pattern, inside, outside in (
        (r"^\d$", "7", "٣"),
        (r"^\w$", "_", "é"),
        (r"^\W$", "é", "a"),
        (r"^\s$", "\u00a0", "a"),
        (r"^\S$", "é", "\ufeff"),
        (r"^\D$", "٣", "3"),
        (r"^.$", "\t", "\r"),
        (r"^.$", "😀", "\u2028"),
    ):
        assert automata.matches(read(pattern), inside), pattern
        assert not automata.matches(read(pattern), outside), pattern


def test_a_set_without_a_quote_gives_up_nul() -> None:
    assert written(read('[^"]')) == r"[^\x{0}\x{22}]"
    assert written(read(r"[^\\]")) == r"[^\x{0}\x{5C}]"
    assert written(read("[^a]")) == "[^a]"
    assert written(read(r"[^\n]")) == r"[^\x{A}]"
    assert written(read('[^"\\t]')) == r"[^\x{9}\x{22}]"


def test_lookahead_is_written_nowhere() -> None:
    with pytest.raises(PatternError, match="lookahead"):
        written(read("a(?=b)"))


@pytest.mark.parametrize(
    ("pattern", "wanted", "unwanted"),
    [
        ("^a", ("^a",), ()),
        ("^(?=a)b", ("^a", "^b"), ()),
        ("^(?!a)b", ("^b",), ("^a",)),
        ("^(?=.*a)(?!b)(?=c).*$", ("^.*a", "^c", "^.*$"), ("^b",)),
    ],
)
def test_lookahead_at_the_start_is_split(pattern: str, wanted: tuple[str, ...], unwanted: tuple[str, ...]) -> None:
    found, banned = split(read(pattern))
    assert [written(node) for node in found] == [written(read(text)) for text in wanted]
    assert [written(node) for node in banned] == [written(read(text)) for text in unwanted]


@pytest.mark.parametrize("pattern", ["(?=a)b", "a(?=b)c", "^a(?!b)", "^(?=a(?=b))c", "(^(?=a)|b)"])
def test_lookahead_elsewhere_stays(pattern: str) -> None:
    node = read(pattern)
    assert split(node) == ((node,), ())


def test_ranges() -> None:
    assert united(((1, 3),), ((4, 5), (9, 9))) == ((1, 5), (9, 9))
    assert complemented(()) == ((0, 0x10FFFF),)
    assert complemented(((0, 0x10FFFF),)) == ()
    assert single("b", "a", "d") == ((0x61, 0x62), (0x64, 0x64))


@given(st.sets(st.integers(0, 300)))
def test_a_complement_is_one(points: set[int]) -> None:
    ranges = united(tuple((p, p) for p in points))
    other = complemented(ranges)
    assert complemented(other) == ranges
    covered = [any(low <= p <= high for low, high in ranges) for p in range(310)]
    assert covered == [p in points for p in range(310)]
    assert covered == [not any(low <= p <= high for low, high in other) for p in range(310)]


@given(st.characters(codec="utf-8"))
def test_a_character_is_written_as_itself(char: str) -> None:
    assert automata.matches(read(f"^{plain_char(ord(char))}$"), char)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.text(alphabet="ab^$|()*+?[]{}.,-\\dw1", max_size=10))
def test_nothing_but_a_pattern_error_is_raised(pattern: str) -> None:
    try:
        node = read(pattern)
        text = written(node)
    except PatternError:
        return
    for sample in ("", "a", "ab", "1", "b]"):
        assert automata.matches(node, sample) is automata.matches(read(text), sample)


def test_python_reads_what_is_written() -> None:
    assert re.search(python_pattern(written(read("^[^a-c]x$"))), "dx")
    assert re.search(python_pattern(written(read("^[^a-c]x$"))), "dx\n") is None
