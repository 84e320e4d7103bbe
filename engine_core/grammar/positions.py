"""Where in a JSON schema an output stands, as far as what may follow depends on it.

What may follow a value that is complete depends on the value's place, not on what it says. So of the objects and arrays
that are open a position keeps how far each has come, and of a value that is being written its text, or less: the count
of a string's characters, or a number's form. Positions that are alike allow the same; the reverse need not hold.

Where a place has several alternatives that begin alike, the value's whole text tells them apart until it ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

MOST_TEXT = 64  # bytes of a value or key that tell positions apart; a longer one has none until it ends
DEEPEST = 64  # open objects and arrays of a position
LONGEST = 32 << 10  # characters of a source that is read: the interpreter is held as long as JSON is read
BLANKS = b" \t\r\n"
NUMERIC = b"-+.eE0123456789"
QUOTE, ESCAPE = b'"'[0], b"\\"[0]
OPENING, CLOSING = b"{[", b"}]"
PLAIN = re.compile(rb'[^"\\\x00-\x1f\x7f]*')  # text that stands for itself in a string
NUMERAL = re.compile(rb"(-?)([0-9]*)(\.?)([0-9]*)([eE]?[+-]?)([0-9]*)")
# At one place: a space, or a line break and its indentation. A model that could idle would idle to the token limit.
BOUNDED = r" |\r?\n[ \t]{0,32}"
INDENTATION = re.compile(rb"\r?\n([ \t]*)")
BLANK = re.compile(r"(?:(?:\\[rnt]| |\[(?:\\[rnt]| )+\])(?:[?*+]|\{[0-9,]*\})?|[|()])*")  # patterns of blanks alone
UNREAD: Mapping[str, Any] = {"$ref": "", "unread": True}  # a schema of which nothing is known
NOTES = frozenset(("$defs", "x-guidance"))  # keywords that say nothing of a value
KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(("type", "properties", "required", "patternProperties", "additionalProperties")),
    "array": frozenset(("type", "items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("type", "minLength", "maxLength")),
    "number": frozenset(("type",)),
    "integer": frozenset(("type", "minimum", "maximum")),
    "boolean": frozenset(("type",)),
    "null": frozenset(("type",)),
}  # fmt: skip
HEADS: Mapping[str, bytes] = {
    "object": b"{",
    "array": b"[",
    "string": b'"',
    "number": b"-",
    "integer": b"-",
    "boolean": b"t",
    "null": b"n",
}
# What comes next, or is being written.
VALUE, FIRST, KEY, NEXT, NAMING, COLON, STRING, NUMBER, TEXT, BEHIND = range(10)


class Rule(msgspec.Struct, frozen=True, eq=False):
    """What one kind of value at a place is."""

    phase: int = TEXT  # of a value that has begun; of an object KEY, of an array FIRST
    keys: dict[str, tuple[int, int]] = {}  # an object's: each with its number and the place of its value
    items: tuple[int, ...] = ()  # places of an array's first items
    rest: int = 0  # place of other items, or of the values of other keys
    several: bool = False  # values of other keys depend on the key
    counted: int = 0  # items or characters up to which they are counted
    least: int = 0  # items
    most: int | None = None  # characters
    low: int = -1  # and `high`: the last counts of items that are far from `least` and from `most`
    high: int = -1
    bounds: tuple[bytes, bytes] | None = None  # of whole numbers that are not negative: the least and the most


class Frame(NamedTuple):
    """An open object or array, and how far it has come."""

    outer: Frame | None
    rule: Rule
    at: tuple[int, bytes] = (0, b"")
    depth: int = 1


class Position(NamedTuple):
    """`text`: what counts of what is being written, or of the whitespace since. None where it is too long."""

    frames: Frame | None = None
    phase: int = VALUE
    place: int = 0  # of the value that comes next; of one that has begun, its count of characters
    text: bytes | None = b""
    rule: Rule | None = None
    depth: int = 0  # of a value that its text tells apart: open brackets; then: whether within a string and an escape
    quoted: bool = False
    escaped: bool = False

    @property
    def known(self) -> bool:
        return self.text is not None


class UncountedError(Exception):
    """An item of an array ends whose count is folded: what comes behind it depends on the count."""


LOST = Position(phase=TEXT, text=None, depth=1 << 30)  # nothing that could be told apart comes any more
ANYTHING = Rule()


class Schema:
    """The positions of one schema, as `schema_of` reads it. `places`: what may begin there, by its first byte.

    `far`: more items than a token may end.
    """

    def __init__(self, schema: Mapping[str, Any], far: int) -> None:
        self._far = far
        self._indented = schema.get("x-guidance", {}).get("whitespace_pattern") == BOUNDED
        self._definitions = schema.get("$defs", {})
        self._numbers: dict[tuple[int, ...], int] = {}
        self._rules: dict[tuple[int, str], Rule] = {}
        self._nodes: list[tuple[Mapping[str, Any], ...]] = []
        self._any: Mapping[str, Any] = {}
        self.places: list[dict[int, Rule]] = [{head[0]: ANYTHING for head in HEADS.values()}]
        self.start = Position(place=self._number(schema))
        for nodes in self._nodes:  # which grows meanwhile
            self.places.append(self._place(nodes))

    def follow(self, position: Position, data: bytes) -> Position:
        """The position behind these bytes of an output. Raises UncountedError for a folded one that does not tell."""
        at = 0
        while at < len(data):
            phase = position.phase
            if phase == STRING:
                position, at = in_string(position, data, at)
            elif phase == TEXT:
                position, at = in_text(position, data, at)
            elif phase == NAMING:
                position, at = self._in_key(position, data, at)
            elif phase == NUMBER:
                position, at = in_number(position, data, at)
            elif data[at] in BLANKS:
                position, at = self._blank(position, data, at)
            else:
                position, at = self._between(position, data[at]), at + 1
        return position

    def within(self, position: Position, characters: int) -> Position | None:
        """The position behind so many whole characters that stand for themselves, within a string; None elsewhere."""
        rule = position.rule
        if position.phase != STRING or position.text or rule is None:
            return None
        count = position.place + characters
        if rule.most is None and position.place >= rule.counted:
            return position
        return None if rule.most is not None and count > rule.most else position._replace(
            place=min(count, rule.counted)
        )  # fmt: skip

    def folded(self, position: Position) -> Position:
        """A position that allows the same: how many items an array has does not count while its bounds are far."""
        frames = fold(position.frames)
        return position if frames is position.frames else position._replace(frames=frames)

    def _blank(self, position: Position, data: bytes, at: int) -> tuple[Position, int]:
        """Behind the whitespace between JSON tokens that begins here."""
        end = at + 1
        while end < len(data) and data[end] in BLANKS:
            end += 1
        if position.text is None or len(position.text) + end - at > MOST_TEXT:
            return LOST, end
        text = position.text + data[at:end]
        if self._indented and (found := INDENTATION.match(text)):  # of which every blank is as good as another
            text = b"\n" + b" " * len(found[1]) + text[found.end() :]
        return position._replace(text=text), end

    def _between(self, position: Position, byte: int) -> Position:
        """Behind the first byte of a JSON token, or one that stands between two."""
        frames, phase = position.frames, position.phase
        if phase in (VALUE, FIRST) and byte not in CLOSING:
            return self._begun(position, byte)
        if frames is None:
            return LOST
        if byte in CLOSING:
            return Position(frames.outer, BEHIND)
        if phase in (KEY, NEXT) and byte == QUOTE:
            return Position(frames, NAMING)
        if phase == COLON and byte == b":"[0]:
            return Position(frames, VALUE, position.place)
        if phase == BEHIND and byte == b","[0]:
            rule, count = frames.rule, frames.at[0]
            if rule.phase == KEY:
                return Position(frames, NEXT)
            if count < 0:
                raise UncountedError
            count += 1
            place = rule.items[count] if count < len(rule.items) else rule.rest
            return Position(frames._replace(at=(min(count, rule.counted), b"")), VALUE, place)
        return LOST

    def _begun(self, position: Position, byte: int) -> Position:
        """A value begins."""
        frames = position.frames
        rule = self.places[position.place].get(b"-"[0] if byte in NUMERIC else b"t"[0] if byte == b"f"[0] else byte)
        if rule is None:
            return LOST
        if rule.phase in (KEY, FIRST):
            depth = 1 if frames is None else frames.depth + 1
            place = rule.items[0] if rule.items else rule.rest
            return LOST if depth > DEEPEST else Position(Frame(frames, rule, depth=depth), rule.phase, place)
        if rule.phase == STRING:
            return Position(frames, STRING, 0, b"", rule)
        text = bytes((byte,))
        kept = rule if rule.bounds else None
        return Position(frames, rule.phase, 0, text, kept, int(byte in OPENING), byte == QUOTE)

    def _in_key(self, position: Position, data: bytes, at: int) -> tuple[Position, int]:
        """In a key, from its opening quote on."""
        frames, text = position.frames, position.text
        assert frames is not None
        assert text is not None
        end = at
        while end < len(data) and (data[end] != QUOTE or escapes(text + data[at:end])):
            end += 1
        text += data[at:end]
        if end == len(data):
            return (position._replace(text=text) if len(text) <= MOST_TEXT * 4 else LOST), end
        rule, (last, others) = frames.rule, frames.at
        if ESCAPE in text:  # another spelling of a known key is another key to some grammars
            return Position(frames._replace(at=(last, b"\\" + text)), COLON), end + 1
        number, place = rule.keys.get(text.decode(errors="replace"), (0, rule.rest))
        frames = frames._replace(at=(number, others and b"+") if number else (last, b"*" + text * rule.several))
        return Position(frames, COLON, place), end + 1

    def _number(self, *schemas: Any) -> int:
        """The place of values that follow one of the schemas."""
        nodes = {id(node): node for schema in schemas for node in self._alternatives(schema)}
        key = tuple(nodes)
        if key not in self._numbers:
            self._nodes.append(tuple(nodes.values()))
            self._numbers[key] = len(self._nodes)
        return self._numbers[key]

    def _alternatives(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        waiting, seen = [schema], set()
        for node in waiting:
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, dict) and node.keys() - NOTES == {"$ref"}:
                waiting.append(self._definitions.get(str(node["$ref"]).removeprefix("#/$defs/"), UNREAD))
            elif isinstance(node, dict) and node.keys() - NOTES == {"anyOf"}:
                waiting.extend(node["anyOf"])
            elif node is not False:
                yield self._any if node is True else node

    def _place(self, nodes: tuple[Mapping[str, Any], ...]) -> dict[int, Rule]:
        found: dict[int, list[Rule]] = {}
        for node in nodes:
            for kind in kinds(node):
                known = self._rules.get((id(node), kind))
                if known is None:
                    known = self._rules[id(node), kind] = self._rule(node, kind)
                found.setdefault(HEADS[kind][0], []).append(known)
        return {head: rules[0] if len(rules) == 1 else ANYTHING for head, rules in found.items()}

    def _rule(self, node: Mapping[str, Any], kind: str) -> Rule:
        if node.keys() - NOTES - frozenset().union(*map(KEYWORDS.get, kinds(node))):  # type: ignore[arg-type]
            return ANYTHING
        if kind == "object":
            others = [*node.get("patternProperties", {}).values(), node.get("additionalProperties", self._any)]
            keys = {
                name: (at, self._number(each)) for at, (name, each) in enumerate(node.get("properties", {}).items(), 1)
            }
            return Rule(KEY, keys, rest=self._number(*others), several=len(node.get("patternProperties", ())) > 1)
        if kind == "array":
            items = tuple([self._number(each) for each in node.get("prefixItems", ())])
            least, most = node.get("minItems", 0), node.get("maxItems")
            counted = max(least, len(items)) if most is None else most
            low, high = least - self._far, -1 if most is None else most - self._far
            rest = self._number(node.get("items", self._any))
            return Rule(FIRST, items=items, rest=rest, counted=counted, least=least, low=low, high=high)
        if kind == "string":
            most = node.get("maxLength")
            return Rule(STRING, counted=node.get("minLength", 0) if most is None else most, most=most)
        if kind == "integer" and {"minimum", "maximum"} <= node.keys():
            low, high = node["minimum"], node["maximum"]
            if not (isinstance(low, int) and isinstance(high, int) and 0 <= low <= high):
                return ANYTHING
            return Rule(NUMBER, bounds=(str(low).encode(), str(high).encode()))
        return Rule(NUMBER) if HEADS[kind] == b"-" and len(node.keys() - NOTES) <= 1 else ANYTHING


def kinds(node: Mapping[str, Any]) -> list[str]:
    """The types of the values of a schema without alternatives; all of them where it does not say."""
    named = node.get("type", [])
    if named:
        found = [named] if isinstance(named, str) else list(named)
        return [kind for kind in found if kind != "integer" or "number" not in found]
    return list(HEADS.keys() - {"integer"})


def in_string(position: Position, data: bytes, at: int) -> tuple[Position, int]:
    """In a string of which characters count, or nothing. `text` is a part of a character or of an escape."""
    text, rule = position.text, position.rule
    assert text is not None
    assert rule is not None
    if text[:1] == b"\\":
        text += data[at : at + 1]
        whole = len(text) == (6 if text[1:2] == b"u" else 2)
        return position._replace(text=b"" if whole else text), at + 1
    found = PLAIN.match(data, at)
    assert found is not None
    text, end = text + found[0], found.end()
    part = cut(text)
    count = min(position.place + len((text[: len(text) - part]).decode(errors="replace")), rule.counted)
    rest = text[len(text) - part :]
    if end == len(data) or rest:
        return (position._replace(place=count, text=rest) if end == len(data) else LOST), len(data)
    if data[end] == QUOTE:
        return Position(position.frames, BEHIND), end + 1
    if data[end] != ESCAPE:
        return LOST, len(data)
    if rule.counted:  # nothing is said of how many characters an escape is
        return Position(position.frames, TEXT, count, b"\\", None, 0, True, True), end + 1
    return position._replace(text=b"\\"), end + 1


def in_text(position: Position, data: bytes, at: int) -> tuple[Position, int]:
    """In a value that its text tells apart, up to its end."""
    depth, quoted, escaped, began = position.depth, position.quoted, position.escaped, at
    scalar = not depth and not quoted
    while at < len(data):
        byte = data[at]
        at += 1
        if quoted:
            quoted = escaped or byte != QUOTE
            escaped = not escaped and byte == ESCAPE
            if not quoted and not depth:
                return Position(position.frames, BEHIND), at
        elif scalar and (byte in b",]}" or byte in BLANKS):
            return Position(position.frames, BEHIND), at - 1
        elif byte == QUOTE:
            quoted = True
        else:
            depth += (byte in OPENING) - (byte in CLOSING)
            if byte in CLOSING and not depth:
                return Position(position.frames, BEHIND), at
    text = None if position.text is None else position.text + data[began:at]
    if text is not None and len(text) > MOST_TEXT:
        text = None
    return position._replace(text=text, depth=depth, quoted=quoted, escaped=escaped), at


def in_number(position: Position, data: bytes, at: int) -> tuple[Position, int]:
    """In a number of any value: of its digits only their presence counts, and whether the first is 0."""
    end = at
    while end < len(data) and data[end] in NUMERIC:
        end += 1
    assert position.text is not None
    if end < len(data):
        return Position(position.frames, BEHIND), end
    text, bounds = position.text + data[at:end], None if position.rule is None else position.rule.bounds
    if bounds is not None:
        if not text.isdigit() or text[:1] == b"0":
            return position._replace(text=text), end
        return position._replace(text=likened(text, *bounds)), end
    if found := NUMERAL.fullmatch(text):
        sign, whole, point, part, power, digits = found.groups()
        whole = whole if whole in (b"", b"0") else b"1"
        text = b"".join((sign, whole, point, part and b"0", power, digits and b"0"))
    return position._replace(text=text), end


def likened(text: bytes, low: bytes, high: bytes) -> bytes:
    """The least number, not 0 first, whose digits may go on as the given ones: of as many digits, and in the same
    relation to the beginnings of both bounds."""
    size = len(text)
    if text in (low[:size], high[:size]) or size > len(high):
        return text
    least = 10 ** (size - 1)
    for bound in (low, high):
        if size <= len(bound) and text > bound[:size]:
            least = max(least, int(bound[:size]) + 1)
    return b"%d" % least


def fold(frames: Frame | None) -> Frame | None:
    """Open objects and arrays, with -1 or -2 for counts of items that are far from the array's bounds."""
    if frames is None:
        return None
    outer, count = fold(frames.outer), far_from(frames)
    if count:
        return Frame(outer, frames.rule, (count, b""), frames.depth)
    return frames if outer is frames.outer else frames._replace(outer=outer)


