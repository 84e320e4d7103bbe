"""Regular expressions and literals as the automaton library writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable

from llguidance import regex_to_lark


def lark_regex(pattern: str) -> str:
    """The pattern as it stands between slashes in a Lark grammar."""
    return regex_to_lark(pattern, "")


def quoted(text: str) -> str:
    """The text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def escaped(character: str) -> str:
    """The character in a regular expression, inside a class or outside."""
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):x}}}"


def any_of(texts: Iterable[str]) -> str:
    """A pattern that matches exactly these texts."""
    return "|".join(["".join(map(escaped, text)) for text in texts])
