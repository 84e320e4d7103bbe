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

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import msgspec

from penstock.engine_core.parsers.scanning import Reading, Scan, StreamParser, blanks_before, partial_end
from penstock.engine_core.parsers.values import ANY, TEXT, Kinds, value_of

BARE, BARE_END = "<function=", "</function>"  # of a call without markers
MOST_HELD = 1 << 18  # characters of a call
LONGEST_NAME = 256  # characters of the name of a call without markers
BEGUN_NAME = re.compile(r"[^<>\s]*")

Types = Mapping[str, Mapping[str, Kinds]]  # of each function's parameters
Called = tuple[str, str]  # a function's name, and its arguments as JSON
ReadCalls = Callable[[str, Types], list[Called] | None]  # calls of the text between two markers; None: it is none


class Tags(msgspec.Struct, frozen=True):
    """The markers around calls, and what reads the text between them."""

    opening: str
    closing: str
    read: ReadCalls
    bare: bool = False  # BARE may stand without them
    lenient: bool = False  # the end of the output stands for the closing marker


class Elements(msgspec.Struct, frozen=True):
    """A call in elements: its beginning with the name in group 1; an argument, `key` and `value` and perhaps `string`,
    which is true if the value is one; the call's end."""

    head: re.Pattern[str]
    argument: re.Pattern[str]
    end: re.Pattern[str]


class TaggedParser(StreamParser):
    """Tool calls that are told whole. `bare`: functions that may be called without the markers, where `tags` know such
    calls."""

    __slots__ = ("_bare", "_kinds", "_tags")

    def __init__(self, tags: Tags, kinds: Types, bare: Container[str] = ()) -> None:
        super().__init__()
        self._tags = tags
        self._kinds = kinds
        self._bare = bare

    def _read(self, scan: Scan) -> Reading[None]:
        tags = self._tags
        while marker := (yield from scan.until((tags.opening, BARE) if tags.bare else (tags.opening,))):
            before = scan.blanks + marker  # content unless a call follows
            if marker == tags.opening:
                scan.trailing = yield from self._read_call(scan, before)
            elif not (yield from self._names_function(scan)):
                scan.tell(before)
            elif (yield from self._read_function(scan, before)):
                yield from self._close(scan)
        scan.end()

    def _read_call(self, scan: Scan, before: str) -> Reading[bool]:
        """Whether the text up to the closing marker is calls, which are told; else it is content. The end of the output
        may stand for the marker."""
        tags, calls = self._tags, None
        body, closing = yield from read_body(scan, tags.closing)
        if closing:
            calls = tags.read(body, self._kinds)
        elif len(body) < MOST_HELD and (tags.lenient or (tags.bare and self._bare)):
            calls = tags.read(body[: len(body) - partial_end(body, tags.closing)], self._kinds)
        if calls is None:
            scan.tell(before + body + closing)
        return told(scan, calls)

    def _names_function(self, scan: Scan) -> Reading[bool]:
        """Whether a function's name stands up to the end of its tag: a name that is not the request's is text."""
        while ">" not in scan.text[:LONGEST_NAME]:
            begun = len(scan.text) < LONGEST_NAME and BEGUN_NAME.fullmatch(scan.text)
            if not begun or not (yield from scan.more()):
                return False
        return scan.text.partition(">")[0] in self._bare

    def _read_function(self, scan: Scan, before: str) -> Reading[bool]:
        """Whether the text up to the end of a function without markers is a call; else it is content, up to a call with
        markers inside."""
        body, closing = yield from read_body(scan, BARE_END)
        calls = self._tags.read(BARE + body + closing, self._kinds) if closing else None
        if calls is None:
            body += closing
            at = body.find(self._tags.opening)
            end = blanks_before(body, at) if at >= 0 else len(body)
            scan.tell(before + body[:end])
            scan.text = body[end:] + scan.text
        return told(scan, calls)

    def _close(self, scan: Scan) -> Reading[None]:
        """Drop a closing marker: it belongs to the call although the opening one is missing."""
        blanks = yield from scan.lead()
        closed = yield from scan.mark((self._tags.closing,))
        scan.text = "" if scan.may_be((self._tags.closing,)) else scan.text if closed else blanks + scan.text
        scan.trailing = True


def read_body(scan: Scan, closing: str) -> Reading[tuple[str, str]]:
    """The text of a call up to its closing marker, and the marker: empty where the output ends before it, or where it
    does not come within MOST_HELD characters."""
    known = 0
    while (at := scan.text.find(closing, max(0, known - len(closing) + 1), MOST_HELD)) < 0:
        known = len(scan.text)
        if known >= MOST_HELD or not (yield from scan.more()):
            return scan.take(MOST_HELD), ""
    body = scan.take(at)
    return body, scan.take(len(closing))


def told(scan: Scan, calls: Sequence[Called] | None) -> bool:
    """Tell these calls, if they are some."""
    for name, arguments in calls or ():
        scan.tell_call(name, arguments)
    return calls is not None


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
