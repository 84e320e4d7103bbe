"""Text that comes in cuts, read as if all of it were there: what parsers of outputs have in common.

A parser is a generator over a `Scan`, which waits where more text is needed to go on. So how the text is cut changes
nothing but the cuts between pieces. The text around calls is content, but for the blanks that follow a call and lead to
nothing.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # what it returns is known once enough text has come

BLANKS = " \t\r\n"
MOST_BLANKS = 64  # characters before a marker that belong to it
INSIDE: Mapping[str, re.Pattern[str]] = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
JSON_SIGNS = re.compile(r'["{}\[\]]')
PYTHON_SIGNS = re.compile(r"""["'(){}\[\]]""")


class Scan:
    """The text that was not taken yet, and the pieces that are certain."""

    __slots__ = ("blanks", "open", "over", "pieces", "text", "trailing")

    def __init__(self) -> None:
        self.text = ""
        self.open = False  # a call has begun whose arguments have not ended; never one that is told whole
        self.over = False  # no more comes
        self.pieces: list[Piece] = []
        self.blanks = ""  # that stood before the marker that was found last
        self.trailing = False  # no content since a call

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def tell(self, text: str, kind: PieceKind = PieceKind.CONTENT) -> None:
        if text:
            self.pieces.append(Piece(kind, text))
            self.trailing = False

    def tell_call(self, name: str, arguments: str = "") -> None:
        self.pieces.append(Piece(PieceKind.CALL, name))
        self.tell(arguments, PieceKind.ARGUMENTS)

    def more(self) -> Reading[bool]:
        """Whether any text has come behind what is there; False: the output is over."""
        size = len(self.text)
        while len(self.text) == size and not self.over:
            yield
        return len(self.text) > size

    def lead(self, blanks: str = BLANKS) -> Reading[str]:
        """Blanks before something else, which are taken. One more than MOST_BLANKS is something else."""
        while True:
            count = min(len(self.text) - len(self.text.lstrip(blanks)), MOST_BLANKS)
            if count < len(self.text) or not (yield from self.more()):
                return self.take(count)

    def skip_blanks(self) -> Reading[None]:
        """Drop any number of them."""
        while not (left := self.text.lstrip(BLANKS)):
            self.text = ""
            if not (yield from self.more()):
                return
        self.text = left

    def mark(self, marks: Sequence[str]) -> Reading[str]:
        """Which of these comes next, and is taken; empty: none."""
        while any(len(self.text) < len(each) and each.startswith(self.text) for each in marks):
            if not (yield from self.more()):
                return ""
        return self.take(len(next((each for each in marks if self.text.startswith(each)), "")))

    def may_be(self, marks: Sequence[str]) -> bool:
        """Whether the output has broken off where one of these may have come."""
        return self.over and any(each.startswith(self.text) for each in marks)

    def until(self, markers: Sequence[str], tell: Callable[[str], None] | None = None) -> Reading[str]:
        """The first marker that stands in the text, which is taken, and all before it is told: as content, or by
        `tell`. Empty: the output is over, and what may be the beginning of one is left. Blanks right before a marker
        belong to it, as far as they are held."""
        tell = tell or self.tell
        while True:
            text = self.text
            begun = [each for each in markers if each[0] in text]
            found = [(at, each) for each in begun if (at := text.find(each)) >= 0]
            held = max([partial_end(text, each) for each in begun], default=0)
            at, marker = min(found) if found else (len(text) - held, "")
            cut = blanks_before(text, at)
            tell(text[:cut])
            if marker:
                self.blanks, self.text = text[cut:at], text[at + len(marker) :]
                return marker
            self.text = text[cut:]
            if not (yield from self.more()):
                return ""

    def all(self, kind: PieceKind = PieceKind.CONTENT) -> Reading[None]:
        """Tell whatever comes."""
        while self.text or (yield from self.more()):
            self.tell(self.take(len(self.text)), kind)

    def arguments(self) -> Reading[None]:
        """Tell a JSON value as it comes, up to its end."""
        self.open, value = True, ValueEnd()
        while True:
            end = value.find(self.text)
            self.tell(self.take(end if end >= 0 else len(self.text)), PieceKind.ARGUMENTS)
            if end >= 0:
                self.open = False
                return
            if not (yield from self.more()):
                return

    def end(self) -> None:
        """The output is over: what is left is content, but for blanks behind a call."""
        if not self.trailing or self.text.strip(BLANKS):
            self.tell(self.take(len(self.text)))


