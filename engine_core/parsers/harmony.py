"""Harmony, in which gpt-oss writes: messages one behind another, each on a channel and perhaps to somebody.

    <|channel|>analysis<|message|>They ask for the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

The prompt has written the first <|start|>assistant, and a token that ends the output takes the place of the last mark.
Analysis is reasoning, and so is what goes to tools of the model's own from there; what goes to a function of the
request is a call; everything else is content. The recipient may stand before the channel as well.
Source: OpenAI, "harmony response format".
"""

from __future__ import annotations

import enum
import re
from collections.abc import Container
from types import MappingProxyType
from typing import ClassVar

from penstock.engine_core.parsers.scanning import CallParser, FreeText, Lead, ValueEnd
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
HEADS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=", " to=")  # what a message begins with, if not with its text
LONGEST_HEADER = 512  # characters
TO_FUNCTION = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class State(enum.Enum):
    """What the next character belongs to."""

    START = enum.auto()  # a message may begin
    HEADER = enum.auto()
    LEAD = enum.auto()  # in a message to a function, before its arguments
    BODY = enum.auto()


class HarmonyParser(CallParser):
    """Messages of one output. `names`: functions of the request, None where it has none; `reasons`: whether analysis is
    told as reasoning, else it is content; `inside`: the output begins within it."""

    __slots__ = ("_end", "_free", "_held", "_joint", "_kind", "_lead", "_name", "_names", "_reasoning", "_told")

    def __init__(self, names: Container[str] | None, *, reasons: bool, inside: bool = False) -> None:
        super().__init__(State.BODY if inside else State.START)
        self._names = names
        self._reasoning = PieceKind.REASONING if reasons else PieceKind.CONTENT
        self._kind = self._reasoning if inside else PieceKind.CONTENT
        self._held = ""  # the beginning of a header
        self._name = ""  # the function that the message goes to
        self._lead = Lead()
        self._free = FreeText(START, END, CALL, RETURN)
        self._end: ValueEnd | None = None  # of the arguments of an open call
        self._told: set[int] = set()  # kinds of earlier messages
        self._joint = ""  # what parts this message from an earlier one of its kind

    @property
    def open(self) -> bool:
        return self._end is not None

    @property
    def thinking(self) -> bool:
        return self._state is State.BODY and self._kind == PieceKind.REASONING

    def flush(self) -> list[Piece]:
        """As `CallParser.flush`. A header that breaks off is no text."""
        out: list[Piece] = []
        match self._state:
            case State.START if not self._free.marker:  # behind a message it is half a mark
                self._tell(self._held, out)
            case State.LEAD:
                self._tell(self._lead.held, out)
            case State.BODY:
                held = self._free.release()
                over = self._kind == PieceKind.ARGUMENTS and self._end is None  # half a mark, or blanks
                self._tell("" if over else held, out)
        return out

    def _begin(self, text: str, out: list[Piece]) -> str:
        whole, self._held = self._held + text, ""
        if whole.startswith(HEADS):
            self._state = State.HEADER
        elif any(each.startswith(whole) for each in HEADS):
            self._held = whole
            return ""
        else:
            self._enter(PieceKind.CONTENT)
        return whole

    def _header(self, text: str, out: list[Piece]) -> str:
        whole, self._held = self._held + text, ""
        at = whole.find(MESSAGE, 0, LONGEST_HEADER)
        if at < 0 and len(whole) < LONGEST_HEADER:
            self._held = whole
            return ""
        if at < 0:
            self._enter(PieceKind.CONTENT)
            self._tell(whole[:LONGEST_HEADER], out)
            return whole[LONGEST_HEADER:]
        header = whole[:at].rpartition(START)[2]
        to = TO_FUNCTION.search(header)
        self._enter(self._reasoning if ANALYSIS.search(header) else PieceKind.CONTENT)
        if to is not None and self._names is not None and ("to=functions." in header or to[1] in self._names):
            self._state, self._name, self._lead = State.LEAD, to[1], Lead()
        return whole[at + len(MESSAGE) :]

    def _enter(self, kind: PieceKind) -> None:
        self._state, self._kind = State.BODY, kind
        self._joint = "\n" if kind in self._told else ""

    def _arguments(self, text: str, out: list[Piece]) -> str:
        """The beginning of a call's arguments; what is no object goes where its channel says."""
        rest = self._lead.push(text)
        if not rest:
            return ""
        self._state = State.BODY
        if rest[0] != "{":
            return self._lead.held + rest
        out.append(Piece(PieceKind.CALL, self._name))
        self._kind, self._end, self._joint = PieceKind.ARGUMENTS, ValueEnd(), ""
        return rest

    def _body(self, text: str, out: list[Piece]) -> str:
        given, rest = self._free.push(text)
        if self._end is not None and self._end.find(given) >= 0:
            self._end = None
        if rest is None:
            self._tell(given, out)
            return ""
        self._tell(given if self._kind == PieceKind.ARGUMENTS else given + self._free.blanks, out)
        self._end, self._state = None, State.START
        return START + rest if self._free.marker == START else rest

    def _tell(self, text: str, out: list[Piece]) -> None:
        if text:
            out.append(Piece(self._kind, self._joint + text))
            self._told.add(self._kind)
            self._joint = ""

    _steps: ClassVar = MappingProxyType({
        State.START: _begin, State.HEADER: _header, State.LEAD: _arguments, State.BODY: _body
    })  # fmt: skip
