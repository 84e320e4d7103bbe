"""Regular expressions and literals as the automaton library writes them, and how long a text a grammar can force in one
piece, estimated from its source.

The library follows a forced text to its end each time it is asked for a mask, and bounds that by its limits on parser
items alone: inside one lexeme nothing stops it. So a lexeme may force no more than LONGEST bytes. The estimate counts
the bytes of every character, four for a class, the longest of alternatives, and a repetition as often as it must occur,
at least once. It is never less than what can be forced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from penstock.protocol.errors import InvalidRequest

MOST_FORCED = 32_768  # tokens; the library looks at all of them at every step
LONGEST = MOST_FORCED  # bytes: then they are no more tokens than a guide follows

WIDEST = 4  # bytes of a character in UTF-8

IN_REGEX = re.compile(
    r"(?P<open>\((?:\?(?:P?<\w+>|[a-zA-Z-]*[:)]|<?[=!])?)?)|(?P<close>\))|(?P<bar>\|)"
    r"|\{(?P<low>\d+)(?:,\d*)?\}[?+]?|(?P<skip>[*+?])"
    r"|(?P<atom>\\[xupP]\{[^}]*\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.)",
    re.DOTALL,
)
IN_LARK = re.compile(
    r"(?P<open>[(\[])|(?P<close>[)\]])|(?P<bar>\|)|(?:~\s*|\{)(?P<low>\d+)(?:(?:\.\.|,)\s*\d*)?\}?|(?P<skip>[*+?\s&:,.])"
    r'|(?P<text>"(?:\\.|[^"\\])*")|/(?P<regex>(?:\\.|[^/\\])+)/[imslux]*|(?P<name>[A-Za-z_]\w*)|(?P<other>.)',
    re.DOTALL,
)
COUNT = re.compile(r"\{(\d+)")
TERMINAL = re.compile(r"^\s*(?P<name>_?[A-Z]\w*)(?:\.\d+)?(?:\[[^\]]*\])?\s*:(?P<body>(?:.|\n\s*\|)*)", re.MULTILINE)
LEAST = re.compile(r'"minLength"\s*:\s*(\d+)')  # of schemas within
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
# What a Lark grammar names tokens by, outside of its literals and comments: <name>, or <[ids and ranges of ids]>.
TOKENS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/'
    r"|<\[(?P<outside>\^?)(?P<ids>[\d\s,*-]*)\]>|(?P<name><[^\s<>]+>)"
)


def lark_regex(pattern: str) -> str:
    """The pattern as it stands between slashes in a Lark grammar."""
    return regex_to_lark(pattern, "")


def quoted(text: str) -> str:
    """The text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def check_ends(lark: str, ends: Mapping[str, int]) -> None:
    """Raise InvalidRequest where a Lark grammar names an end-of-sequence token: the output ends with it, whatever the
    grammar has behind it."""
    for match in TOKENS.finditer(lark):
        inside = set(ends.values()) & ids_of(match["ids"], ends.values()) if match["ids"] is not None else set()
        if match["outside"]:
            inside = set(ends.values()) - inside
        if match["name"] in ends or inside:
            message = f"{match[0]} ends the output: a grammar cannot hold it, and what is complete ends by itself"
            raise InvalidRequest(message, code="invalid_grammar")


def names_of(lark: str) -> set[str]:
    """Tokens that a Lark grammar names, <think> say."""
    return {match["name"] for match in TOKENS.finditer(lark) if match["name"]}


def ids_of(text: str, among: Iterable[int]) -> set[int]:
    """Those of these ids that stand in a list of ids and ranges."""
    if "*" in text:
        return set(among)
    bounds = [[int(part) for part in entry.split("-") if part.strip()] for entry in text.split(",")]
    return {token_id for token_id in among for pair in bounds if pair and pair[0] <= token_id <= pair[-1]}


def escaped(character: str) -> str:
    """The character in a regular expression, inside a class or outside."""
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):x}}}"


