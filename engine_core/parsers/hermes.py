"""Calls as Hermes and Qwen models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere.

Source: NousResearch, "Hermes Function Calling".
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import ClassVar

from penstock.engine_core.parsers.call_object import CallObject, Stage
from penstock.engine_core.parsers.scanning import BLANKS, CallParser, Lead, Prose, content
from penstock.protocol.messages import Piece

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class State(enum.Enum):
    """What the next character belongs to."""

    TEXT = enum.auto()
    OPEN = enum.auto()  # after the opening marker
    CALL = enum.auto()
    CLOSE = enum.auto()  # after the call's object


class HermesParser(CallParser):
    """Tool calls of Hermes and Qwen models."""

    __slots__ = ("_call", "_lead", "_mark", "_prose")

    def __init__(self) -> None:
        super().__init__(State.TEXT)
        self._prose = Prose(OPENING)
        self._lead = Lead()  # after a marker, or after a call
        self._mark = ""  # prefix of the closing marker received so far
        self._call = CallObject()

    @property
    def open(self) -> bool:
        return self._state is State.CALL and self._call.stage is Stage.ARGUMENTS

    def flush(self) -> list[Piece]:
        """As `CallParser.flush`."""
        match self._state:
            case State.TEXT:
                return self._prose.flush()
            case State.CALL if self._call.stage is not Stage.HEAD:
                return content(self._call.held.strip(BLANKS))
            case State.CLOSE:
                return []
            case _:
                return content(self._prose.blanks + OPENING + self._lead.held + self._call.held)

    def _free(self, text: str, out: list[Piece]) -> str:
        rest = self._prose.push(text, out)
        if rest is None:
            return ""
        self._state, self._lead, self._call = State.OPEN, Lead(), CallObject()
        return rest

    def _opened(self, text: str, out: list[Piece]) -> str:
        rest = self._lead.push(text)
        if rest.startswith("{"):
            self._state = State.CALL
        elif rest:
            self._no_call(out)
        return rest

    def _called(self, text: str, out: list[Piece]) -> str:
        rest = self._call.push(text, out)
        if self._call.stage is Stage.FAILED:
            self._no_call(out)
        elif self._call.stage is Stage.DONE:
            self._state, self._lead, self._mark = State.CLOSE, Lead(), ""
        return rest

    def _no_call(self, out: list[Piece]) -> None:
        """The marker and the text held after it are content."""
        out += content(self._prose.blanks + OPENING + self._lead.held + self._call.held)
        self._state = State.TEXT
        self._prose.resume(called=False)

    def _close(self, text: str, out: list[Piece]) -> str:
        """Consume the closing marker; anything else after the object is text."""
        rest = self._mark + (text if self._mark else self._lead.push(text))
        if len(rest) < len(CLOSING) and CLOSING.startswith(rest):
            self._mark = rest
            return ""
        self._state = State.TEXT
        self._prose.resume(called=True)
        return rest[len(CLOSING) :] if rest.startswith(CLOSING) else self._lead.held + rest

    _steps: ClassVar = MappingProxyType(
        {State.TEXT: _free, State.OPEN: _opened, State.CALL: _called, State.CLOSE: _close}
    )
