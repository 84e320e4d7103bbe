"""Calls with an element for each argument, anywhere in the text, as Qwen3-Coder and GLM-4.5 write them:

    <tool_call>                     <tool_call>get_weather
    <function=get_weather>          <arg_key>city</arg_key>
    <parameter=city>                <arg_value>Rome</arg_value>
    Rome                            </tool_call>
    </parameter>
    </function>
    </tool_call>

Strings stand as they are and other values as JSON, so the function's schema tells whether 5 is a number. A call goes
out when it is complete, since only then it is known to be one. Source: the chat templates of both models.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping

import msgspec

from engine_core.text.parsers.pieces import content
from engine_core.text.parsers.prose import Prose
from engine_core.text.parsers.values import Kinds, value_of
from protocol.messages import Piece, PieceKind

OPENING, CLOSING = "<tool_call>", "</tool_call>"
MOST_HELD = 1 << 18  # characters of a call
FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>\s*")
PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>\s*\Z)", re.DOTALL)
FUNCTION_END = re.compile(r"</function>\s*\Z")
NAME = re.compile(r"\s*([^<>\s]+)\s*")
ARGUMENT = re.compile(
    r"<arg_key>\s*([^<>\s]+)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
)
END = re.compile(r"\Z")

Written = tuple[str, list[tuple[str, str]]]  # a call's name, and its arguments' names and texts
Reading = Callable[[str], Written | None]


class Place(enum.Enum):
    """Where the text stands."""

    TEXT = enum.auto()
    CALL = enum.auto()  # behind the opening marker


class TaggedParser:
    """As `engine_core.text.parsers.output.CallParser`. `kinds`: of each function's parameters."""

    __slots__ = ("_held", "_kinds", "_place", "_prose", "_read", "_size", "_tail")

    open = False  # a call goes out whole

    def __init__(self, read: Reading, kinds: Mapping[str, Mapping[str, Kinds]]) -> None:
        self._read = read
        self._kinds = kinds
        self._place = Place.TEXT
        self._prose = Prose(OPENING)
        self._held: list[str] = []  # a call as far as it has come, but for the tail
        self._size = 0  # of the call, tail included
        self._tail = ""  # its last characters, which may be the beginning of the marker

    def push(self, text: str) -> list[Piece]:
        """As `CallParser.push`."""
        out: list[Piece] = []
        while text:
            text = self._free(text, out) if self._place is Place.TEXT else self._hold(text, out)
        return out

    def flush(self) -> list[Piece]:
        """As `CallParser.flush`."""
        if self._place is Place.CALL:
            return content(self._prose.blanks + OPENING + "".join(self._held) + self._tail)
        return self._prose.flush()

    def _free(self, text: str, out: list[Piece]) -> str:
        rest = self._prose.push(text, out)
        if rest is None:
            return ""
        self._place, self._held, self._tail, self._size = Place.CALL, [], "", 0
        return rest

    def _hold(self, text: str, out: list[Piece]) -> str:
        room = MOST_HELD - self._size
        whole = self._tail + text[:room]
        at = whole.find(CLOSING)
        if at < 0 and len(text) < room:
            cut = max(0, len(whole) - len(CLOSING) + 1)
            self._held.append(whole[:cut])
            self._tail = whole[cut:]
            self._size += len(text)
            return ""
        end = at if at >= 0 else len(whole)
        body = "".join(self._held) + whole[:end]
        call = self._read(body) if at >= 0 else None
        marker = CLOSING if at >= 0 else ""
        if call is None:
            out += content(self._prose.blanks + OPENING + body + marker)
        else:
            out += (Piece(PieceKind.CALL, call[0]), Piece(PieceKind.ARGUMENTS, self._arguments(call)))
        self._place = Place.TEXT
        self._prose.resume(called=call is not None)
        return text[end + len(marker) - len(self._tail) :]

    def _arguments(self, call: Written) -> str:
        name, pairs = call
        kinds = self._kinds.get(name, {})
        values = {key: msgspec.Raw(value_of(text, kinds.get(key, frozenset()))) for key, text in pairs}
        return msgspec.json.encode(values).decode()


def read_functions(body: str) -> Written | None:
    """What stands between the markers as Qwen3-Coder writes it; None if that is no call."""
    return read(body, FUNCTION, PARAMETER, FUNCTION_END)


def read_pairs(body: str) -> Written | None:
    """The same as GLM-4.5 writes it."""
    return read(body, NAME, ARGUMENT, END)


def read(body: str, head: re.Pattern[str], argument: re.Pattern[str], end: re.Pattern[str]) -> Written | None:
    begun = head.match(body)
    if begun is None:
        return None
    at, pairs = begun.end(), []
    while found := argument.match(body, at):
        pairs.append((found[1], found[2]))
        at = found.end()
    return (begun[1], pairs) if end.match(body, at) else None
