r"""EBNF as open servers take it (`root ::= "a" [0-9]+ rest?`, llama.cpp's GBNF) into what the automaton library takes.

A grammar without recursion becomes one regular expression. One with recursion becomes Lark rules over single characters
and over such longer lexemes as cannot be mistaken (`lexemes`): the library's lexemes are greedy, and greed would refuse
texts that an EBNF allows, or never let them end.

Syntax: `name ::= alternatives`, "text" or 'text' with escapes \n \r \t \\ \" \' \] \xNN \uNNNN \UNNNNNNNN, [classes]
and [^negated] ones, `.`, (groups), `|`, the repetitions * + ? {m} {m,} {m,n}, comments from # to the end of the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from penstock.engine_core.grammar.patterns import (
    ANY_CHAR,
    NO_CHAR,
    Chars,
    Choice,
    Ranges,
    Repeat,
    Sequence,
    clipped,
    complemented,
    united,
)
from penstock.engine_core.grammar.regexes import escaped, quoted
from penstock.engine_core.grammar.rules import Lexeme, Name, Node, Text, completable, names, with_lexemes
from penstock.protocol.errors import InvalidRequest

ROOT = "root"
LONGEST_REGEX = 200_000  # characters that a grammar without recursion may grow to when its rules are inlined
MOST_REPEATS = 10_000
DEEPEST = 64  # groups within groups, and rules within rules when they are inlined

TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\n]*) | (?P<define>(?P<rule>[A-Za-z][\w-]*)[ \t]*::=) | (?P<name>[A-Za-z][\w-]*)
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*') | (?P<chars>\[\^?(?:[^\]\\]|\\.)*\]) | (?P<mark>[().|*+?])
      | \{(?P<low>\d{1,9})(?P<comma>,(?P<high>\d{1,9})?)?\}""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
DEFINITION = re.compile(r"^\s*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE | re.ASCII)
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|([^\\])", re.DOTALL)
LETTERS: Mapping[str, str] = {"n": "\n", "r": "\r", "t": "\t"}
PLAIN = frozenset("\\\"'[]-^/.(){}*+?| ")


class Words:
    """The grammar's tokens, read from left to right."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._matches = self.split()
        self._depth = 0
        self.now: re.Match[str] | None = None
        self.next()

    def next(self) -> None:
        self.now = next(self._matches, None)

    def at(self, *marks: str) -> bool:
        return self.now is not None and self.now.lastgroup == "mark" and self.now["mark"] in marks

    def wrong(self, what: str) -> InvalidRequest:
        """The error of a grammar that has something else at this place."""
        return self.error(what, len(self.source) if self.now is None else self.now.start())

    def error(self, what: str, place: int) -> InvalidRequest:
        line = self.source.count("\n", 0, place) + 1
        return InvalidRequest(f"the grammar, line {line}: {what}", code="invalid_grammar")

    def split(self) -> Iterator[re.Match[str]]:
        """All tokens but blanks."""
        place = 0
        while place < len(self.source):
            match = TOKEN.match(self.source, place)
            if match is None:
                raise self.error(f"{self.source[place : place + 10]!r} begins nothing", place)
            place = match.end()
            if match.lastgroup != "blank":
                yield match

    def bounds(self) -> tuple[int, int | None] | None:
        """The repetition that stands here, if one does."""
        match = self.now
        if match is None or (match["mark"] or match["low"]) is None:
            return None
        if match["low"] is None:
            return (int(match["mark"] == "+"), 1 if match["mark"] == "?" else None) if self.at("*", "+", "?") else None
        low = int(match["low"] or 0)
        return low, low if match["comma"] is None else int(match["high"]) if match["high"] else None

    def repeated(self, node: Node) -> Node:
        """The node with the repetitions that follow it."""
        while (found := self.bounds()) is not None:
            assert self.now is not None
            low, high = found
            if max(low, high or 0) > MOST_REPEATS or (high is not None and high < low):
                raise self.wrong(f"{self.now[0]} is no repetition of at most {MOST_REPEATS}")
            node = Repeat(node, low, high)
            self.next()
        return node

    def alternatives(self) -> Node:
        """What stands between bars, until a rule or a group ends."""
        if self._depth > DEEPEST:
            raise self.wrong(f"groups are nested deeper than {DEEPEST} levels")
        self._depth += 1
        parts = [self.sequence()]
        while self.at("|"):
            self.next()
            parts.append(self.sequence())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def sequence(self) -> Node:
        """One alternative."""
        parts: list[Node] = []
        while self.goes_on():
            parts.append(self.repeated(self.single()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def group(self, closing: str) -> Node:
        """What stands between parentheses, the first of which comes next."""
        self.next()
        found = self.alternatives()
        if not self.at(closing):
            raise self.wrong("a group is not closed")
        self.next()
        return found

    def goes_on(self) -> bool:
        """Whether an alternative has more."""
        return self.now is not None and self.now["rule"] is None and not self.at("|", ")")

    def single(self) -> Node:
        """What stands between two spaces, without its repetitions."""
        match = self.now
        assert match is not None
        found: Node
        if self.at("("):
            return self.group(")")
        if match["name"]:
            found = Name(match["name"])
        elif match["text"]:
            found = Text("".join(characters(self, match["text"][1:-1])))
        elif match["chars"]:
            found = character_class(self, match["chars"])
        elif match["mark"] == ".":
            found = Chars(ANY_CHAR)
        else:
            raise self.wrong(f"{match[0]!r} has nothing to repeat")
        self.next()
        return found


def is_ebnf(source: str) -> bool:
    """Whether a grammar defines its rules with `::=`; Lark defines them with a colon."""
    return DEFINITION.search(source) is not None


def translate(source: str) -> tuple[str, str]:
    """("regex" or "lark", its text) of a grammar whose root rule is `root`. Raises InvalidRequest naming the line."""
    return written(read(source))


def written(rules: Mapping[str, Node]) -> tuple[str, str]:
    """The same of rules that have been read. Raises InvalidRequest for rules without a text."""
    if ROOT not in rules:
        raise InvalidRequest(f"the grammar has no rule {ROOT}", code="invalid_grammar")
    for name, node in rules.items():
        for used in names(node):
            if used not in rules:
                raise InvalidRequest(
                    f"the grammar: rule {name} uses {used}, which is not defined", code="invalid_grammar"
                )
    if ROOT not in completable(rules):
        raise InvalidRequest(f"the grammar: no text completes rule {ROOT}, which needs itself", code="invalid_grammar")
    if not recursive(rules):
        pattern = Inlined(rules).regex(rules[ROOT])
        if len(pattern) <= LONGEST_REGEX:
            return "regex", pattern
    return "lark", lark(rules)


def read(source: str) -> dict[str, Node]:
    """Rules by name, in the order of the source."""
    words = Words(source)
    rules: dict[str, Node] = {}
    while words.now is not None:
        name = words.now["rule"]
        if name is None:
            raise words.wrong("expected `name ::=`")
        if name in rules:
            raise words.wrong(f"rule {name} is defined twice")
        words.next()
        rules[name] = words.alternatives()
    return rules


def characters(words: Words, text: str) -> Iterator[str]:
    """The characters that a literal or the inside of a class stands for."""
    for match in ESCAPE.finditer(text):
        code = match[1] or match[2] or match[3]
        if code:
            if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
                raise words.wrong(f"{match[0]} is no character")
            yield chr(int(code, 16))
        elif match[4]:
            if match[4] not in LETTERS and match[4] not in PLAIN:
                raise words.wrong(f"{match[0]} is no escape")
            yield LETTERS.get(match[4], match[4])
        else:
            yield match[5]


def character_class(words: Words, text: str) -> Chars:
    """[a-z_], with a hyphen standing for itself at either end or escaped."""
    negated = text.startswith("[^")
    inside = text[2 if negated else 1 : -1]
    raw = [match[0] for match in ESCAPE.finditer(inside)]
    found = list(characters(words, inside))
    ranges: list[tuple[int, int]] = []
    place = 0
    while place < len(found):
        if place + 2 < len(found) and raw[place + 1] == "-":
            if found[place + 2] < found[place]:
                raise words.wrong(f"the range {found[place]}-{found[place + 2]} is upside down")
            ranges.append((ord(found[place]), ord(found[place + 2])))
            place += 3
        else:
            ranges.append((ord(found[place]), ord(found[place])))
            place += 1
    if not ranges and not negated:
        raise words.wrong("[] allows no character")
    return Chars(complemented(tuple(ranges)) if negated else united(tuple(ranges)))


def recursive(rules: Mapping[str, Node]) -> bool:
    """Whether a rule that the root reaches refers to itself, or lies too deep to be inlined."""
    uses = {name: set(names(node)) for name, node in rules.items()}
    ranks: dict[str, int] = {}
    level = {ROOT}
    for rank in range(DEEPEST):
        if not level:
            return False
        ranks |= dict.fromkeys(level, rank)
        level = {used for name in level for used in uses[name]}
    return True


class Inlined:
    """Rules without recursion, inlined."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._known: dict[str, str] = {}

    def regex(self, node: Node) -> str:
        """A regular expression for the node; its length may pass LONGEST_REGEX by no more than one rule's."""
        match node:
            case Text(value):
                return "".join(map(escaped, value))
            case Chars(ranges):
                return class_regex(ranges)
            case Name(rule):
                if rule not in self._known:
                    self._known[rule] = f"(?:{self.regex(self._rules[rule])})"
                return self._known[rule]
            case Sequence(parts):
                return self._joined("", parts)
            case Choice(parts):
                return f"(?:{self._joined('|', parts)})"
            case Repeat(part, low, high):
                return f"(?:{self.regex(part)}){{{low},{'' if high is None else high}}}"
            case Lexeme(part):
                return self.regex(part)

    def _joined(self, mark: str, parts: tuple[Node, ...]) -> str:
        pieces, length = [], 0
        for part in parts:
            pieces.append(self.regex(part))
            length += len(pieces[-1])
            if length > LONGEST_REGEX:
                break  # too long already: the caller takes the other form
        return mark.join(pieces)


def class_regex(ranges: Ranges) -> str:
    if ranges == ANY_CHAR:
        return "(?s:.)"
    ends = [(escaped(chr(low)), escaped(chr(high))) for low, high in clipped(ranges)]
    return f"[{''.join(low if low == high else f'{low}-{high}' for low, high in ends)}]" if ends else NO_CHAR


def lark(rules: Mapping[str, Node]) -> str:
    """The rules in Lark, in lexemes where that is exact; `root` becomes `start`, others r_0, r_1, ..."""
    called = {name: "start" if name == ROOT else f"r_{number}" for number, name in enumerate(rules)}
    inlined, found = Inlined(rules), with_lexemes(rules, ROOT)
    return "\n".join(f"{called[name]}: {lark_of(node, called, inlined)}" for name, node in found.items())


def lark_of(node: Node, called: Mapping[str, str], inlined: Inlined) -> str:
    """The node in Lark's notation; `called` has the names of rules there."""
    match node:
        case Text(value):
            return " ".join(quoted(character) for character in value) or '""'
        case Chars(ranges):
            return f"/{class_regex(ranges)}/"
        case Lexeme(part):
            return f"/{inlined.regex(part)}/"
        case Name(rule):
            return called[rule]
        case Sequence(parts):
            return " ".join(grouped(part, called, inlined) for part in parts) or '""'
        case Choice(parts):
            return " | ".join(lark_of(part, called, inlined) for part in parts)
        case Repeat(part, low, high):
            mark = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
            return grouped(part, called, inlined) + (mark or f"{{{low},{'' if high is None else high}}}")


def grouped(node: Node, called: Mapping[str, str], inlined: Inlined) -> str:
    text = lark_of(node, called, inlined)
    return text if isinstance(node, Name | Chars | Lexeme) else f"({text})"
