"""Calls of custom tools: their arguments are a JSON object with one string, `input`, and the text in it is told.

What does not begin as such an object is passed on as it is: a model that was not held to it wrote something else.
Source: OpenAI API reference, `custom` tools.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import msgspec

from penstock.engine_core.parsers.scanning import Reading, Scan, StreamParser
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Every beginning of a head, the empty one included.
BEGINNING = re.compile(
    r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?'
)  # fmt: skip
LONGEST_HEAD = 256  # characters
EMPTY = re.compile(r"\s*\{\s*\}\s*")
STOP = re.compile(r'["\\]')
HIGH, LOW = r"\\u[dD][89abAB][0-9A-Fa-f]{2}", r"\\u[dD][c-fC-F][0-9A-Fa-f]{2}"  # the halves of a pair
ESCAPE = re.compile(rf'{HIGH}{LOW}|(?P<half>{HIGH}|{LOW})|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{{4}})')
BEGUN = re.compile(rf"(?:{HIGH})?(?:\\(?:u[0-9A-Fa-f]{{0,3}})?)?")  # more may belong to such an escape


class CustomInputs:
    """Takes the pieces of one choice in order; `names` are the custom tools."""

    __slots__ = ("_input", "_names")

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._input: InputParser | None = None  # of the custom tool's call that is open

    def push(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces, arguments of custom tools in place by their text."""
        out: list[Piece] = []
        for piece in pieces:
            if piece.kind == PieceKind.ARGUMENTS and self._input is not None:
                out += self._input.push(piece.text)
                continue
            if piece.kind == PieceKind.CALL:
                self._input = InputParser() if piece.text in self._names else None
            out.append(piece)
        return out


class InputParser(StreamParser):
    """Takes the arguments of one call. What it holds is no text: the beginning of the object, or half an escape."""

    __slots__ = ()

    def _read(self, scan: Scan) -> Reading[None]:
        while (head := HEAD.match(scan.text)) is None:
            begun = BEGINNING.fullmatch(scan.text) or EMPTY.fullmatch(scan.text)
            if not begun or len(scan.text) >= LONGEST_HEAD:  # they have another form
                yield from scan.all(PieceKind.ARGUMENTS)
            if not (yield from scan.more()):
                return
        scan.take(head.end())
        while not scan.text.startswith('"'):
            stop = STOP.search(scan.text)
            scan.tell(scan.take(stop.start() if stop else len(scan.text)), PieceKind.ARGUMENTS)
            while BEGUN.fullmatch(scan.text):
                if not (yield from scan.more()):
                    return
            if scan.text.startswith("\\"):
                escape = ESCAPE.match(scan.text)
                text = scan.take(2 if escape is None else escape.end())
                text = text if escape is None else "\ufffd" if escape["half"] else unescaped(text)
                scan.tell(text, PieceKind.ARGUMENTS)


def unescaped(escape: str) -> str:
    value: Any = msgspec.json.decode(f'"{escape}"')
    return str(value)
