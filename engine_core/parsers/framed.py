"""Calls whose arguments are JSON, between markers, anywhere in the text.

A call is an object, {"name": ..., "arguments": {...}}, alone or in a list, or a name with its arguments:

    <tool_call>{"name": "f", "arguments": {}}</tool_call>       Hermes and Qwen; Granite 4 and ERNIE too
    <|tool_call|>[{"name": "f", "arguments": {}}]               Granite 3, Phi 4; behind other words Phi-4-mini, Hunyuan
    [TOOL_CALLS]f[ARGS]{}                                       Mistral, whose older models write a list
    <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>     Kimi K2, several in a section
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>       DeepSeek V3.1, the same

Sources: NousResearch, "Hermes Function Calling"; mistral-common, "Tool calling"; the chat templates of the others.
"""

from __future__ import annotations

import enum
import re
from types import MappingProxyType
from typing import ClassVar

import msgspec

from penstock.engine_core.parsers.call_object import CallObject, Stage
from penstock.engine_core.parsers.scanning import BLANKS, CallParser, Lead, Prose, ValueEnd, content
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

LONGEST_NAME = 256  # characters from the marker to the arguments


class Frame(msgspec.Struct, frozen=True):
    """What stands around calls."""

    markers: tuple[str, ...]  # each begins one
    closings: tuple[str, ...] = ()  # that may follow one, and are dropped
    head: re.Pattern[str] | None = None  # from the marker to the arguments, where a name stands before them: group 1


class State(enum.Enum):
    """What the next character belongs to."""

    TEXT = enum.auto()
    OPEN = enum.auto()  # after the marker
    ITEM = enum.auto()  # in a list, before a call
    CALL = enum.auto()  # in an object
    BEHIND = enum.auto()  # in a list, after a call
    NAME = enum.auto()
    ARGUMENTS = enum.auto()  # after a name
    CLOSE = enum.auto()  # after calls


class FramedParser(CallParser):
    """Tool calls between markers."""

    __slots__ = ("_before", "_call", "_end", "_frame", "_lead", "_listed", "_mark", "_name", "_prose")

    def __init__(self, frame: Frame) -> None:
        super().__init__(State.TEXT)
        self._frame = frame
        self._prose = Prose(*frame.markers)
        self._before = ""  # text that becomes content unless a call follows
        self._lead = Lead()  # after a marker, or after a call
        self._name = ""
        self._mark = ""  # prefix of a closing marker received so far
        self._call = CallObject()
        self._listed = False
        self._end = ValueEnd()

    @property
    def open(self) -> bool:
        inside = self._state is State.CALL and self._call.stage is Stage.ARGUMENTS
        return inside or self._state is State.ARGUMENTS

    def flush(self) -> list[Piece]:
        """As `CallParser.flush`."""
        match self._state:
            case State.ARGUMENTS | State.BEHIND | State.CLOSE:
                return []
            case State.TEXT:
                return self._prose.flush()
            case State.CALL if self._call.stage is Stage.HEAD:
                return content(self._before + self._lead.held + self._call.held)
            case State.CALL:
                return content(self._call.held.strip(BLANKS))
            case _:
                return content(self._before + self._lead.held + self._name)

    def _free(self, text: str, out: list[Piece]) -> str:
        rest = self._prose.push(text, out)
        if rest is None:
            return ""
        self._before, self._listed = self._prose.blanks + self._prose.marker, False
        self._go(State.OPEN)
        return rest

    def _go(self, state: State) -> None:
        self._state, self._lead, self._name, self._mark = state, Lead(), "", ""

    def _between(self, text: str, out: list[Piece]) -> str:
        """Consume a character of the list's syntax; anything else is text."""
        rest = self._lead.push(text)
        if not rest:
            return ""
        sign = rest[0]
        match self._state, sign:
            case State.OPEN, "[":
                self._before += self._lead.held + sign
                self._listed = True
                self._go(State.ITEM)
                return rest[1:]
            case ((State.OPEN | State.ITEM), "{"):
                self._state, self._call = State.CALL, CallObject()
            case State.OPEN, _ if self._frame.head is not None and sign not in BLANKS + "]}":
                self._state = State.NAME
            case State.BEHIND, ",":
                self._before = self._lead.held + sign
                self._go(State.ITEM)
                return rest[1:]
            case State.BEHIND, "]":
                self._go(State.CLOSE)
                return rest[1:]
            case _:
                self._no_call("" if self._state is State.BEHIND else self._before, out)
        return rest

    def _no_call(self, before: str, out: list[Piece]) -> None:
        held = self._call.held if self._state is State.CALL else self._name
        out += content(before + self._lead.held + held)
        self._state = State.TEXT
        self._prose.resume(called=False)

    def _take(self, text: str, out: list[Piece]) -> str:
        rest = self._call.push(text, out)
        if self._call.stage is Stage.FAILED:
            self._no_call(self._before, out)
        elif self._call.stage is Stage.DONE:
            self._go(State.BEHIND if self._listed else State.CLOSE)
        return rest

    def _named(self, text: str, out: list[Piece]) -> str:
        """The name, up to the brace of its arguments, which must follow within LONGEST_NAME characters."""
        brace = text.find("{", 0, LONGEST_NAME - len(self._name))
        line = self._name + (text if brace < 0 else text[: brace + 1])
        if brace < 0 and len(line) < LONGEST_NAME:
            self._name = line
            return ""
        assert self._frame.head is not None
        found = self._frame.head.match(line) if brace >= 0 else None
        if found is not None and found.end() == len(line) - 1:
            out.append(Piece(PieceKind.CALL, found[1]))
            self._state, self._end = State.ARGUMENTS, ValueEnd()
            return text[brace:]
        text, self._name = self._name + text, ""  # there may be a marker in it
        self._no_call(self._before, out)
        return text

    def _arguments(self, text: str, out: list[Piece]) -> str:
        end = self._end.find(text)
        given = text if end < 0 else text[:end]
        out.append(Piece(PieceKind.ARGUMENTS, given))
        if end < 0:
            return ""
        self._go(State.CLOSE)
        return text[end:]

    def _close(self, text: str, out: list[Piece]) -> str:
        """Consume closing markers; anything else is text, perhaps with the next marker."""
        rest = self._mark + (text if self._mark else self._lead.push(text))
        if any(len(rest) < len(each) and each.startswith(rest) for each in self._frame.closings):
            self._mark = rest
            return ""
        for each in self._frame.closings:
            if rest.startswith(each):
                self._go(State.CLOSE)
                return rest[len(each) :]
        self._state = State.TEXT
        self._prose.resume(called=True)
        return self._lead.held + rest

    _steps: ClassVar = MappingProxyType(
        {
            State.TEXT: _free,
            **dict.fromkeys((State.OPEN, State.ITEM, State.BEHIND), _between),
            State.CALL: _take,
            State.NAME: _named,
            State.ARGUMENTS: _arguments,
            State.CLOSE: _close,
        }
    )
