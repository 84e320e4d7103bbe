"""Finding markers and the ends of JSON values in text that comes in cuts.

Parsers make pieces, of which the deltas of a choice are made; the text around calls is content, but for the blanks that
follow a call and lead to nothing.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

BLANKS = " \t\r\n"
MOST_BLANKS = 64  # characters before a marker that belong to it
INSIDE: Mapping[str, re.Pattern[str]] = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
JSON_SIGNS = re.compile(r'["{}\[\]]')
PYTHON_SIGNS = re.compile(r"""["'(){}\[\]]""")


class CallParser(ABC):
    """Tells tool calls from content. How the text is cut into deltas changes nothing but the cuts between pieces.

    Each subclass names the method that consumes text in each of its states; it returns the text that is left.
    """

    __slots__ = ("_state",)

    _steps: ClassVar[Mapping[enum.Enum, Callable[[Any, str, list[Piece]], str]]]

    def __init__(self, state: enum.Enum) -> None:
        self._state = state

    @property
    def open(self) -> bool:
        """Whether a call has begun whose arguments have not ended; never for formats whose calls are sent whole."""
        return False

    @property
    def thinking(self) -> bool:
        """Whether what comes is reasoning; never for formats that leave it to its own parser."""
        return False

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        out: list[Piece] = []
        while text:
            text = self._steps[self._state](self, text, out)
        return out

    @abstractmethod
    def flush(self) -> list[Piece]:
        """What was held back, once the output is over."""


def partial_end(text: str, marker: str) -> int:
    """Characters at the end of `text` that could be the beginning of `marker`, which `text` does not hold."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


class FreeText:
    """Text up to one of some markers, the first that stands there. Blanks right before a marker belong to it, as far as
    they are held."""

    __slots__ = ("_held", "_markers", "blanks", "marker")

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._held = ""
        self.marker = ""  # that was found last
        self.blanks = ""  # that stood before it

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that goes out, and what stands behind the marker; None while there was none."""
        if not self._held and text and text[-1] not in BLANKS and not any(each[0] in text for each in self._markers):
            return text, None  # the common case
        whole = self._held + text
        found = [(at, each) for each in self._markers if (at := whole.find(each)) >= 0]
        if not found:
            cut = blanks_before(whole, len(whole) - max(partial_end(whole, each) for each in self._markers))
            self._held = whole[cut:]
            return whole[:cut], None
        self._held = ""
        at, self.marker = min(found)
        cut = blanks_before(whole, at)
        self.blanks = whole[cut:at]
        return whole[:cut], whole[at + len(self.marker) :]

    def release(self) -> str:
        held, self._held = self._held, ""
        return held


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


class Lead:
    """Blanks before something else. `held` are those so far, at most MOST_BLANKS: one more is something else."""

    __slots__ = ("_blanks", "held")

    def __init__(self, blanks: str = BLANKS) -> None:
        self._blanks = blanks
        self.held = ""

    def push(self, text: str) -> str:
        """What stands behind the blanks; empty while nothing does."""
        whole = self.held + text
        count = min(len(whole) - len(whole.lstrip(self._blanks)), MOST_BLANKS)
        self.held = whole[:count]
        return whole[count:]


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


class Prose:
    """Text up to the marker of a call, any number of times. `markers` as of `FreeText`."""

    __slots__ = ("_free", "_trailing")

    def __init__(self, *markers: str) -> None:
        self._free = FreeText(*markers)
        self._trailing = False  # nothing but blanks since a call

    @property
    def blanks(self) -> str:
        """Those that stood before the marker that came last."""
        return self._free.blanks

    @property
    def marker(self) -> str:
        return self._free.marker

    def push(self, text: str, out: list[Piece]) -> str | None:
        """Add to `out` what is content for certain. What stands behind a marker; None where there is none yet."""
        given, rest = self._free.push(text)
        if given:
            out += content(given)
            self._trailing = False
        return rest

    def resume(self, *, called: bool) -> None:
        """Text goes on: behind a call, or because what looked like one is none."""
        self._trailing = called

    def flush(self) -> list[Piece]:
        """What was held back when the output ends in text."""
        held = self._free.release()
        return [] if self._trailing and not held.strip(BLANKS) else content(held)
