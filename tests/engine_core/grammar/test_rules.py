"""Which parts of a grammar are read in one piece: those that cannot be mistaken, and strings above all."""

from __future__ import annotations

import random

import lark
import pytest
from llguidance import LLMatcher

from penstock.engine_core.grammar.ebnf import Inlined, read, translate
from penstock.engine_core.grammar.patterns import Chars, Sequence
from penstock.engine_core.grammar.rules import (
    LARGEST,
    Lexeme,
    Name,
    Node,
    Reading,
    apart,
    plain_rules,
    with_lexemes,
)
from tests.engine_core.grammar.test_ebnf import parses
from tests.engine_core.grammar.vocabulary import accepts


def lexemes(grammar: str) -> list[str]:
    """Patterns of the lexemes of more than one character that a grammar is read in."""
    rules = read(grammar)
    inlined, reading = Inlined(rules), Reading(rules)
    found = [each for node in with_lexemes(rules, "root").values() for each in inside(node) if reading.size(each) > 1]
    return sorted({inlined.regex(each) for each in found})


def inside(node: Node) -> list[Lexeme]:
    if isinstance(node, Lexeme):
        return [node]
    parts = getattr(node, "parts", (node.part,) if hasattr(node, "part") else ())
    return [found for part in parts for found in inside(part)]


@pytest.mark.parametrize(
    ("body", "free"),
    [
        ('"a"', True), ('"ab" [x-z]', True), ("[0-9]+", False), ('[0-9]+ "."', True), ('"a" | "b"', True),
        ('"a" | "ab"', False), ('"a"?', False), ('"x"? "y"', True), ('"x"* "x"', False), ('""', False),
        (r'"\"" ([^"\\] | "\\" .)* "\""', True), (r'"\"" [^"]* "\"" " "?', False), ('("ab" | "cd"){3}', True),
        ('("a" | "b"){2,3}', False), ('x "!"', True), ('root "!"', False),
    ],
)  # fmt: skip
def test_what_begins_another_of_its_texts_is_seen(body: str, free: bool) -> None:
    rules = read(f'root ::= "(" root ")" | y\ny ::= {body}\nx ::= "q" | "r"')
    assert Reading(rules).prefix_free(rules["y"]) == free


def test_strings_are_read_in_one_piece() -> None:
    found = lexemes(r'root ::= "[" (item ("," item)*)? "]"' + '\nitem ::= string | root\n'
                    r'string ::= "\"" ([^"\\] | "\\" ["\\n])* "\""')  # fmt: skip
    assert len(found) == 1
    assert found[0].startswith("\\x{22}")


def test_what_begins_like_something_else_is_not() -> None:
    assert lexemes('root ::= "(" root ")" | "ab" | "ac"') == []
    assert lexemes('root ::= "(" root ")" | "ab" | "cd" | [a-b]') == ["cd"]
    assert lexemes('root ::= "(" root ")" | "true" | "false"') == ["false", "true"]


def test_a_lexeme_that_spans_rules_gives_way_to_theirs() -> None:
    found = lexemes('root ::= "(" root ")" | key ":" | key\nkey ::= "<" [a-z]* ">"')
    assert found == ["\\x{3c}(?:[a-z]){0,}\\x{3e}"]


def test_rules_that_recur_are_not_plain() -> None:
    assert plain_rules(read('root ::= a root | b\na ::= "x" b\nb ::= "y"\nc ::= root')) == {"a", "b"}


def test_what_is_too_large_stays_in_characters() -> None:
    doubling = [f"r{number} ::= r{number + 1} r{number + 1}" for number in range(30)]
    rules = read("\n".join(["root ::= root r0 | r0", *doubling, 'r30 ::= "a"']))
    found = with_lexemes(rules, "root")
    reading = Reading(rules)
    assert all(reading.size(each) <= LARGEST for node in found.values() for each in inside(node))
    assert reading.size(Name("r0")) > LARGEST


def test_ranges() -> None:
    for text, ranges in (("[a-cb-fx]", ((97, 102), (120, 120))), ("[^a-c]", ((0, 96), (100, 0x10FFFF)))):
        assert read(f"root ::= {text}")["root"] == Chars(ranges)
    assert read("root ::= .")["root"] == read("root ::= [^]")["root"] == Chars(((0, 0x10FFFF),))
    outside = ((0, 96), (100, 0x10FFFF))
    assert apart([outside, ((97, 99),)])
    assert not apart([outside, ((99, 100),)])


def test_the_same_language_with_lexemes_as_larks_parser() -> None:
    """Random recursive grammars with parts that may be read in one piece, and random texts near theirs."""
    rng = random.Random(8)
    pieces = ('"a"', '"ab"', '"<" [ab]* ">"', '"<" ("a" | "b" "a")* ">"', "[ab]", "[ab]+", '"b"?', "x", "y", '"ba" "<"')
    used = 0
    for _ in range(60):
        rules = {}
        for name in ("root", "x", "y"):
            ways = [" ".join(rng.choices(pieces, k=rng.randrange(1, 4))) for _ in range(rng.randrange(1, 3))]
            rules[name] = " | ".join([*ways, '"b"'])
        rules["root"] += ' | "(" root ")"'
        source = "\n".join(f"{name} ::= {body}" for name, body in rules.items())
        theirs = "\n".join(f"{name}: {body}" for name, body in rules.items())
        theirs = theirs.replace("[ab]", "/[ab]/").replace("/[ab]/*", "(/[ab]/)*").replace("/[ab]/+", "(/[ab]/)+")
        parser = lark.Lark(theirs, start="root", parser="earley", lexer="dynamic_complete")
        used += bool(lexemes(source))
        kind, text = translate(source)
        assert kind == "lark"
        for _ in range(10):
            sample = "".join(rng.choices(("a", "b", "ab", "<", ">", "<a>", "(", ")", "ba"), k=rng.randrange(1, 6)))
            assert accepts(LLMatcher.grammar_from_lark(text), sample) == parses(parser, sample), (source, sample)
    assert used > 20


def test_a_sequence_is_never_empty_in_one_piece() -> None:
    assert not Reading({}).prefix_free(Sequence(()))
