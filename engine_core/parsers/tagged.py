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

Qwen3-Coder at times leaves out a marker, above all the opening one behind a sentence, or the end of a parameter. A
function of the request is called all the same, once its element has ended.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import ClassVar

import msgspec

from penstock.engine_core.parsers.scanning import CallParser, Lead, Prose, blanks_before, content, partial_end
from penstock.engine_core.parsers.values import Kinds, value_of
from penstock.protocol.messages import Piece, PieceKind

OPENING, CLOSING = "<tool_call>", "</tool_call>"
BARE, BARE_END = "<function=", "</function>"  # of a call without markers
MOST_HELD = 1 << 18  # characters of a call
LONGEST_NAME = 256  # characters of the name of a call without markers
FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>\s*")
PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>\s*\Z)", re.DOTALL)
# The same where its end is left out: whatever it holds up to the next one is its value.
ENDLESS = re.compile(
    r"<parameter=([^<>\s]+)>\n?(.*?)\n?(?:</parameter>\s*)?(?=<parameter=|</function>\s*\Z)", re.DOTALL
)
FUNCTION_END = re.compile(r"</function>\s*\Z")
BEGUN_NAME = re.compile(r"[^<>\s]*")
NAME = re.compile(r"\s*([^<>\s]+)\s*")
ARGUMENT = re.compile(
    r"<arg_key>\s*([^<>\s]+)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
)
END = re.compile(r"\Z")

Written = tuple[str, list[tuple[str, str]]]  # a call's name, and its arguments' names and texts
Reading = Callable[[str], Written | None]


class State(enum.Enum):
    """What the next character belongs to."""

    TEXT = enum.auto()
    CALL = enum.auto()  # after the opening marker
    NAME = enum.auto()  # of a function without one
    FUNCTION = enum.auto()  # after that name
    BEHIND = enum.auto()  # after such a function, where a closing marker may follow


class TaggedParser(CallParser):
    """Tool calls of Qwen3-Coder and GLM-4.5. `kinds`: types of each function's parameters. `bare`: functions that may
    also be called without the markers."""

    __slots__ = ("_bare", "_held", "_kinds", "_lead", "_prose", "_read", "_size", "_tail")

    def __init__(
        self, read: Reading, kinds: Mapping[str, Mapping[str, Kinds]], bare: Container[str] | None = None
    ) -> None:
        self._read = read
        self._kinds = kinds
        self._bare = () if bare is None else bare
        super().__init__(State.TEXT)
        self._prose = Prose(OPENING) if bare is None else Prose(OPENING, BARE)
        self._held: list[str] = []  # a call as far as it has come, but for the tail
        self._size = 0  # of the call, tail included
        self._tail = ""  # its last characters, which may be the beginning of the marker
        self._lead = Lead()

    def flush(self) -> list[Piece]:
        """As `CallParser.flush`."""
        match self._state:
            case State.TEXT:
                return self._prose.flush()
            case State.BEHIND:
                return []
            case state:
                body = "".join(self._held) + self._tail
                ended = body[: len(body) - partial_end(body, CLOSING)]
                call = self._read(ended) if state is State.CALL and self._bare else None
                return content(self._prose.blanks + self._prose.marker + body) if call is None else self._pieces(call)

    def _free(self, text: str, out: list[Piece]) -> str:
        rest = self._prose.push(text, out)
        if rest is None:
            return ""
        self._state = State.CALL if self._prose.marker == OPENING else State.NAME
        self._held, self._tail, self._size = [], "", 0
        return rest

    def _named(self, text: str, out: list[Piece]) -> str:
        """A function's name, up to the end of its tag; a name that is not the request's is text."""
        line = self._tail + text
        name, end, _ = line[:LONGEST_NAME].partition(">")
        if not end and len(line) < LONGEST_NAME and BEGUN_NAME.fullmatch(name):
            self._tail = line
            return ""
        self._tail = ""
        if not end or name not in self._bare:
            out += content(self._prose.blanks + BARE)
            self._resume(called=False)
            return line
        self._state, self._held, self._size = State.FUNCTION, [name + end], len(name + end)
        return line[self._size :]

    def _hold(self, text: str, out: list[Piece]) -> str:
        """Collect a call up to its closing marker."""
        bare = self._state is State.FUNCTION
        closing = BARE_END if bare else CLOSING
        room = MOST_HELD - self._size
        whole = self._tail + text[:room]
        at = whole.find(closing)
        if at < 0 and len(text) < room:
            cut = max(0, len(whole) - len(closing) + 1)
            self._held.append(whole[:cut])
            self._tail = whole[cut:]
            self._size += len(text)
            return ""
        end = at if at >= 0 else len(whole)
        body, marker = "".join(self._held) + whole[:end], closing if at >= 0 else ""
        call = self._read(BARE + body + marker if bare else body) if at >= 0 else None
        rest = text[end + len(marker) - len(self._tail) :]
        if call is None:
            return self._no_call(body + marker, bare, out) + rest
        out += self._pieces(call)
        if bare:
            self._state, self._lead, self._tail = State.BEHIND, Lead(), ""
        else:
            self._resume(called=True)
        return rest

    def _no_call(self, body: str, bare: bool, out: list[Piece]) -> str:
        """The held text is content, up to a call with markers inside what looked like one without."""
        at = body.find(OPENING) if bare else -1
        end = blanks_before(body, at) if at >= 0 else len(body)
        out += content(self._prose.blanks + self._prose.marker + body[:end])
        self._resume(called=False)
        return body[end:]

    def _behind(self, text: str, out: list[Piece]) -> str:
        """Consume a closing marker: it belongs to the call although the opening one is missing."""
        rest = self._tail + (text if self._tail else self._lead.push(text))
        if len(rest) < len(CLOSING) and CLOSING.startswith(rest):
            self._tail = rest
            return ""
        self._resume(called=True)
        return rest[len(CLOSING) :] if rest.startswith(CLOSING) else self._lead.held + rest

    def _resume(self, *, called: bool) -> None:
        self._state = State.TEXT
        self._prose.resume(called=called)

    def _pieces(self, call: Written) -> list[Piece]:
        name, pairs = call
        kinds = self._kinds.get(name, {})
        values = {key: msgspec.Raw(value_of(text, kinds.get(key, frozenset()))) for key, text in pairs}
        return [Piece(PieceKind.CALL, name), Piece(PieceKind.ARGUMENTS, msgspec.json.encode(values).decode())]

    _steps: ClassVar = MappingProxyType({
        State.TEXT: _free, State.CALL: _hold, State.NAME: _named, State.FUNCTION: _hold, State.BEHIND: _behind
    })  # fmt: skip


def read_functions(body: str) -> Written | None:
    """What stands between the markers as Qwen3-Coder writes it; None if that is no call."""
    return read(body, FUNCTION, PARAMETER, FUNCTION_END) or read(body, FUNCTION, ENDLESS, FUNCTION_END)


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