class StreamParser(ABC):
    """Takes an output apart as it comes."""

    __slots__ = ("_reading", "_scan", "thinking")

    def __init__(self) -> None:
        self.thinking = False  # what comes is reasoning
        self._scan = Scan()
        self._reading = self._read(self._scan)

    @property
    def open(self) -> bool:
        """Whether more of a call's arguments is to come."""
        return self._scan.open

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        self._scan.text += text
        return self._go_on()

    def flush(self) -> list[Piece]:
        """What was held back, once the output is over."""
        self._scan.over = True
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        if next(self._reading, self) is self:  # it has returned
            self._scan.text = ""
        found, self._scan.pieces = self._scan.pieces, []
        return found

    @abstractmethod
    def _read(self, scan: Scan) -> Reading[None]:
        """Read all of the output. What comes once this has returned is dropped."""


def partial_end(text: str, marker: str) -> int:
    """Characters at the end of `text` that could be the beginning of `marker`, which `text` does not hold."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


def blanks_before(text: str, end: int) -> int:
    """Where the blanks begin that stand right before `end`, at most MOST_BLANKS."""
    start = end
    while start and end - start < MOST_BLANKS and text[start - 1] in BLANKS:
        start -= 1
    return start


class ValueEnd:
    """Where a value in brackets ends: brackets are counted, strings are passed over, nothing else is judged.

    `signs` are the brackets that count and the quotes that open strings.
    """

    __slots__ = ("_depth", "_escaped", "_quote", "_signs")

    def __init__(self, signs: re.Pattern[str] = JSON_SIGNS, depth: int = 0) -> None:
        self._signs = signs
        self._depth = depth
        self._quote = ""  # that ends the string we are in
        self._escaped = False

    def find(self, text: str) -> int:
        """How much of `text`, which goes on what came before, belongs to the value up to its end; -1: all, and more."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (INSIDE[self._quote] if self._quote else self._signs).search(text, at)
            if found is None:
                return -1
            at = found.end()
            if self._count(found[0]):
                return at
        return -1

    def _count(self, sign: str) -> bool:
        """Whether the value ends with this sign."""
        if sign == "\\":
            self._escaped = True
        elif self._quote:
            self._quote = ""
        elif sign in INSIDE:
            self._quote = sign
        elif sign in "([{":
            self._depth += 1
        else:
            self._depth -= 1
            return self._depth <= 0
        return False


def content(text: str) -> list[Piece]:
    """Text as it is; no piece for none."""
    return [Piece(PieceKind.CONTENT, text)] if text else []


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same with neighbours of a kind as one; each call begins a piece of its own."""
    kinds: list[int] = []
    texts: list[list[str]] = []
    for piece in pieces:
        if kinds and kinds[-1] == piece.kind != PieceKind.CALL:
            texts[-1].append(piece.text)
        else:
            kinds.append(piece.kind)
            texts.append([piece.text])
    return tuple(Piece(kind, "".join(parts)) for kind, parts in zip(kinds, texts, strict=True))


def leading_text(pieces: list[Piece]) -> tuple[str, tuple[Piece, ...]]:
    """The content that comes first, and what follows it."""
    count = next((n for n, piece in enumerate(pieces) if piece.kind != PieceKind.CONTENT), len(pieces))
    return "".join([piece.text for piece in pieces[:count]]), tuple(pieces[count:])
