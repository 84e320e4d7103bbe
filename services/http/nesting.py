"""How deep the JSON of a body is nested, measured as it arrives, so that no body holds up the others for long."""

from __future__ import annotations

import re
from itertools import accumulate

# A string, or the rest of a piece in which one has begun: without that end each quote in it would be tried.
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
QUOTE, ESCAPE, END = b'"', b"\\", b"\0"
STEPS = (-1, 1)  # of a closing and of an opening bracket
OPENING, CLOSING = b"[{", b"]}"
OTHERS = bytes(set(range(256)) - set(OPENING + CLOSING))


class Nesting:
    """Counts the levels of one body. What is no JSON may count as anything: it is refused in any case."""

    def __init__(self) -> None:
        self._level = 0
        self._open = b""  # the beginning of a string that has not ended, as far as its end depends on it
        self.deepest = 0

    def push(self, piece: bytes) -> None:
        """The next bytes of the body."""
        text = self._open + piece
        left = STRING.sub(b"", text + END)
        self._open = b""
        if not left.endswith(END):  # a string has taken it
            escaping = (len(text) - len(text.rstrip(ESCAPE))) % 2
            self._open = QUOTE + ESCAPE * escaping
        signs = left.translate(None, OTHERS).translate(bytes.maketrans(OPENING + CLOSING, b"\1\1\0\0"))
        self.deepest = max(self.deepest, max(accumulate(map(STEPS.__getitem__, signs), initial=self._level)))
        self._level += 2 * signs.count(1) - len(signs)


def openings(piece: bytes) -> int:
    """No JSON is nested deeper than it has opening brackets, in strings or not."""
    return piece.count(b"[") + piece.count(b"{")
