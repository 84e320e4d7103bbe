"""Calls as Llama 3 models write them: the output is {"name": ..., "parameters": {...}}, several with ";" between them.

A call stands at the beginning of the output or behind <|python_tag|>. JSON there is a call only if it names a function
of the request: a model may answer in JSON as well. Source: Meta, "Llama 3.1: model cards and prompt formats".
"""

from __future__ import annotations

import enum
from collections.abc import Container

from penstock.engine_core.parsers.call_object import CallObject, Stage
from penstock.engine_core.parsers.scanning import BLANKS, FreeText, Lead, content
from penstock.protocol.messages import Piece

MARKER = "<|python_tag|>"
BETWEEN = BLANKS + ";"


class Place(enum.Enum):
    """Where the text stands."""

    LEAD = enum.auto()  # where a call may begin: at the start, behind the marker, behind a call
    CALL = enum.auto()
    TEXT = enum.auto()


class LlamaParser:
    """As `engine_core.parsers.output.CallParser`."""

    __slots__ = ("_before", "_call", "_called", "_lead", "_names", "_place", "_text")

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._place = Place.LEAD
        self._before = ""  # the marker with its blanks: content unless a call follows
        self._called = False  # the lead stands behind a call
        self._lead = Lead()
        self._text = FreeText(MARKER)
        self._call = CallObject(names)

    @property
    def open(self) -> bool:
        """As `CallParser.open`."""
        return self._place is Place.CALL and self._call.stage is Stage.ARGUMENTS

    def push(self, text: str) -> list[Piece]:
        """As `CallParser.push`."""
        out: list[Piece] = []
        while text:
            match self._place:
                case Place.LEAD:
                    text = self._begin(text, out)
                case Place.CALL:
                    text = self._take(text, out)
                case Place.TEXT:
                    text = self._free(text, out)
        return out

    def flush(self) -> list[Piece]:
        """As `CallParser.flush`."""
        match self._place:
            case Place.LEAD:
                return [] if self._called else content(self._before + self._lead.held)
            case Place.CALL if self._call.stage is Stage.HEAD:
                return content(self._before + self._lead.held + self._call.held)
            case Place.CALL:
                return content(self._call.held.strip(BLANKS))
            case Place.TEXT:
                return content(self._text.release())

    def _begin(self, text: str, out: list[Piece]) -> str:
        rest = self._lead.push(text)
        if rest.startswith("{"):
            self._place, self._call = Place.CALL, CallObject(self._names)
        elif rest and self._before:
            self._no_call(out)
        elif rest:  # blanks at the start may belong to a marker
            self._place = Place.TEXT
            return self._lead.held + rest
        return rest

    def _take(self, text: str, out: list[Piece]) -> str:
        rest = self._call.push(text, out)
        if self._call.stage is Stage.FAILED:
            self._no_call(out)
        elif self._call.stage is Stage.DONE:
            self._place, self._lead, self._before, self._called = Place.LEAD, Lead(BETWEEN), "", True
        return rest

    def _no_call(self, out: list[Piece]) -> None:
        out += content(self._before + self._lead.held + (self._call.held if self._place is Place.CALL else ""))
        self._place = Place.TEXT

    def _free(self, text: str, out: list[Piece]) -> str:
        given, rest = self._text.push(text)
        out += content(given)
        if rest is None:
            return ""
        self._place, self._lead, self._called = Place.LEAD, Lead(), False
        self._before = self._text.blanks + MARKER
        return rest
