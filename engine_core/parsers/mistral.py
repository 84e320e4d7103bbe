"""Calls as Mistral models write them, behind the control token [TOOL_CALLS].

Two forms: a list, [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and, since version 11 of their tokenizer, a
name with its arguments, [TOOL_CALLS]name[ARGS]{...}, for each call; [CALL_ID]id may stand between, and [ARGS] may be
left out. Source: mistral-common, "Tool calling".
"""

from __future__ import annotations

import enum
import re
from types import MappingProxyType
from typing import ClassVar

from penstock.engine_core.parsers.call_object import CallObject, Stage
from penstock.engine_core.parsers.scanning import BLANKS, CallParser, Lead, Prose, ValueEnd, content
from penstock.protocol.messages import Piece, PieceKind

MARKER = "[TOOL_CALLS]"
NAMED = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\]\s*[^\s\[\]{}]*)?\s*(?:\[ARGS\])?\s*(?=\{)")
LONGEST_NAME = 256  # characters from the marker to the arguments


class State(enum.Enum):
    """What the next character belongs to."""

    TEXT = enum.auto()
    OPEN = enum.auto()  # after the marker
    ITEM = enum.auto()  # in a list, before a call
    CALL = enum.auto()  # in a call of a list
    BEHIND = enum.auto()  # in a list, after a call
    NAME = enum.auto()
    ARGUMENTS = enum.auto()  # after a name


class MistralParser(CallParser):
    """Tool calls of Mistral models."""

    __slots__ = ("_before", "_call", "_end", "_lead", "_listed", "_name", "_prose")

    def __init__(self) -> None:
        super().__init__(State.TEXT)
        self._prose = Prose(MARKER)
        self._before = ""  # text that becomes content unless a call follows
        self._lead = Lead()
        self._name = ""
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
            case State.ARGUMENTS | State.BEHIND:
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
        self._before = self._prose.blanks + MARKER
        self._go(State.OPEN)
        return rest

    def _go(self, state: State) -> None:
        self._state, self._lead, self._name = state, Lead(), ""

    def _between(self, text: str, out: list[Piece]) -> str:
        """Consume a character of the list's syntax; anything else is text."""
        rest = self._lead.push(text)
        if not rest:
            return ""
        sign = rest[0]
        match self._state, sign:
            case State.OPEN, "[":
                self._before += self._lead.held + sign
                self._go(State.ITEM)
                return rest[1:]
            case ((State.OPEN | State.ITEM), "{"):
                self._listed = self._state is State.ITEM
                self._state, self._call = State.CALL, CallObject()
            case State.OPEN, _ if sign not in BLANKS + "]}":
                self._state = State.NAME
            case State.BEHIND, ",":
                self._before = self._lead.held + sign
                self._go(State.ITEM)
                return rest[1:]
            case State.BEHIND, "]":
                self._state = State.TEXT
                self._prose.resume(called=True)
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
        elif self._call.stage is Stage.DONE and self._listed:
            self._go(State.BEHIND)
        elif self._call.stage is Stage.DONE:
            self._state = State.TEXT
            self._prose.resume(called=True)
        return rest

    def _named(self, text: str, out: list[Piece]) -> str:
        """The name, up to the brace of its arguments, which must follow within LONGEST_NAME characters."""
        brace = text.find("{", 0, LONGEST_NAME - len(self._name))
        line = self._name + (text if brace < 0 else text[: brace + 1])
        if brace < 0 and len(line) < LONGEST_NAME:
            self._name = line
            return ""
        found = NAMED.match(line) if brace >= 0 else None
        if found is not None and found.end() == len(line) - 1:
            out.append(Piece(PieceKind.CALL, found[1]))
            self._state, self._end = State.ARGUMENTS, ValueEnd()
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
        self._state = State.TEXT
        self._prose.resume(called=True)
        return text[end:]

    _steps: ClassVar = MappingProxyType({
        State.TEXT: _free,
        **dict.fromkeys((State.OPEN, State.ITEM, State.BEHIND), _between),
        State.CALL: _take,
        State.NAME: _named,
        State.ARGUMENTS: _arguments,
    })
