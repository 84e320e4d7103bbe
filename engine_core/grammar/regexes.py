"""Regular expressions and literals as the automaton library writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from llguidance import regex_to_lark

from penstock.protocol.errors import InvalidRequest

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
