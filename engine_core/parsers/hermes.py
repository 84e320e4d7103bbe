"""Calls as Hermes and Qwen models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere.

Source: NousResearch, "Hermes Function Calling".
"""

from __future__ import annotations

import enum

from penstock.engine_core.parsers.call_object import CallObject, Stage
from penstock.engine_core.parsers.scanning import BLANKS, Lead, Prose, content
from penstock.protocol.messages import Piece

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Place(enum.Enum):
    """Where the text stands."""

    TEXT = enum.auto()
    OPEN = enum.auto()  # behind the opening marker
    CALL = enum.auto()
    CLOSE = enum.auto()  # behind the call's object


class HermesParser:
    """As `engine_core.parsers.output.CallParser`."""

    __slots__ = ("_call", "_lead", "_mark", "_place", "_prose")

    def __init__(self) -> None:
        self._place = Place.TEXT
        self._prose = Prose(OPENING)
        self._lead = Lead()  # behind a marker, or behind a call
        self._mark = ""  # as much of the closing marker as has come
        self._call = CallObject()

    @property
    def open(self) -> bool:
        """As `CallParser.open`."""
        return self._place is Place.CALL and self._call.stage is Stage.ARGUMENTS

    def push(self, text: str) -> list[Piece]:
        """As `CallParser.push`."""
        out: list[Piece] = []
        while text:
            match self._place:
                case Place.TEXT:
                    text = self._free(text, out)
                case Place.OPEN:
                    text = self._opened(text, out)
                case Place.CALL:
                    text = self._called(text, out)
                case Place.CLOSE:
                    text = self._close(text)
        return out

    def flush(self) -> list[Piece]:
        """As `CallParser.flush`."""
        match self._place:
            case Place.TEXT:
                return self._prose.flush()
            case Place.CALL if self._call.stage is not Stage.HEAD:
                return content(self._call.held.strip(BLANKS))
            case Place.CLOSE:
                return []
            case _:
                return content(self._prose.blanks + OPENING + self._lead.held + self._call.held)

    def _free(self, text: str, out: list[Piece]) -> str:
        rest = self._prose.push(text, out)
        if rest is None:
            return ""
        self._place, self._lead, self._call = Place.OPEN, Lead(), CallObject()
        return rest

    def _opened(self, text: str, out: list[Piece]) -> str:
        rest = self._lead.push(text)
        if rest.startswith("{"):
            self._place = Place.CALL
        elif rest:
            self._no_call(out)
        return rest

    def _called(self, text: str, out: list[Piece]) -> str:
        rest = self._call.push(text, out)
        if self._call.stage is Stage.FAILED:
            self._no_call(out)
        elif self._call.stage is Stage.DONE:
            self._place, self._lead, self._mark = Place.CLOSE, Lead(), ""
        return rest

    def _no_call(self, out: list[Piece]) -> None:
        """The marker and what was held behind it are content."""
        out += content(self._prose.blanks + OPENING + self._lead.held + self._call.held)
        self._place = Place.TEXT
        self._prose.resume(called=False)

    def _close(self, text: str) -> str:
        """Behind the object stands the closing marker; where it does not, what stands there is text."""
        rest = self._mark + (text if self._mark else self._lead.push(text))
        if len(rest) < len(CLOSING) and CLOSING.startswith(rest):
            self._mark = rest
            return ""
        self._place = Place.TEXT
        self._prose.resume(called=True)
        return rest[len(CLOSING) :] if rest.startswith(CLOSING) else self._lead.held + rest
