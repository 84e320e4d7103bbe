"""Calls as a list of Python calls: [f(city="Rome"), g(days=[1, 2])], as Llama 3.2 and Llama 4 models write them.

The list is the whole output, perhaps between <|python_start|> and <|python_end|>, and names functions of the request;
anything else is text. A call goes out when it is complete, since only then its arguments can be written as JSON.
Source: Meta, "Llama 3.2: model cards and prompt formats"; Llama 4's of the same.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Container

from penstock.engine_core.parsers.scanning import PYTHON_SIGNS, Lead, ValueEnd, content
from penstock.engine_core.parsers.values import keywords_json
from penstock.protocol.messages import Piece, PieceKind

OPENING, CLOSING = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"[A-Za-z_][\w.-]*")
LONGEST_NAME = 256
MOST_HELD = 1 << 16  # characters of a call


class Place(enum.Enum):
    """Where the text stands."""

    START = enum.auto()
    LIST = enum.auto()  # before the bracket
    ITEM = enum.auto()  # before a call
    NAME = enum.auto()
    CALL = enum.auto()  # behind a name
    BEHIND = enum.auto()  # behind a call
    END = enum.auto()  # behind the list
    TEXT = enum.auto()


class PythonicParser:
    """As `engine_core.parsers.output.CallParser`."""

    __slots__ = ("_before", "_end", "_held", "_lead", "_name", "_names", "_place")

    open = False  # a call goes out whole

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._place = Place.START
        self._before = ""  # what goes out as content unless a call follows
        self._lead = Lead()
        self._held = ""  # a marker, a name, a call, as far as it has come
        self._name = ""
        self._end = ValueEnd(PYTHON_SIGNS)

    def push(self, text: str) -> list[Piece]:
        """As `CallParser.push`."""
        out: list[Piece] = []
        while text:
            match self._place:
                case Place.START:
                    text = self._mark(text, OPENING, Place.LIST)
                case Place.LIST | Place.ITEM | Place.BEHIND:
                    text = self._between(text, out)
                case Place.NAME:
                    text = self._named(text, out)
                case Place.CALL:
                    text = self._called(text, out)
                case Place.END:
                    text = self._mark(text, CLOSING, Place.TEXT)
                case Place.TEXT:
                    out += content(self._before + text)
                    self._before = text = ""
        return out

    def flush(self) -> list[Piece]:
        """As `CallParser.flush`."""
        if self._place in (Place.BEHIND, Place.END):
            return []
        return content(self._before + self._lead.held + self._name + self._held)

    def _mark(self, text: str, marker: str, place: Place) -> str:
        """Behind blanks, the marker if it stands there."""
        rest = self._held + (text if self._held else self._lead.push(text))
        if len(rest) < len(marker) and marker.startswith(rest):
            self._held = rest
            return ""
        marked = rest.startswith(marker)
        blanks = self._lead.held
        self._go(place)
        if marked:
            self._before += blanks + marker if place is Place.LIST else ""
            return rest[len(marker) :]
        self._before += blanks
        return rest

    def _go(self, place: Place) -> None:
        self._place, self._lead, self._held, self._name = place, Lead(), "", ""

    def _between(self, text: str, out: list[Piece]) -> str:
        """One of the characters that lead on; anything else is text."""
        rest = self._lead.push(text)
        if not rest:
            return ""
        match self._place, rest[0]:
            case (Place.LIST, "[") | (Place.BEHIND, ","):
                self._before += self._lead.held + rest[0]
                self._go(Place.ITEM)
                return rest[1:]
            case Place.BEHIND, "]":
                self._go(Place.END)
                return rest[1:]
            case Place.ITEM, _:
                self._place = Place.NAME
                return rest
        return self._no_call(rest, out)

    def _no_call(self, rest: str, out: list[Piece]) -> str:
        """What was held is content, and so is the rest of the output."""
        out += content(self._before + self._lead.held + self._name + self._held)
        self._before = ""
        self._go(Place.TEXT)
        return rest

    def _named(self, text: str, out: list[Piece]) -> str:
        """A name of the request up to its parenthesis."""
        at = text.find("(", 0, LONGEST_NAME - len(self._held))
        whole = self._held + (text if at < 0 else text[:at])
        if at < 0 and len(whole) < LONGEST_NAME and NAME.fullmatch(whole):
            self._held = whole
            return ""
        if at >= 0 and NAME.fullmatch(whole) and whole in self._names:
            self._place, self._name, self._held, self._end = Place.CALL, whole, "", ValueEnd(PYTHON_SIGNS)
            return text[at:]
        return self._no_call(text, out)

    def _called(self, text: str, out: list[Piece]) -> str:
        known = len(self._held)
        end = self._end.find(text[: MOST_HELD - known])
        if end < 0:
            self._held += text[: MOST_HELD - known]
            return self._no_call(text[MOST_HELD - known :], out) if len(self._held) == MOST_HELD else ""
        self._held += text[:end]
        arguments = keywords_json(self._held[1:-1])
        if arguments is None:
            return self._no_call(text[end:], out)
        out += (Piece(PieceKind.CALL, self._name), Piece(PieceKind.ARGUMENTS, arguments))
        self._before = ""
        self._go(Place.BEHIND)
        return text[end:]
