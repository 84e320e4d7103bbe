"""Calls as a list of Python calls: [f(city="Rome"), g(days=[1, 2])], as Llama 3.2 and Llama 4 models write them.

The list is the whole output, perhaps between <|python_start|> and <|python_end|>, and names functions of the request;
anything else is text. A call goes out when it is complete, since only then its arguments can be written as JSON.
Source: Meta, "Llama 3.2: model cards and prompt formats"; Llama 4's of the same.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Container
from types import MappingProxyType
from typing import ClassVar

from penstock.engine_core.parsers.scanning import PYTHON_SIGNS, CallParser, Lead, ValueEnd, content
from penstock.engine_core.parsers.values import keywords_json
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

OPENING, CLOSING = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"[A-Za-z_][\w.-]*")
LONGEST_NAME = 256
MOST_HELD = 1 << 16  # characters of a call


class State(enum.Enum):
    """What the next character belongs to."""

    START = enum.auto()
    LIST = enum.auto()  # before the bracket
    ITEM = enum.auto()  # before a call
    NAME = enum.auto()
    CALL = enum.auto()  # after a name
    BEHIND = enum.auto()  # after a call
    END = enum.auto()  # after the list
    TEXT = enum.auto()


class PythonicParser(CallParser):
    """Tool calls in Python's syntax. `names`: functions of the request."""

    __slots__ = ("_before", "_end", "_held", "_lead", "_name", "_names")

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        super().__init__(State.START)
        self._before = ""  # text that becomes content unless a call follows
        self._lead = Lead()
        self._held = ""  # prefix of a marker, a name or a call received so far
        self._name = ""
        self._end = ValueEnd(PYTHON_SIGNS)

    def flush(self) -> list[Piece]:
        if self._state in (State.BEHIND, State.END):
            return []
        return content(self._before + self._lead.held + self._name + self._held)

    def _opening(self, text: str, out: list[Piece]) -> str:
        return self._mark(text, OPENING, State.LIST)

    def _closing(self, text: str, out: list[Piece]) -> str:
        return self._mark(text, CLOSING, State.TEXT)

    def _mark(self, text: str, marker: str, state: State) -> str:
        """Consume the marker, if it comes next; blanks may precede it."""
        rest = self._held + (text if self._held else self._lead.push(text))
        if len(rest) < len(marker) and marker.startswith(rest):
            self._held = rest
            return ""
        marked = rest.startswith(marker)
        blanks = self._lead.held
        self._go(state)
        if marked:
            self._before += blanks + marker if state is State.LIST else ""
            return rest[len(marker) :]
        self._before += blanks
        return rest

    def _go(self, state: State) -> None:
        self._state, self._lead, self._held, self._name = state, Lead(), "", ""

    def _between(self, text: str, out: list[Piece]) -> str:
        """Consume a character of the list's syntax; anything else is text."""
        rest = self._lead.push(text)
        if not rest:
            return ""
        match self._state, rest[0]:
            case (State.LIST, "[") | (State.BEHIND, ","):
                self._before += self._lead.held + rest[0]
                self._go(State.ITEM)
                return rest[1:]
            case State.BEHIND, "]":
                self._go(State.END)
                return rest[1:]
            case State.ITEM, _:
                self._state = State.NAME
                return rest
        return self._no_call(rest, out)

    def _no_call(self, rest: str, out: list[Piece]) -> str:
        """The held text is content, and so is the rest of the output."""
        out += content(self._before + self._lead.held + self._name + self._held)
        self._before = ""
        self._go(State.TEXT)
        return rest

    def _named(self, text: str, out: list[Piece]) -> str:
        """The name of a function of the request, up to its parenthesis."""
        at = text.find("(", 0, LONGEST_NAME - len(self._held))
        whole = self._held + (text if at < 0 else text[:at])
        if at < 0 and len(whole) < LONGEST_NAME and NAME.fullmatch(whole):
            self._held = whole
            return ""
        if at >= 0 and NAME.fullmatch(whole) and whole in self._names:
            self._state, self._name, self._held, self._end = State.CALL, whole, "", ValueEnd(PYTHON_SIGNS)
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
        self._go(State.BEHIND)
        return text[end:]

    def _plain(self, text: str, out: list[Piece]) -> str:
        out += content(self._before + text)
        self._before = ""
        return ""

    _steps: ClassVar = MappingProxyType(
        {
            State.START: _opening,
            **dict.fromkeys((State.LIST, State.ITEM, State.BEHIND), _between),
            State.NAME: _named,
            State.CALL: _called,
            State.END: _closing,
            State.TEXT: _plain,
        }
    )
