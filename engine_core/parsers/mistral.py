"""Calls as Mistral models write them, behind the control token [TOOL_CALLS].

Two forms: a list, [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and, since version 11 of their tokenizer, a
name with its arguments, [TOOL_CALLS]name[ARGS]{...}, for each call; [CALL_ID]id may stand between, and [ARGS] may be
left out. Source: mistral-common, "Tool calling".
"""

from __future__ import annotations

import enum
import re

from penstock.engine_core.parsers.call_object import CallObject, Stage
from penstock.engine_core.parsers.scanning import BLANKS, Lead, Prose, ValueEnd, content
from penstock.protocol.messages import Piece, PieceKind

MARKER = "[TOOL_CALLS]"
NAMED = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\]\s*[^\s\[\]{}]*)?\s*(?:\[ARGS\])?\s*(?=\{)")
LONGEST_NAME = 256  # characters from the marker to the arguments


class Place(enum.Enum):
    """Where the text stands."""

    TEXT = enum.auto()
    OPEN = enum.auto()  # behind the marker
    ITEM = enum.auto()  # in a list, before a call
    CALL = enum.auto()  # in a call of a list
    BEHIND = enum.auto()  # in a list, behind a call
    NAME = enum.auto()
    ARGUMENTS = enum.auto()  # behind a name


class MistralParser:
    """As `engine_core.parsers.output.CallParser`."""

    __slots__ = ("_before", "_call", "_end", "_lead", "_listed", "_name", "_place", "_prose")

    def __init__(self) -> None:
        self._place = Place.TEXT
        self._prose = Prose(MARKER)
        self._before = ""  # what goes out as content unless a call follows
        self._lead = Lead()
        self._name = ""
        self._call = CallObject()
        self._listed = False
        self._end = ValueEnd()

    @property
    def open(self) -> bool:
        """As `CallParser.open`."""
        inside = self._place is Place.CALL and self._call.stage is Stage.ARGUMENTS
        return inside or self._place is Place.ARGUMENTS

    def push(self, text: str) -> list[Piece]:
        """As `CallParser.push`."""
        out: list[Piece] = []
        while text:
            match self._place:
                case Place.TEXT:
                    text = self._free(text, out)
                case Place.OPEN | Place.ITEM | Place.BEHIND:
                    text = self._between(text, out)
                case Place.CALL:
                    text = self._take(text, out)
                case Place.NAME:
                    text = self._named(text, out)
                case Place.ARGUMENTS:
                    text = self._arguments(text, out)
        return out

    def flush(self) -> list[Piece]:
        """As `CallParser.flush`."""
        match self._place:
            case Place.TEXT:
                return self._prose.flush()
            case Place.CALL if self._call.stage is not Stage.HEAD:
                return content(self._call.held.strip(BLANKS))
            case Place.CALL:
                return content(self._before + self._lead.held + self._call.held)
            case Place.ARGUMENTS | Place.BEHIND:
                return []
            case _:
                return content(self._before + self._lead.held + self._name)

    def _free(self, text: str, out: list[Piece]) -> str:
        rest = self._prose.push(text, out)
        if rest is None:
            return ""
        self._before = self._prose.blanks + MARKER
        self._go(Place.OPEN)
        return rest

    def _go(self, place: Place) -> None:
        self._place, self._lead, self._name = place, Lead(), ""

    def _between(self, text: str, out: list[Piece]) -> str:
        """One of the characters that lead on; anything else is text."""
        rest = self._lead.push(text)
        if not rest:
            return ""
        sign = rest[0]
        match self._place, sign:
            case Place.OPEN, "[":
                self._before += self._lead.held + sign
                self._go(Place.ITEM)
                return rest[1:]
            case (Place.OPEN | Place.ITEM), "{":
                self._listed = self._place is Place.ITEM
                self._place, self._call = Place.CALL, CallObject()
            case Place.OPEN, _ if sign not in BLANKS + "]}":
                self._place = Place.NAME
            case Place.BEHIND, ",":
                self._before = self._lead.held + sign
                self._go(Place.ITEM)
                return rest[1:]
            case Place.BEHIND, "]":
                self._place = Place.TEXT
                self._prose.resume(called=True)
                return rest[1:]
            case _:
                self._no_call("" if self._place is Place.BEHIND else self._before, out)
        return rest

    def _no_call(self, before: str, out: list[Piece]) -> None:
        held = self._call.held if self._place is Place.CALL else self._name
        out += content(before + self._lead.held + held)
        self._place = Place.TEXT
        self._prose.resume(called=False)

    def _take(self, text: str, out: list[Piece]) -> str:
        rest = self._call.push(text, out)
        if self._call.stage is Stage.FAILED:
            self._no_call(self._before, out)
        elif self._call.stage is Stage.DONE and self._listed:
            self._go(Place.BEHIND)
        elif self._call.stage is Stage.DONE:
            self._place = Place.TEXT
            self._prose.resume(called=True)
        return rest

    def _named(self, text: str, out: list[Piece]) -> str:
        """The name up to the brace of its arguments, which must come soon."""
        brace = text.find("{", 0, LONGEST_NAME - len(self._name))
        line = self._name + (text if brace < 0 else text[: brace + 1])
        if brace < 0 and len(line) < LONGEST_NAME:
            self._name = line
            return ""
        found = NAMED.match(line) if brace >= 0 else None
        if found is not None and found.end() == len(line) - 1:
            out.append(Piece(PieceKind.CALL, found[1]))
            self._place, self._end = Place.ARGUMENTS, ValueEnd()
            return text[brace:]
        cut = brace if brace >= 0 else LONGEST_NAME - len(self._name)
        self._name += text[:cut]
        self._no_call(self._before, out)
        return text[cut:]

    def _arguments(self, text: str, out: list[Piece]) -> str:
        end = self._end.find(text)
        given = text if end < 0 else text[:end]
        out.append(Piece(PieceKind.ARGUMENTS, given))
        if end < 0:
            return ""
        self._place = Place.TEXT
        self._prose.resume(called=True)
        return text[end:]
