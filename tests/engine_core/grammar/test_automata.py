"""Languages: complement, intersection and union of patterns, and the patterns of the results."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.grammar import automata, runs
from penstock.engine_core.grammar.patterns import PatternError, read, written
from tests.engine_core.grammar.schema.judging import python_pattern

PATTERNS = ("^a", "b$", "^[ab]+$", "^(?:ab|ba)*$", "a|b", "^$", "aa", "^a?b?c?$", "^[^a]*$", "^(a|$)b?", "^.{2,3}$")
WORDS = tuple("".join(word) for size in range(5) for word in itertools.product("abc", repeat=size))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_matching_is_pythons(pattern: str) -> None:
    node = read(pattern)
    for word in WORDS:
        assert automata.matches(node, word) is (re.search(pattern, word) is not None), word


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_pattern_of_a_language_means_the_language(pattern: str) -> None:
    node = read(pattern)
    again = automata.pattern(automata.language(node))
    other = automata.pattern(automata.inverted(automata.language(node)))
    for word in WORDS:
        assert automata.matches(again, word) is automata.matches(node, word), word
        assert automata.matches(other, word) is not automata.matches(node, word), word


def test_what_is_too_large_is_found_out_once() -> None:
    node = read("(a|b)*a(a|b){12}c(a|b){12}")
    with pytest.raises(PatternError) as first:
        automata.language(node)
    began = time.thread_time()
    for _ in range(50):
        with pytest.raises(PatternError, match=str(first.value)):
            automata.combined((node,), ())
    assert time.thread_time() - began < 0.1


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(PATTERNS[:7], 2)))
def test_two_languages(one: str, two: str) -> None:
    a, b = (automata.language(read(text)) for text in (one, two))
    both = automata.pattern(automata.common(a, b))
    any_of = automata.pattern(automata.either(a, b))
    for word in WORDS[:100]:
        wanted = [re.search(text, word) is not None for text in (one, two)]
        assert automata.matches(both, word) is all(wanted), word
        assert automata.matches(any_of, word) is any(wanted), word


def test_emptiness() -> None:
    a, b = (automata.language(read(text)) for text in ("^a+$", "^b+$"))
    assert automata.empty(automata.common(a, b))
    assert not automata.empty(a)
    assert automata.empty(automata.inverted(automata.language(read(""))))
    assert automata.apart(read("^a"), read("^b"))
    assert not automata.apart(read("^a"), read("b$"))
    assert not automata.apart(read(r"^\p{Lu}"), read("^b"))  # cannot be told


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(st.text(alphabet='ab"\\é\n', max_size=4), max_size=6), st.lists(st.text(alphabet='ab"\\é\n', max_size=5))
)
def test_lists_of_texts(listed: list[str], probes: list[str]) -> None:
    exact = automata.pattern(automata.of_texts(listed))
    for text in (*listed, *probes):
        assert automata.matches(exact, text) is (text in listed)
    if listed:
        others = re.compile(python_pattern(automata.excluding(listed)))
        for text in (*listed, *probes):
            assert (others.search(text) is not None) is (text not in listed)


def test_excluding_is_linear() -> None:
    names = [f"property_{i}" for i in range(500)]
    assert len(automata.excluding(names)) < 40 * sum(map(len, names))


def test_lengths() -> None:
    for shortest, longest in ((0, None), (2, None), (0, 2), (1, 3)):
        node = runs.of_length(shortest, longest)
        for text in ("", "a", "é\n", "abc", "abcd"):
            assert automata.matches(node, text) is (shortest <= len(text) <= (9 if longest is None else longest))


def test_unicode_classes_match_but_have_no_language() -> None:
    node = read(r"^\p{Lu}\P{L}[^\p{N}]$")
    assert automata.matches(node, "A1a")
    assert not automata.matches(node, "a1a")
    assert not automata.matches(node, "AAa")
    with pytest.raises(PatternError, match="Unicode"):
        automata.language(node)
    with pytest.raises(PatternError, match="not supported here"):
        automata.matches(read(r"\p{Script=Greek}"), "a")


@pytest.mark.parametrize("pattern", ["^(a|b)*a(a|b){12}$", "^a{3000}$", "^(a{100}){100}$", "((a{1,99}){1,99}){1,99}"])
def test_growth_is_bounded(pattern: str) -> None:
    with pytest.raises(PatternError, match="too large"):
        automata.pattern(automata.inverted(automata.language(read(pattern))))


def test_smallest_automata() -> None:
    assert len(automata.language(read("^(?:aa|ab|ac)$")).moves) == 4
    assert len(automata.language(read("")).moves) == 1
    assert written(automata.pattern(automata.language(read("^(?:a|b|c)$")))) == "^[a-c]$"
