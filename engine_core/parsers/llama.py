"""Calls as Llama 3 models write them: the output is {"name": ..., "parameters": {...}}, several with ";" between them.

A call stands at the beginning of the output or behind <|python_tag|>. JSON there is a call only if it names a function
of the request: a model may answer in JSON as well. Source: Meta, "Llama 3.1: model cards and prompt formats".
"""

from __future__ import annotations

import enum
from collections.abc import Container
from types import MappingProxyType
from typing import ClassVar

from penstock.engine_core.parsers.call_object import CallObject, Stage
from penstock.engine_core.parsers.scanning import BLANKS, CallParser, FreeText, Lead, content
from penstock.protocol.outputs import Piece

MARKER = "<|python_tag|>"
BETWEEN = BLANKS + ";"


class State(enum.Enum):
    """What the next character belongs to."""

    LEAD = enum.auto()  # a call may begin: at the start, after the marker, after a call
    CALL = enum.auto()
    TEXT = enum.auto()


class LlamaParser(CallParser):
    """Tool calls of Llama 3 models. `names`: functions of the request."""

    __slots__ = ("_before", "_call", "_called", "_lead", "_names", "_text")

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        super().__init__(State.LEAD)
        self._before = ""  # the marker with its blanks: content unless a call follows
        self._called = False  # the lead follows a call
        self._lead = Lead()
        self._text = FreeText(MARKER)
        self._call = CallObject(names)

    @property
    def open(self) -> bool:
        return self._state is State.CALL and self._call.stage is Stage.ARGUMENTS

    def flush(self) -> list[Piece]:
        if self._state is State.TEXT:
            return content(self._text.release())
        if self._state is State.CALL and self._call.stage is not Stage.HEAD:
            return content(self._call.held.strip(BLANKS))
        if self._state is State.LEAD and self._called:
            return []
        return content(self._before + self._lead.held + (self._call.held if self._state is State.CALL else ""))

    def _begin(self, text: str, out: list[Piece]) -> str:
        rest = self._lead.push(text)
        if rest.startswith("{"):
            self._state, self._call = State.CALL, CallObject(self._names)
        elif rest and self._before:
            self._no_call(out)
        elif rest:  # blanks at the start may belong to a marker
            self._state = State.TEXT
            return self._lead.held + rest
        return rest

    def _take(self, text: str, out: list[Piece]) -> str:
        rest = self._call.push(text, out)
        if self._call.stage is Stage.DONE:
            self._state, self._lead, self._before, self._called = State.LEAD, Lead(BETWEEN), "", True
        elif self._call.stage is Stage.FAILED:
            self._no_call(out)
        return rest

    def _no_call(self, out: list[Piece]) -> None:
        out += content(self._before + self._lead.held + (self._call.held if self._state is State.CALL else ""))
        self._state = State.TEXT

    def _free(self, text: str, out: list[Piece]) -> str:
        given, rest = self._text.push(text)
        out += content(given)
        if rest is None:
            return ""
        self._state, self._lead, self._called = State.LEAD, Lead(), False
        self._before = self._text.blanks + MARKER
        return rest

    _steps: ClassVar = MappingProxyType({State.LEAD: _begin, State.CALL: _take, State.TEXT: _free})
