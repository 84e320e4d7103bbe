"""Calls of custom tools: their arguments are a JSON object with one string, `input`, and the text in it is told.

What does not begin as such an object is passed on as it is: a model that was not held to it wrote something else.
Source: OpenAI API reference, `custom` tools.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Container
from typing import Any

import msgspec

from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Every beginning of a head, the empty one included.
BEGINNING = re.compile(
    r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?'
)  # fmt: skip
LONGEST_HEAD = 256  # characters
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
STOP = re.compile(r'["\\]')
EMPTY = re.compile(r"\s*\{\s*\}\s*")


class Stage(enum.Enum):
    """How far the arguments have come."""

    HEAD = enum.auto()
    TEXT = enum.auto()
    OVER = enum.auto()  # what follows is dropped
    PLAIN = enum.auto()  # they have another form


class CustomInputs:
    """Takes the pieces of one choice in order; `names` are the custom tools. What it holds is no text: the beginning of
    the object, or half an escape."""

    __slots__ = ("_held", "_names", "_stage")

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._stage: Stage | None = None  # None: no custom tool's call is open
        self._held = ""

    def push(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces, arguments of custom tools in place by their text."""
        out: list[Piece] = []
        for piece in pieces:
            if piece.kind == PieceKind.ARGUMENTS and self._stage is not None:
                out += told(self._take(piece.text))
                continue
            if piece.kind == PieceKind.CALL:
                self._stage, self._held = Stage.HEAD if piece.text in self._names else None, ""
            out.append(piece)
        return out

    def _take(self, text: str) -> str:
        if self._stage is Stage.HEAD:
            self._held += text
            found = HEAD.match(self._held)
            if found is not None:
                self._stage, text, self._held = Stage.TEXT, self._held[found.end() :], ""
            elif len(self._held) < LONGEST_HEAD and (BEGINNING.fullmatch(self._held) or EMPTY.fullmatch(self._held)):
                return ""
            else:
                self._stage, text, self._held = Stage.PLAIN, self._held, ""
        if self._stage is Stage.PLAIN:
            return text
        return self._text(text) if self._stage is Stage.TEXT else ""

    def _text(self, text: str) -> str:
        """Characters of a JSON string until its end."""
        whole = self._held + text
        parts, place = [], 0
        while (stop := STOP.search(whole, place)) is not None:
            parts.append(whole[place : stop.start()])
            if stop[0] == '"':
                self._stage, self._held = Stage.OVER, ""
                return "".join(parts)
            escape, end = self._escape(whole, stop.start())
            if escape is None:
                self._held = whole[stop.start() :]
                return "".join(parts)
            parts.append(escape)
            place = end
        self._held = ""
        return "".join([*parts, whole[place:]])

    def _escape(self, text: str, place: int) -> tuple[str | None, int]:
        """The character of an escape and where it ends; None: it is not whole yet."""
        found = ESCAPE.match(text, place)
        if found is None:
            short = len(text) - place < (6 if text[place + 1 : place + 2] == "u" else 2)
            return (None, place) if short else (text[place : place + 2], place + 2)
        code = int(found[0][2:], 16) if found[0][1] == "u" else 0
        if not 0xD800 <= code < 0xE000:
            return unescaped(found[0]), found.end()
        rest = text[found.end() : found.end() + 6]
        if code < 0xDC00 and len(rest) < 6 and "\\u".startswith(rest[:2]):
            return None, place
        pair = ESCAPE.match(rest)
        if code < 0xDC00 and pair is not None and rest[1] == "u" and 0xDC00 <= int(rest[2:6], 16) < 0xE000:
            return unescaped(found[0] + rest), found.end() + 6
        return "\ufffd", found.end()


def unescaped(escape: str) -> str:
    value: Any = msgspec.json.decode(f'"{escape}"')
    return str(value)


def told(text: str) -> list[Piece]:
    return [Piece(PieceKind.ARGUMENTS, text)] if text else []
