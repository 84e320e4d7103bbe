"""EBNF grammars: what they allow, by an independent reading of the same grammar, and what is wrong with them."""

from __future__ import annotations

import json
import random
import re

import lark
import pytest
from llguidance import LLMatcher

from penstock.engine_core.grammar.ebnf import DEEPEST, LONGEST_REGEX, is_ebnf, read, recursive, translate
from penstock.engine_core.grammar.patterns import ANY_CHAR, Chars, Choice, Repeat, Sequence, complemented
from penstock.engine_core.grammar.rules import Name, Text, completable
from penstock.protocol.errors import InvalidRequest
from tests.engine_core.grammar.vocabulary import accepts

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws   # values may be anything
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def source(grammar: str) -> str:
    kind, text = translate(grammar)
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def test_it_is_told_from_lark() -> None:
    assert is_ebnf('root ::= "a"')
    assert is_ebnf('# words\n  my-rule ::= "a"')
    assert not is_ebnf('start: "a ::= b"')


def test_a_grammar_is_read_as_it_is_written() -> None:
    rules = read('root ::= "a" b? | [^x-z\\n-]{2,}\n  | .\nb ::= ("c" "d")* # end\n\nc ::=\nd ::= \'q\'{3}')
    assert rules["root"] == Choice(
        (
            Sequence((Text("a"), Repeat(Name("b"), 0, 1))),
            Repeat(Chars(complemented(((120, 122), (10, 10), (45, 45)))), 2, None),
            Chars(ANY_CHAR),
        )
    )
    assert rules["b"] == Repeat(Sequence((Text("c"), Text("d"))), 0, None)
    assert rules["c"] == Sequence(())
    assert rules["d"] == Repeat(Text("q"), 3, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [(r'"\n\t\r\\\""', '\n\t\r\\"'), (r'"\x41\u00e9\U0001F600"', "Aé😀"), (r"'\''", "'"), ('"√ #|("', "√ #|(")],
)
def test_escapes(text: str, value: str) -> None:
    assert read(f"root ::= {text}")["root"] == Text(value)
    assert accepts(source(f"root ::= {text}"), value)


