"""One call written as a JSON object: {"name": "f", "arguments": {...}}, or with "parameters"."""

from __future__ import annotations

import enum
import re
from collections.abc import Container
from typing import Any

import msgspec

from penstock.engine_core.parsers.scanning import BLANKS, ValueEnd, content
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

# Up to the arguments, in the order that models are taught; from there on they are passed on as they come.
HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
LONGEST_HEAD = 1024  # characters
MOST_HELD = 1 << 16  # characters of a call in another order
LONGEST_TAIL = 1024  # characters of what follows the arguments


class Stage(enum.Enum):
    """How far the object has come."""

    HEAD = enum.auto()  # held: not yet known to be a call
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()  # held: what stands between the arguments and the closing brace
    DONE = enum.auto()
    FAILED = enum.auto()  # it is no call; `held` is its text


class CallObject:
    """Takes text from the opening brace on. `names`: the only functions that may be called; None: any."""

    __slots__ = ("_end", "_names", "held", "stage")

    def __init__(self, names: Container[str] | None = None) -> None:
        self._names = names
        self._end = ValueEnd()
        self.held = ""
        self.stage = Stage.HEAD

    def push(self, text: str, out: list[Piece]) -> str:
        """What stands behind the object, once the stage is DONE or FAILED."""
        if self.stage is Stage.HEAD:
            text = self._head(text, out)
        if self.stage is Stage.ARGUMENTS:
            text = self._arguments(text, out)
        if self.stage is Stage.TAIL:
            text = self._tail(text, out)
        return text

    def _head(self, text: str, out: list[Piece]) -> str:
        known = len(self.held)
        whole = self.held + text
        found = HEAD.match(whole[:LONGEST_HEAD]) if known < LONGEST_HEAD else None
        name = string_of(found[1]) if found else None
        if found and name is not None:
            if not self._knows(name):
                return self._fail(whole, found.end())
            self.held = ""
            self._begin(name, out)
            return whole[found.end() :]
        end = self._end.find(text[: MOST_HELD - known])
        if end < 0:
            self.held = whole
            return self._fail(whole, MOST_HELD) if len(whole) >= MOST_HELD else ""
        end += known
        call = whole_call(whole[:end])
        if call is None or not self._knows(call[0]):
            return self._fail(whole, end)
        out += (Piece(PieceKind.CALL, call[0]), Piece(PieceKind.ARGUMENTS, call[1]))
        self.held = ""
        self.stage = Stage.DONE
        return whole[end:]

    def _knows(self, name: str) -> bool:
        return bool(name) and (self._names is None or name in self._names)

    def _begin(self, name: str, out: list[Piece]) -> None:
        out.append(Piece(PieceKind.CALL, name))
        self.stage = Stage.ARGUMENTS
        self._end = ValueEnd()

    def _fail(self, whole: str, end: int) -> str:
        self.stage = Stage.FAILED
        self.held = whole[:end]
        return whole[end:]

    def _arguments(self, text: str, out: list[Piece]) -> str:
        end = self._end.find(text)
        given = text if end < 0 else text[:end]
        if given:
            out.append(Piece(PieceKind.ARGUMENTS, given))
        if end < 0:
            return ""
        self.stage = Stage.TAIL
        return text[end:]

    def _tail(self, text: str, out: list[Piece]) -> str:
        """What follows the arguments is dropped when it is JSON, and else is content."""
        whole = self.held + text
        members = whole.lstrip(BLANKS)
        if members and members[0] not in ",}":
            return self._end_with("", whole)
        if not members:
            self.held = whole
            return ""
        end = ValueEnd(depth=1).find(whole[:LONGEST_TAIL])
        if end < 0 and len(whole) < LONGEST_TAIL:
            self.held = whole
            return ""
        if end >= 0 and is_json('{"":0' + whole[:end]):
            return self._end_with("", whole[end:])
        cut = end if end >= 0 else LONGEST_TAIL
        out += content(whole[:cut])
        return self._end_with("", whole[cut:])

    def _end_with(self, held: str, rest: str) -> str:
        self.stage = Stage.DONE
        self.held = held
        return rest


def whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose object is complete; None if it is none."""
    try:
        value: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str):
        return None
    if arguments is None and not value.keys() - {"name", "arguments", "parameters", "type"}:
        return name, "{}"
    if isinstance(arguments, str):  # the object as text, as OpenAI's form has it
        return (name, arguments) if is_json(arguments) and arguments.lstrip(BLANKS).startswith("{") else None
    return (name, msgspec.json.encode(arguments).decode()) if isinstance(arguments, dict) else None


def string_of(quoted: str) -> str | None:
    try:
        return str(msgspec.json.decode(quoted, type=str))
    except msgspec.DecodeError:
        return None


def is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