def any_of(texts: Iterable[str]) -> str:
    """A pattern that matches exactly these texts."""
    return "|".join(["".join(map(escaped, text)) for text in texts])


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a pattern: `kind` is open, close, bar, low, or part; `size` is its count or its bytes."""

    kind: str
    size: int = 0


class Group:
    """Sums over the branches of a group that is being read."""

    def __init__(self) -> None:
        self.longest = 0  # of the branches before this one
        self.branch = 0
        self.last = 0  # what a repetition that comes next repeats

    def add(self, size: int) -> None:
        self.branch += size
        self.last = size

    def size(self) -> int:
        return max(self.longest, self.branch)


def size(pieces: Iterable[Piece]) -> int:
    """Bytes that a pattern of these pieces can force."""
    groups = [Group()]
    for piece in pieces:
        group = groups[-1]
        match piece.kind:
            case "open":
                groups.append(Group())
            case "close" if len(groups) > 1:
                groups.pop()
                groups[-1].add(group.size())
            case "bar":
                group.longest, group.branch, group.last = group.size(), 0, 0
            case "low":
                added = group.last * (max(1, piece.size) - 1)
                group.branch += added
                group.last += added
            case "part":
                group.add(piece.size)
    return sum([group.size() for group in groups])  # a group that is not closed is the compiler's to refuse


def regex_size(pattern: str) -> int:
    """Bytes that a regular expression can force."""
    if "{" not in pattern and (found := WIDEST * max(map(len, pattern.split("|")))) <= LONGEST and "(" not in pattern:
        return found  # megabytes of alternatives, looked at quickly
    return size(regex_pieces(pattern))


def regex_pieces(pattern: str) -> Iterator[Piece]:
    """The pieces of a regular expression."""
    for match in IN_REGEX.finditer(pattern):
        match match.lastgroup:
            case "open" if not match[0].endswith(")"):
                yield Piece("open")
            case "close" | "bar" as kind:
                yield Piece(kind)
            case "low":
                yield Piece("low", int(match["low"][:12]))
            case "atom":
                character = match[0].removeprefix("\\")
                yield Piece("part", len(character.encode()) if len(character) == 1 else WIDEST)


def lark_size(text: str) -> int:
    """Bytes that the longest lexeme of a Lark grammar can force."""
    bodies = {match["name"]: match["body"] for match in TERMINAL.finditer(text)}
    known: dict[str, int] = {}
    longest = 0
    for name in bodies:
        longest = max(longest, terminal_size(name, bodies, known))
    for literal in LITERAL.findall(text):  # in rules each is a lexeme of its own; in schemas it may be a pattern
        longest = max(longest, len(literal.encode()) - 2, regex_size(literal[1:-1]) if "{" in literal else 0)
    return max([longest, *[int(least[:12]) for least in LEAST.findall(text)]])


def terminal_size(name: str, bodies: Mapping[str, str], known: dict[str, int]) -> int:
    """Of a terminal by its name; rules and what refers to itself count nothing."""
    if name not in known:
        known[name] = 0
        known[name] = size(lark_pieces(bodies.get(name, ""), bodies, known))
    return known[name]


def lark_pieces(body: str, bodies: Mapping[str, str], known: dict[str, int]) -> Iterator[Piece]:
    """The pieces of a terminal's definition."""
    for match in IN_LARK.finditer(body):
        match match.lastgroup:
            case "open" | "close" | "bar" as kind:
                yield Piece(kind)
            case "low":
                yield Piece("low", int(match["low"][:12]))
            case "text":
                yield Piece("part", len(match["text"].encode()))
            case "regex":
                yield Piece("part", regex_size(match["regex"]))
            case "name":
                yield Piece("part", terminal_size(match["name"], bodies, known))


def check_regex(pattern: str) -> None:
    """Raise InvalidRequest for a pattern that could force more than LONGEST bytes."""
    most = WIDEST * len(pattern)
    for count in COUNT.findall(pattern):
        most *= max(1, int(count[:12]))
        if most > LONGEST:
            break
    if most > LONGEST:
        refuse(regex_size(pattern), "a pattern")


def check_lark(text: str) -> None:
    """Raise InvalidRequest for a grammar with a lexeme that could force more than LONGEST bytes."""
    refuse(lark_size(text), "a terminal")


def check_texts(texts: Iterable[str]) -> None:
    """Raise InvalidRequest where a literal is longer than LONGEST bytes."""
    refuse(max([len(text.encode(errors="surrogatepass")) for text in texts], default=0), "a text")


def check_schema(schema: Any) -> None:
    """Raise InvalidRequest where a string, key or pattern of a schema could force more than LONGEST bytes."""
    match schema:
        case str():
            check_texts([schema])
        case list():
            for each in schema:
                check_schema(each)
        case dict():
            pattern, least = schema.get("pattern"), schema.get("minLength")
            if isinstance(pattern, str):
                check_regex(pattern)
            if isinstance(least, int | float):
                refuse(int(least), "a minLength")  # with a pattern elsewhere it repeats what the pattern repeats
            check_texts(schema)
            for each in schema.values():
                check_schema(each)


def refuse(length: int, what: str) -> None:
    if length > LONGEST:
        message = f"{what} of {length} bytes: what must follow in one piece may have {LONGEST}"
        raise InvalidRequest(message, code="grammar_too_complex")
