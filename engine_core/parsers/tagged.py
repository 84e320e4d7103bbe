"""Calls that are told once they are whole, between markers, anywhere in the text. Mostly an element for each argument:

    <tool_call>                     <tool_call>get_weather                  <minimax:tool_call>
    <function=get_weather>          <arg_key>city</arg_key>                 <invoke name="get_weather">
    <parameter=city>                <arg_value>Rome</arg_value>             <parameter name="city">Rome</parameter>
    Rome                            </tool_call>                            </invoke>
    </parameter>                                                            </minimax:tool_call>
    </function>
    </tool_call>

Strings stand as they are and other values as JSON, so the function's schema tells whether 5 is a number. DeepSeek V3.2
says it by an attribute. A call goes out when its markers are complete, since only then it is known to be one. Source:
the chat templates of Qwen3-Coder, GLM-4.5, MiniMax-M2, DeepSeek V3.2 and Seed-OSS.

Qwen3-Coder at times leaves out a marker, above all the opening one behind a sentence, or the end of a parameter. A
function of the request is called all the same, once its element has ended.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import msgspec

from penstock.engine_core.parsers.scanning import CallParser, Lead, Prose, blanks_before, content, partial_end
from penstock.engine_core.parsers.values import ANY, TEXT, Kinds, value_of
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

BARE, BARE_END = "<function=", "</function>"  # of a call without markers
MOST_HELD = 1 << 18  # characters of a call
LONGEST_NAME = 256  # characters of the name of a call without markers
BEGUN_NAME = re.compile(r"[^<>\s]*")

Types = Mapping[str, Mapping[str, Kinds]]  # of each function's parameters
Called = tuple[str, str]  # a function's name, and its arguments as JSON
Reading = Callable[[str, Types], list[Called] | None]  # calls of the text between two markers; None: it is none


class Tags(msgspec.Struct, frozen=True):
    """The markers around calls, and what reads the text between them."""

    opening: str
    closing: str
    read: Reading
    bare: bool = False  # BARE may stand without them
    lenient: bool = False  # the end of the output stands for the closing marker


class Elements(msgspec.Struct, frozen=True):
    """A call in elements: its beginning with the name in group 1; an argument, `key` and `value` and perhaps `string`,
    which is true if the value is one; the call's end."""

    head: re.Pattern[str]
    argument: re.Pattern[str]
    end: re.Pattern[str]


class State(enum.Enum):
    """What the next character belongs to."""

    TEXT = enum.auto()
    CALL = enum.auto()  # after the opening marker
    NAME = enum.auto()  # of a function without one
    FUNCTION = enum.auto()  # after that name
    BEHIND = enum.auto()  # after such a function, where a closing marker may follow


class TaggedParser(CallParser):
    """Tool calls that are told whole. `bare`: functions that may be called without the markers, where `tags` know such
    calls."""

    __slots__ = ("_bare", "_held", "_kinds", "_lead", "_prose", "_size", "_tags", "_tail")

    def __init__(self, tags: Tags, kinds: Types, bare: Container[str] = ()) -> None:
        self._tags = tags
        self._kinds = kinds
        self._bare = bare
        super().__init__(State.TEXT)
        self._prose = Prose(tags.opening, BARE) if tags.bare else Prose(tags.opening)
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
                ended = body[: len(body) - partial_end(body, self._tags.closing)]
                lenient = state is State.CALL and (self._tags.lenient or bool(self._tags.bare and self._bare))
                calls = self._tags.read(ended, self._kinds) if lenient else None
                return content(self._prose.blanks + self._prose.marker + body) if calls is None else told(calls)

    def _free(self, text: str, out: list[Piece]) -> str:
        rest = self._prose.push(text, out)
        if rest is None:
            return ""
        self._state = State.CALL if self._prose.marker == self._tags.opening else State.NAME
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
        closing = BARE_END if bare else self._tags.closing
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
        calls = self._tags.read(BARE + body + marker if bare else body, self._kinds) if at >= 0 else None
        rest = text[end + len(marker) - len(self._tail) :]
        if calls is None:
            return self._no_call(body + marker, bare, out) + rest
        out += told(calls)
        if bare:
            self._state, self._lead, self._tail = State.BEHIND, Lead(), ""
        else:
            self._resume(called=True)
        return rest

    def _no_call(self, body: str, bare: bool, out: list[Piece]) -> str:
        """The held text is content, up to a call with markers inside what looked like one without."""
        at = body.find(self._tags.opening) if bare else -1
        end = blanks_before(body, at) if at >= 0 else len(body)
        out += content(self._prose.blanks + self._prose.marker + body[:end])
        self._resume(called=False)
        return body[end:]

    def _behind(self, text: str, out: list[Piece]) -> str:
        """Consume a closing marker: it belongs to the call although the opening one is missing."""
        rest = self._tail + (text if self._tail else self._lead.push(text))
        closing = self._tags.closing
        if len(rest) < len(closing) and closing.startswith(rest):
            self._tail = rest
            return ""
        self._resume(called=True)
        return rest[len(closing) :] if rest.startswith(closing) else self._lead.held + rest

    def _resume(self, *, called: bool) -> None:
        self._state = State.TEXT
        self._prose.resume(called=called)

    _steps: ClassVar = MappingProxyType({
        State.TEXT: _free, State.CALL: _hold, State.NAME: _named, State.FUNCTION: _hold, State.BEHIND: _behind
    })  # fmt: skip


def told(calls: Sequence[Called]) -> list[Piece]:
    return [
        piece for name, text in calls for piece in (Piece(PieceKind.CALL, name), Piece(PieceKind.ARGUMENTS, text))
    ]  # fmt: skip


def read_elements(body: str, types: Types, forms: Iterable[Elements]) -> list[Called] | None:
    """Calls one behind another, in the first of the forms that takes all of the text; None if that is none."""
    return next(filter(None, (read_form(body, types, form) for form in forms)), None)


def read_form(body: str, types: Types, form: Elements) -> list[Called] | None:
    """As `read_elements`, in one form."""
    calls: list[Called] = []
    at = 0
    while begun := form.head.match(body, at):
        kinds = types.get(begun[1], {})
        values: dict[str, msgspec.Raw] = {}
        at = begun.end()
        while found := form.argument.match(body, at):
            groups = found.groupdict()
            known = TEXT if groups.get("string") == "true" else kinds.get(groups["key"], ANY)
            values[groups["key"]] = msgspec.Raw(value_of(groups["value"], known))
            at = found.end()
        ended = form.end.match(body, at)
        if ended is None:
            return None
        calls.append((begun[1], msgspec.json.encode(values).decode()))
        at = ended.end()
        if at == len(body):
            return calls
    return None
