"""Grammars of a text as grammars of a JSON string that holds the text.

Models that write calls as JSON write the input of a custom tool as a string. What its grammar says of the text is
rewritten for the string's spelling, character by character: what JSON escapes becomes its escape, all else stands for
itself. One spelling for each character keeps the languages one to one. An escape's backslash may begin a character of
one terminal as well as of the next, which a lexer that never goes back cannot tell apart: so the grammar is rewritten
as a whole, to one regular expression or to lexemes that are exact.
Source: RFC 8259, section 7; OpenAI's guide to custom tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.engine_core.grammar import ebnf, lark
from penstock.engine_core.grammar.lexemes import Ranges, ranges_of
from penstock.engine_core.grammar.patterns import PatternError, complemented, united
from penstock.engine_core.grammar.rules import Chars, Choice, Lexeme, Name, Node, Repeat, Sequence, Text
from penstock.protocol.errors import InvalidRequest

ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # what JSON escapes
SURROGATES: Ranges = ((0xD800, 0xDFFF),)
TEXT_RULE = "text"  # the name that the user's root rule takes; no rule of Lark or EBNF has a quote in its name


def quoted_regex(pattern: str) -> str:
    """A Lark grammar of the JSON strings whose text matches the pattern. Raises InvalidRequest."""
    try:
        return quoted({ebnf.ROOT: lark.pattern_rules(pattern)})
    except PatternError as error:
        raise InvalidRequest(f"the pattern: {error}", code="invalid_grammar") from None


def quoted_grammar(source: str) -> str:
    """A Lark grammar of the JSON strings whose text the grammar, Lark or EBNF, derives. Raises InvalidRequest."""
    if ebnf.is_ebnf(source):
        return quoted(ebnf.read(source))
    rules = lark.read(source)
    if ebnf.ROOT not in rules:
        raise InvalidRequest(f"the grammar has no rule {lark.START}", code="invalid_grammar")
    return quoted(rules)


def quoted(rules: Mapping[str, Node]) -> str:
    inside = {renamed(name): spelling(node) for name, node in rules.items()}
    whole = Sequence((Text('"'), Name(renamed(ebnf.ROOT)), Text('"')))
    kind, text = ebnf.written({ebnf.ROOT: whole, **inside})
    return text if kind == "lark" else f"start: /{text}/"


def renamed(name: str) -> str:
    return f'"{TEXT_RULE}"' if name == ebnf.ROOT else name


def spelling(node: Node) -> Node:
    """The node with every character as JSON spells it."""
    match node:
        case Text(value):
            return Text(json.dumps(value, ensure_ascii=False)[1:-1])
        case Chars():
            return characters(ranges_of(node))
        case Name(rule):
            return Name(renamed(rule))
        case Sequence(parts):
            return Sequence(tuple(map(spelling, parts)))
        case Choice(parts):
            return Choice(tuple(map(spelling, parts)))
        case Repeat(part, low, high):
            return Repeat(spelling(part), low, high)
        case Lexeme(part):
            return Lexeme(spelling(part))


def characters(ranges: Ranges) -> Node:
    """One character of a class, or its escape."""
    plain = overlap(ranges, complemented(united(ESCAPED, SURROGATES)))
    escapes = [json.dumps(chr(code))[1:-1] for low, high in overlap(ranges, ESCAPED) for code in range(low, high + 1)]
    parts: list[Node] = [Chars(tuple((chr(low), chr(high)) for low, high in plain))] if plain else []
    parts += map(Text, escapes)
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))


def overlap(one: Ranges, other: Ranges) -> Ranges:
    """Ranges of the characters that stand in both."""
    return tuple((max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) <= min(b, d))