def far_from(frame: Frame) -> int:
    """-1 for a count of items far below the least, -2 for one between the least and far below the most; else 0, and for
    one that is folded."""
    rule, count = frame.rule, frame.at[0]
    if rule.phase != FIRST or count < len(rule.items):
        return 0
    if count < rule.least:
        return -1 if count <= rule.low else 0
    return -2 if count <= rule.high else 0


def unfolded(position: Position, exact: Position) -> Position:
    """A folded position with the counts of another in which the same arrays are open."""
    counts: dict[int, int] = {}
    frames = exact.frames
    while frames is not None:
        counts[frames.depth], frames = frames.at[0], frames.outer
    return position._replace(frames=unfold(position.frames, counts))


def unfold(frames: Frame | None, counts: Mapping[int, int]) -> Frame | None:
    """Open objects and arrays with these counts, by depth, in place of folded ones."""
    if frames is None:
        return None
    at = (counts[frames.depth], b"") if frames.at[0] < 0 else frames.at
    return Frame(unfold(frames.outer, counts), frames.rule, at, frames.depth)


def escapes(text: bytes) -> bool:
    """Whether an escape begins at the end of a text."""
    return bool((len(text) - len(text.rstrip(b"\\"))) % 2)


def cut(text: bytes) -> int:
    """How many bytes at the end of a text begin a character in UTF-8 that is not complete."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            return back if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


def schema_of(source: str, far: int) -> Schema | None:
    """The positions of a source that is one JSON schema and no longer than can be read at once; None for others.

    `far`: more items than a token may end.
    """
    if len(source) > LONGEST:
        return None
    if source.startswith("start: %json "):
        schema = json.loads(source.removeprefix("start: %json "))
    elif source.startswith('{"grammars"'):
        schema = json.loads(source)["grammars"][0].get("json_schema")
    else:
        return None
    if not isinstance(schema, dict):
        return None
    options = schema.get("x-guidance", {})
    spaced = options.get("whitespace_flexible") is False or BLANK.fullmatch(options.get("whitespace_pattern", "x"))
    return Schema(schema, far) if spaced else None