@pytest.mark.parametrize(
    ("grammar", "what"),
    [
        ("", "no rule root"), ('x ::= "a"', "no rule root"), ("root ::= x", "x, which is not defined"),
        ("root ::= (", "not closed"), ('root ::= "a"\nroot ::= "b"', "line 2.*twice"), ("root ::= *", "to repeat"),
        ('root ::= "a', "line 1"), (r'root ::= "\q"', "no escape"), ("root ::= [z-a]", "upside down"),
        ("root ::= []", "allows no character"), ('root ::= "a"{3,2}', "no repetition"), ('"a"', "expected"),
        ('root ::= "a"{99999}', "no repetition"), (r'root ::= "\uD800"', "no character"), ("root ::= )", "expected"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "deeper"), (r'root ::= "\U00110000"', "no character"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(grammar: str, what: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translate(grammar)
    assert re.search(what, caught.value.message), caught.value.message
    assert caught.value.code == "invalid_grammar"


def test_what_does_not_recur_is_one_regular_expression() -> None:
    kind, pattern = translate('root ::= greeting " " name "!"\ngreeting ::= "hi" | "ho"{2,3}\nname ::= [A-Z] [a-z]+')
    assert kind == "regex"
    for text, good in (("hi Tom!", True), ("hoho Ann!", True), ("ho Tom!", False), ("hi tom!", False)):
        assert bool(re.fullmatch(pattern.replace("\\x{20}", " ").replace("\\x{21}", "!"), text)) == good
        assert accepts(source('root ::= ("hi" | "ho"{2,3}) " " [A-Z] [a-z]+ "!"'), text) == good


def test_greed_refuses_nothing() -> None:
    """A lexeme that takes all it can would leave nothing for what follows it."""
    for grammar in ('root ::= [a-z]+ "b"', 'root ::= r | "(" root ")"\nr ::= [a-z]+ "b"'):
        assert accepts(source(grammar), "abab")
        assert not accepts(source(grammar), "aba")
    both = 'root ::= x | "(" root ")"\nx ::= [a-z] [a-z] "c" | "ab" "d"'
    assert accepts(source(both), "(abc)")
    assert accepts(source(both), "abd")


def test_json_by_a_grammar() -> None:
    found = source(JSON)
    assert translate(JSON)[0] == "lark"
    for value in ({}, {"a": [1, 2.5, {"b": None}], "c": 'x\n"'}, {"k": [[], [{}], True, False, "é"]}):
        assert accepts(found, json.dumps(value, ensure_ascii=False))
    for text in ("", "{", "{a:1}", '{"a":1,}', "[1]", '{"a":"\x01"}'):
        assert not accepts(found, text)


def test_the_same_language_as_larks_parser() -> None:
    """Random grammars of two letters, random texts: lark's Earley parser reads the same rules written its way."""
    rng = random.Random(2)
    for _ in range(40):
        ebnf, theirs = random_grammar(rng)
        parser = lark.Lark(theirs, start="root", parser="earley", lexer="dynamic_complete")
        try:
            found = source(ebnf)
            for _ in range(8):
                text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 7)))
                assert accepts(found, text) == parses(parser, text), (ebnf, text)
        except AssertionError as error:
            if "NoExtension" not in str(error):  # a language without a text is refused when it is compiled
                raise


def parses(parser: lark.Lark, text: str) -> bool:
    try:
        parser.parse(text)
    except lark.exceptions.LarkError:
        return False
    return True


def random_grammar(rng: random.Random) -> tuple[str, str]:
    """The same rules in EBNF and in Lark. Each rule has a way out, so the language has texts."""

    def part() -> str:
        return rng.choice(('"a"', '"b"', '"ab"', "x", "y", '("a" | "b" x)', '"a"*', '"b"?'))

    def rule() -> str:
        ways = [" ".join(part() for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, 3))]
        return " | ".join([*ways, '"a"'])

    rules = {name: rule() for name in ("root", "x", "y")}
    return (
        "\n".join(f"{name} ::= {body}" for name, body in rules.items()),
        "\n".join(f"{name}: {body}" for name, body in rules.items()),
    )


def test_recursion_is_found() -> None:
    assert not recursive(read('root ::= a a\na ::= b\nb ::= "x"'))
    assert recursive(read('root ::= a\na ::= "x" | root'))
    assert not recursive(read('root ::= "x"\nother ::= other'))
    chain = "\n".join(f"r{n} ::= r{n + 1}" for n in range(DEEPEST + 1)) + f'\nr{DEEPEST + 1} ::= "x"\nroot ::= r0'
    assert recursive(read(chain))


def test_rules_that_double_do_not_grow_without_bound() -> None:
    doubling = "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} r{n + 1} r{n + 1}" for n in range(40)) + '\nr40 ::= "a"'
    kind, text = translate(doubling)
    assert kind == "lark"
    assert len(text) < LONGEST_REGEX


@pytest.mark.parametrize("grammar", [
    'root ::= "a" root',
    'root ::= a\na ::= "x" b\nb ::= a "y" | b',
    'root ::= "a" (root "b" | root{2,5})',
    'root ::= x+\nx ::= "(" x ")"',
])  # fmt: skip
def test_rules_that_nothing_finite_satisfies_are_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="no text completes rule root") as caught:
        translate(grammar)
    assert caught.value.status == 400


@pytest.mark.parametrize("grammar", [
    'root ::= "a" root?',
    'root ::= "a" root*',
    'root ::= "a" (root "b" | root{0,5})',
    'root ::= a | "z"\na ::= "x" a',
    "root ::= ",
    'root ::= "[" (root ("," root)*)? "]"',
])  # fmt: skip
def test_rules_with_a_way_out_are_taken(grammar: str) -> None:
    assert translate(grammar)[1] or grammar == "root ::= "


def test_a_long_chain_of_rules_is_followed_once() -> None:
    chain = "\n".join(f'r{n} ::= "a" r{n + 1} | "b" r{n + 1}' for n in range(4000))
    rules = read(f'root ::= r0\n{chain}\nr4000 ::= "c"')
    assert completable(rules) == set(rules)
    del rules["r4000"]
    assert completable(rules) == set()
