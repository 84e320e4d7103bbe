"""Lark grammars, read into rules, and grammars of a text as grammars of the JSON string that holds the text.

Rules and terminals become rules alike, imported terminals of Lark's library among them: what is read is the language,
without the tree that a parser would build. What `%ignore` names may stand behind every terminal, the last one too.

Models that write calls as JSON write the input of a custom tool as a string. What its grammar says of the text is
rewritten for the string's spelling, character by character: what JSON escapes becomes its escape, all else stands for
itself. One spelling for each character keeps the languages one to one. An escape's backslash may begin a character of
one terminal as well as of the next, which a lexer that never goes back cannot tell apart: so the grammar is rewritten
as a whole, to one regular expression or to lexemes that are exact.
Sources: Lark's documentation, "Grammar Reference"; llguidance, "Syntax"; RFC 8259, section 7; OpenAI's guide to custom
tools.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache

from penstock.engine_core.grammar import ebnf, patterns
from penstock.engine_core.grammar.ebnf import ROOT
from penstock.engine_core.grammar.patterns import Chars, Choice, Repeat, Sequence
from penstock.engine_core.grammar.rules import Lexeme, Name, Node, Text
from penstock.protocol.errors import InvalidRequest

START = "start"
LONGEST = 200_000  # characters of a grammar
TOKEN = re.compile(
    r"""(?P<blank>(?://|\#)[^\n]*|[ \t\r]+) | (?P<line>\n\s*)
      | (?P<import>%import\s+common(?:\.(?P<one>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?|\s*\((?P<many>[^)]*)\)))
      | (?P<ignore>%ignore\b) | (?P<options>%llguidance\s*\{\s*\})
      | (?P<text>"(?:\\.|[^"\\\n])*")(?P<folds>i?) | /(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[imslux]*)
      | (?P<define>[!?]*(?P<rule>[A-Za-z_][\w-]*)(?:\.-?\d+)?[ \t]*:) | (?P<name>[A-Za-z_][\w-]*)
      | (?P<alias_of>->[ \t]*\w+) | (?P<range>\.\.)
      | ~[ \t]*(?P<least>\d{1,9})(?:[ \t]*\.\.[ \t]*(?P<most>\d{1,9}))?
      | \{[ \t]*(?P<low>\d{0,9})[ \t]*(?P<comma>,[ \t]*(?P<high>\d{0,9})[ \t]*)?\} | (?P<mark>[()\[\]|*+?])""",
    re.VERBOSE | re.DOTALL,
)
# Terminals of Lark's library. Source: lark, grammars/common.lark.
COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "SIGNED_FLOAT": r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "NUMBER": r"[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}
ESCAPED: patterns.Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # what JSON escapes
SURROGATES: patterns.Ranges = ((0xD800, 0xDFFF),)
TEXT_RULE = "text"  # the name that the user's root rule takes; no rule of Lark or EBNF has a quote in its name


class Words(ebnf.Words):
    """The grammar's tokens, read from left to right."""

    def __init__(self, source: str) -> None:
        if len(source) > LONGEST:
            message = f"the grammar has {len(source)} characters; {LONGEST} is the limit"
            raise InvalidRequest(message, code="grammar_too_complex")
        super().__init__(source)

    def split(self) -> Iterator[re.Match[str]]:
        """All tokens but blanks, and lines that an alternative continues."""
        place = 0
        held: re.Match[str] | None = None
        while place < len(self.source):
            match = TOKEN.match(self.source, place)
            if match is None:
                found = self.source[place : place + 20].split("\n")[0]
                raise self.error(f"{found!r} has no form inside a call written as JSON", place)
            place = match.end()
            if match["blank"]:
                continue
            if match["line"]:
                held = match
                continue
            if held is not None and match["mark"] != "|":
                yield held
            held = None
            yield match

    def bounds(self) -> tuple[int, int | None] | None:
        if self.now is not None and self.now["least"]:
            return int(self.now["least"]), int(self.now["most"] or self.now["least"])
        return super().bounds()

    def alternatives(self) -> Node:
        """The first may stand behind a bar, too."""
        if self.at("|"):
            self.next()
        return super().alternatives()

    def goes_on(self) -> bool:
        while self.now is not None and self.now["alias_of"]:
            self.next()
        match = self.now
        if match is None or self.at("|", ")", "]"):
            return False
        return not (match["line"] or match["define"] or match["import"] or match["ignore"] or match["options"])

    def single(self) -> Node:
        """As in EBNF, with Lark's literals."""
        match = self.now
        assert match is not None
        if match["name"]:
            self.next()
            return Name(called(match["name"]))
        if match["text"]:
            return literal(self, match)
        if match["regex"]:
            flags = "".join(sorted(set(match["flags"]) - {"u"}))
            if set(flags) - set("is"):
                raise self.wrong(f"the flags {flags} have no form inside a call written as JSON")
            found = regex(self, (f"(?{flags})" if flags else "") + match["regex"])
            self.next()
            return found
        if self.at("("):
            return self.group(")")
        if self.at("["):
            return Repeat(self.group("]"), 0, 1)
        raise self.wrong(f"{match[0]!r} has nothing to repeat")


def read(source: str) -> dict[str, Node]:
    """Rules by name; the start rule is called as EBNF's root. Raises InvalidRequest naming the line."""
    words = Words(source)
    rules: dict[str, Node] = {}
    ignored: list[Node] = []
    while words.now is not None:
        match = words.now
        if match["import"]:
            words.next()
            rules |= imported(words, match)
        elif match["ignore"]:
            words.next()
            ignored.append(words.alternatives())
        elif match["define"]:
            name = called(match["rule"])
            if name in rules:
                raise words.wrong(f"{match['rule']} is defined twice")
            words.next()
            rules[name] = words.alternatives()
        elif match["line"] or match["options"]:
            words.next()
        else:
            raise words.wrong(f"expected a rule, not {match[0][:20]!r}")
    if ignored:
        gap = Repeat(Choice(tuple(ignored)), 0, None)
        rules = {name: node if is_terminal(name) else spaced(node, gap) for name, node in rules.items()}
    return rules


def called(name: str) -> str:
    """The name of a rule among the rules."""
    return ROOT if name == START else f"{name}'" if name == ROOT else name


def is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def spaced(node: Node, gap: Node) -> Node:
    """The node with what is ignored behind each of its terminals."""
    match node:
        case Name(rule):
            return Sequence((node, gap)) if is_terminal(rule) else node
        case Sequence(parts) if parts:
            return Sequence(tuple(spaced(part, gap) for part in parts))
        case Choice(parts):
            return Choice(tuple(spaced(part, gap) for part in parts))
        case Repeat(part, low, high):
            return Repeat(spaced(part, gap), low, high)
        case _:
            return Sequence((node, gap))


def imported(words: Words, match: re.Match[str]) -> dict[str, Node]:
    """Terminals of the library."""
    names = [match["one"]] if match["one"] else [name.strip() for name in match["many"].split(",") if name.strip()]
    for name in names:
        if name not in COMMON:
            raise words.wrong(f"common.{name[:40]} is not known")
    return {match["alias"] or name: regex(words, COMMON[name]) for name in names}


def literal(words: Words, match: re.Match[str]) -> Node:
    """A text, or a range of characters."""
    text = string(words, match["text"])
    words.next()
    if words.now is not None and words.now["range"]:
        words.next()
        last = string(words, words.now["text"]) if words.now is not None and words.now["text"] else ""
        if len(text) != 1 or len(last) != 1 or last < text:
            raise words.wrong("a range goes from one character to a later one")
        words.next()
        return Chars(((ord(text), ord(last)),))
    if not match["folds"]:
        return Text(text)
    cases = [{character, character.lower()[:1], character.upper()[:1]} for character in text]
    return Sequence(tuple(Chars(patterns.single(*found)) for found in cases))


def string(words: Words, quoted: str) -> str:
    """What a literal of the grammar stands for."""
    try:
        return str(json.loads(re.sub(r"\\x([0-9A-Fa-f]{2})", r"\\u00\1", quoted), strict=False))
    except ValueError:
        raise words.wrong(f"{quoted[:40]} is no literal") from None


def regex(words: Words, pattern: str) -> Node:
    try:
        return pattern_rules(pattern)
    except patterns.PatternError as error:
        raise words.wrong(f"the pattern: {error}") from None


def pattern_rules(pattern: str) -> Node:
    """A regular expression of Rust's dialect as a node of rules. Raises PatternError."""
    return node_of(bare(patterns.read(pattern, rust=True)))


def bare(node: patterns.Node) -> patterns.Node:
    """The node without anchors at its ends: it always stands for the whole text."""
    if isinstance(node, Choice):
        return Choice(tuple(map(bare, node.parts)))
    parts = node.parts if isinstance(node, Sequence) else (node,)
    if parts[:1] == (patterns.Edge(end=False),):
        parts = parts[1:]
    if parts[-1:] == (patterns.Edge(end=True),):
        parts = parts[:-1]
    return Sequence(parts)


def node_of(node: patterns.Node) -> Node:
    """A pattern's tree as one of rules. Raises PatternError for what no rule says."""
    match node:
        case Chars():
            return Chars(ranges_of(node))
        case Sequence(parts):
            return Sequence(tuple(map(node_of, parts)))
        case Choice(parts):
            return Choice(tuple(map(node_of, parts)))
        case Repeat(part, least, most):
            return Repeat(node_of(part), least, most)
        case patterns.Edge():
            raise patterns.PatternError("an anchor within a pattern has no form inside a call written as JSON")
        case patterns.Ahead():
            raise patterns.PatternError("a lookahead has no form inside a call written as JSON")
        case patterns.Opaque(_, reason):
            raise patterns.PatternError(reason)


def ranges_of(node: Chars) -> patterns.Ranges:
    found = patterns.united(node.ranges, *map(property_ranges, node.properties))
    return patterns.complemented(found) if node.negated else found


@lru_cache(64)
def property_ranges(name: str) -> patterns.Ranges:
    """The characters of a class of Unicode. Raises PatternError for one that is not known."""
    if name[1] in "DWP":
        return patterns.complemented(property_ranges(name[0] + name[1].lower() + name[2:]))
    everything = "".join(map(chr, (*range(0xD800), *range(0xE000, patterns.LAST + 1))))
    if name[1] in "dw":
        return tuple((ord(m[0][0]), ord(m[0][-1])) for m in re.finditer(name + "+", everything))
    wanted = name[3:-1]
    if not re.fullmatch("[LMNPSZC][a-z]?", wanted):
        raise patterns.PatternError(f"{name[:40]} has no form inside a call written as JSON; general categories have")
    letters = "".join("x" if unicodedata.category(c).startswith(wanted) else " " for c in everything)
    spans = (m.span() for m in re.finditer("x+", letters))
    return patterns.united(tuple((ord(everything[a]), ord(everything[b - 1])) for a, b in spans))


def quoted_regex(pattern: str) -> str:
    """A Lark grammar of the JSON strings whose text matches the pattern. Raises InvalidRequest."""
    try:
        return quoted({ROOT: pattern_rules(pattern)})
    except patterns.PatternError as error:
        raise InvalidRequest(f"the pattern: {error}", code="invalid_grammar") from None


def quoted_grammar(source: str) -> str:
    """A Lark grammar of the JSON strings whose text the grammar, Lark or EBNF, derives. Raises InvalidRequest."""
    if ebnf.is_ebnf(source):
        return quoted(ebnf.read(source))
    rules = read(source)
    if ROOT not in rules:
        raise InvalidRequest(f"the grammar has no rule {START}", code="invalid_grammar")
    return quoted(rules)


def quoted(rules: Mapping[str, Node]) -> str:
    inside = {renamed(name): spelling(node) for name, node in rules.items()}
    whole: Node = Sequence((Text('"'), Name(renamed(ROOT)), Text('"')))
    kind, text = ebnf.written({ROOT: whole, **inside})
    return text if kind == "lark" else f"start: /{text}/"


def renamed(name: str) -> str:
    return f'"{TEXT_RULE}"' if name == ROOT else name


def spelling(node: Node) -> Node:
    """The node with every character as JSON spells it."""
    match node:
        case Text(value):
            return Text(json.dumps(value, ensure_ascii=False)[1:-1])
        case Chars(ranges):
            return characters(ranges)
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


def characters(ranges: patterns.Ranges) -> Node:
    """One character of a class, or its escape."""
    plain = patterns.common(ranges, patterns.complemented(patterns.united(ESCAPED, SURROGATES)))
    found = patterns.common(ranges, ESCAPED)
    escapes = [json.dumps(chr(code))[1:-1] for low, high in found for code in range(low, high + 1)]
    parts: list[Node] = [Chars(plain)] if plain else []
    parts += map(Text, escapes)
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))
