"""Reasoning between its markers, at the beginning of an output. Blanks beside the markers belong to them, except where
a structure begins right behind the closing one: then they are part of it."""

from __future__ import annotations

import enum

import msgspec

from penstock.engine_core.parsers.scanning import BLANKS, FreeText, Lead
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece


class Markers(msgspec.Struct, frozen=True):
    """What stands before a model's reasoning and behind it. `others` are found too; `answer` is what some outputs put
    around what follows, which is dropped."""

    opening: str
    closing: str
    others: tuple[Markers, ...] = ()
    answer: tuple[str, ...] = ()


class Place(enum.Enum):
    """Where the text stands."""

    START = enum.auto()
    INSIDE = enum.auto()
    CLOSED = enum.auto()  # behind the closing marker, before anything else
    ANSWER = enum.auto()  # in its marks
    OVER = enum.auto()


class ReasoningParser:
    """`inside`: the output begins within the reasoning. An opening marker that the model still writes is dropped."""

    __slots__ = ("_answer", "_exact", "_fresh", "_inside", "_lead", "_mark", "_openings", "_place", "_text")

    def __init__(self, markers: Markers, *, inside: bool, exact: bool = False) -> None:
        known = (markers, *markers.others)
        self._openings = tuple([each.opening for each in known])
        self._answer = markers.answer
        self._exact = exact  # what stands behind the closing marker is content to the letter
        self._inside = inside
        self._fresh = True  # nothing but blanks has been reasoned
        self._place = Place.START
        self._lead = Lead()
        self._mark = ""  # as much of an opening marker as has come
        self._text = FreeText(*(each.closing for each in known))

    @property
    def thinking(self) -> bool:
        return self._place is Place.INSIDE or (self._inside and self._place is Place.START)

    @property
    def over(self) -> bool:
        """Whether what comes is none of this parser's."""
        return self._place is Place.OVER

    def push(self, text: str, out: list[Piece]) -> str:
        """What stands behind the reasoning, once it is over."""
        while text:
            match self._place:
                case Place.START:
                    text = self._start(text)
                case Place.INSIDE:
                    text = self._reason(text, out)
                case Place.CLOSED:
                    text = self._closed(text)
                case Place.ANSWER:
                    return self._answered(text)
                case Place.OVER:
                    return text
        return ""

    def flush(self, out: list[Piece]) -> str:
        """What was held and is no reasoning."""
        held = self._lead.held + self._mark
        match self._place:
            case Place.START if not self._inside:
                return held
            case Place.START:
                reasoned(held.lstrip(BLANKS), out)
            case Place.INSIDE:
                reasoned(self._text.release(), out)
            case Place.CLOSED:
                return self._mark
            case Place.ANSWER:
                return self._text.release()
        return ""

    def _start(self, text: str) -> str:
        rest = self._mark + (text if self._mark else self._lead.push(text))
        if self._may_begin(rest, self._openings):
            return ""
        for opening in self._openings:
            if rest.startswith(opening):
                self._place, self._mark = Place.INSIDE, ""
                return rest[len(opening) :]
        self._place, self._mark = Place.INSIDE if self._inside else Place.OVER, ""
        return rest if self._inside else self._lead.held + rest

    def _may_begin(self, text: str, marks: tuple[str, ...]) -> bool:
        """Whether more must come to tell; the text is held then."""
        found = any(len(text) < len(each) and each.startswith(text) for each in marks)
        if found:
            self._mark = text
        return found

    def _closed(self, text: str) -> str:
        rest = self._mark + (text if self._mark else text.lstrip(BLANKS))
        if not rest or self._may_begin(rest, self._answer[:1]):
            return ""
        self._mark, self._place = "", Place.OVER
        if self._answer and rest.startswith(self._answer[0]):
            self._place, self._text, self._fresh = Place.ANSWER, FreeText(self._answer[1]), True
            return rest[len(self._answer[0]) :]
        return rest

    def _answered(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip(BLANKS)
            self._fresh = not text
        given, rest = self._text.push(text)
        if rest is None:
            return given
        self._place = Place.OVER
        return given + rest

    def _reason(self, text: str, out: list[Piece]) -> str:
        if self._fresh:
            text = text.lstrip(BLANKS)
            self._fresh = not text
        given, rest = self._text.push(text)
        reasoned(given, out)
        if rest is None:
            return ""
        self._place = Place.OVER if self._exact else Place.CLOSED
        return rest


def reasoned(text: str, out: list[Piece]) -> None:
    if text:
        out.append(Piece(PieceKind.REASONING, text))
