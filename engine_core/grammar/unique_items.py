"""Arrays whose items must differ, held beside the automaton: no automaton of a bounded size remembers items.

The schema compiler says where such arrays stand (`Place`). `UniqueItems` follows an output, knows the items so far of
the array that is open, and takes out of each mask the tokens that would repeat one. Texts are compared as JSON reads
them, since some characters are spelled in several ways, and -0 is 0.

No mask leads into a dead end: an item is not begun where all texts are taken that it could still become.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.token_index import Ids
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.protocol.errors import EngineFailure

Masks32 = npt.NDArray[np.int32]  # [rows, words]
FREE = -1  # place under which nothing is unique
QUOTE, ESCAPE = b'"', b"\\"
END = b"\xff"  # stands for what ends an item: no text holds it
BREAKS = b",] \t\r\n"  # what ends a number in an array
DIGITS = b"-0123456789"
PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')  # text that may stand for itself in a string
NAMED = re.compile(rb'["\\\x00-\x1f\x7f]')  # what an escape may stand for
CUT = 4  # bytes of a character in UTF-8
# What the automaton takes for escapes, in small letters, and the characters that they are.
ESCAPED = (
    *(
        (b"\\" + short, char)
        for short, char in zip((b'"', b"\\", b"b", b"f", b"n", b"r", b"t"), '"\\\b\f\n\r\t', strict=True)
    ),
    *((b"\\u%04x" % code, chr(code)) for code in (*range(32), 127)),
)
HALF = ("\ud800", "\udbff")  # range of the first halves of pairs, behind which the second is to come


class Texts(msgspec.Struct, frozen=True):
    """A deterministic automaton of the texts that items can be. Characters from starts[i] on are letter letters[i]."""

    starts: tuple[int, ...]
    letters: tuple[int, ...]
    moves: tuple[tuple[int, ...], ...]  # [states, letters]
    counts: tuple[int, ...]  # texts from each state on; -1: without end


class Items(msgspec.Struct, frozen=True):
    """What the items of an array are. Without `texts` they can always go on, up to `most` characters."""

    kind: str  # string or integer
    most: int | None = None
    texts: Texts | None = None


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a value stands, with the places of its children by number. An array here has `unique` items, if any."""

    keys: dict[str, int]
    other: int  # of any other key
    prefix: tuple[int, ...]  # of the first items
    items: int
    unique: Items | None = None

    def child(self, key: str) -> int:
        return self.keys.get(key, self.other)

    def item(self, at: int) -> int:
        return self.prefix[at] if at < len(self.prefix) else self.items


PLACES = msgspec.json.Decoder(tuple[Place, ...])


class Frame(NamedTuple):
    """An open object or array."""

    place: int
    unique: Items | None
    is_array: bool
    commas: int = 0
    seen: tuple[str, ...] = ()  # unique items
    stops: tuple[bytes, ...] = ()  # beginnings of items that come to nothing new


class Spot(NamedTuple):
    """Within an output."""

    frames: tuple[Frame, ...] = ()
    place: int = 0  # of the value that comes next
    key: bool = False  # the next string is a key
    text: bytes | None = None  # what has come of a string; only its last escape where it does not matter
    digits: bytes = b""  # what has come of a unique number


class UniqueItems:
    """Follows one output. `places` are the compiler's, in JSON, the root first."""

    __slots__ = ("_places", "_spot", "_tokens")

    def __init__(self, tokens: GrammarTokens, places: bytes) -> None:
        self._tokens = tokens
        self._places = PLACES.decode(places)
        self._spot = Spot()

    def copy(self) -> UniqueItems:
        """One at the same place that goes its own way."""
        twin = object.__new__(UniqueItems)
        twin._tokens, twin._places, twin._spot = self._tokens, self._places, self._spot
        return twin

    def take(self, token_id: int) -> None:
        """The output goes on with this token. Raises EngineFailure where that repeats an item."""
        spot = follow(self._places, self._spot, self._tokens.text([token_id]))
        if spot is None:
            raise EngineFailure(f"token {token_id} repeats an item of an array whose items are unique")
        self._spot = spot

    def restrict(self, masks: Masks32, drafts: Sequence[int]) -> None:
        """Take the tokens that repeat an item out of the masks after nothing, draft 0, draft 1, ...

        Masks behind a draft that repeats one are left as they are: that draft is rejected.
        """
        rows = masks.view(np.uint32)
        spot: Spot | None = self._spot
        for place, row in enumerate(rows):
            if place and spot is not None:
                spot = follow(self._places, spot, self._tokens.text([drafts[place - 1]]))
            if spot is None:
                return
            self._restrict(row, spot)

    def _restrict(self, row: npt.NDArray[np.uint32], spot: Spot) -> None:
        index = self._tokens.index
        frame = spot.frames[-1] if spot.frames else None
        if frame is None or frame.unique is None:
            self._try(row, spot, index.opening)
            return
        items = frame.unique
        early = items.most is not None or items.texts is not None  # an item may have to be stopped before its end
        ends, lead, begun = QUOTE, b"", b""
        if items.kind == "integer":
            ends, begun, others = BREAKS, spot.digits, index.numbers
        elif spot.text is None:
            lead, others = QUOTE, index.outside_any if early else index.outside
        else:
            others = index.inside_any if early else index.inside
            found = decoded(spot.text)
            if found is None:
                self._try(row, spot, index.all)
                return
            begun = found
        escapes = False
        for stop in frame.stops:
            if stop.startswith(begun):
                rest = stop[len(begun) :]
                body = rest.removesuffix(END)
                if PLAIN.fullmatch(body):
                    for end in (ends[at : at + 1] for at in range(len(ends))) if body != rest else (b"",):
                        clear(row, index.beginning(lead + body + end))
                escapes |= NAMED.search(body) is not None
        self._try(row, spot, others)
        if escapes:
            self._try(row, spot, index.escaped)

    def _try(self, row: npt.NDArray[np.uint32], spot: Spot, token_ids: Ids) -> None:
        """Take out those of the tokens that repeat an item, one by one."""
        allowed = token_ids[row[token_ids >> 5] >> (token_ids & 31).astype(np.uint32) & 1 != 0]
        repeated = [each for each in allowed.tolist() if follow(self._places, spot, self._tokens.text([each])) is None]
        clear(row, np.array(repeated, np.int32))


def clear(row: npt.NDArray[np.uint32], token_ids: Ids) -> None:
    """Take tokens out of a mask."""
    bits = np.uint32(1) << (token_ids & 31).astype(np.uint32)
    np.bitwise_and.at(row, token_ids >> 5, ~bits)


def follow(places: Sequence[Place], spot: Spot, data: bytes) -> Spot | None:
    """Where these bytes lead; None where an item is repeated, or can become nothing but an item that is there."""
    frames, place, key, text, digits = spot
    at = 0
    while at < len(data):
        top = frames[-1] if frames else None
        unique = top.unique if top else None
        if text is not None:
            end = closing(text, data, at)
            if end < 0:
                text = text + data[at:] if key or unique else b"\\" * (escapes(text, data[at:]) % 2)
                break
            text += data[at:end]
            if key and top:
                place = FREE if top.place == FREE else places[top.place].child(read(text))
            elif top and unique:
                item = read(text)
                if ends(top, item):
                    return None
                frames = (*frames[:-1], with_item(top, unique, item))
            key, text, at = False, None, end + 1
            continue
        byte = data[at : at + 1]
        at += 1
        if top and unique and unique.kind == "integer":
            if byte in DIGITS:
                digits += byte
                continue
            if digits:
                if ends(top, digits.decode()):
                    return None
                top = with_item(top, unique, digits.decode())
                frames, digits = (*frames[:-1], top), b""
        match byte:
            case b'"':
                text = b""
            case b"{":
                frames, key = (*frames, Frame(place, None, is_array=False)), True
            case b"[":
                frames = (*frames, Frame(place, None if place == FREE else places[place].unique, is_array=True))
                place = FREE if place == FREE else places[place].item(0)
            case b"}" | b"]":
                frames, key = frames[:-1], False
            case b"," if top and top.is_array:
                top = top._replace(commas=top.commas + 1)
                frames, place = (*frames[:-1], top), FREE if top.place == FREE else places[top.place].item(top.commas)
            case b",":
                key = True
    if frames and frames[-1].stops and not key:
        begun = digits if text is None else decoded(text)
        if dead_escape(frames[-1], text or b"") if begun is None else begun and begun.startswith(frames[-1].stops):
            return None
    return Spot(frames, place, key, text, digits)


def closing(text: bytes, data: bytes, at: int) -> int:
    """Where the string that has come as far as `text` ends in the data from `at` on; -1 if it does not."""
    end = data.find(QUOTE, at)
    while end >= 0 and escapes(text, data[at:end]) % 2:
        end = data.find(QUOTE, end + 1)
    return end


def escapes(text: bytes, more: bytes) -> int:
    """How many backslashes the two end with together."""
    count = len(more) - len(more.rstrip(ESCAPE))
    return count if count < len(more) else count + len(text) - len(text.rstrip(ESCAPE))


def read(text: bytes) -> str:
    """A string between its quotes."""
    try:
        found: str = json.loads(QUOTE + text + QUOTE)
    except ValueError:
        return text.decode(errors="replace")  # behind a draft that the automaton will not take
    return found


def decoded(text: bytes) -> bytes | None:
    """What a string has as far as it has come, the beginning of a character included; None within an escape."""
    if ESCAPE not in text:
        return text
    for cut in range(min(CUT, len(text))):
        whole = text[: len(text) - cut]
        try:
            found: str = json.loads(QUOTE + whole + QUOTE)
        except UnicodeDecodeError:
            continue
        except ValueError:
            return None
        return None if HALF[0] <= found[-1:] <= HALF[1] else encoded(found) + text[len(whole) :]
    return None


def dead_escape(frame: Frame, text: bytes) -> bool:
    """Whether every character that the escape at the end of a text may come to leads to nothing new."""
    start = text.rindex(ESCAPE)
    begun = decoded(text[:start])
    if begun is None:  # the second backslash of two
        start -= 1
        begun = decoded(text[:start])
    if frame.unique is None or begun is None:
        return False  # a draft that the automaton will not take
    items, named = frame.unique, text[start:].lower()
    before = begun.decode(errors="replace")
    chars = [char for spelled, char in ESCAPED if spelled.startswith(named)]
    return not any(
        possible(items, before + char) and not encoded(before + char).startswith(frame.stops) for char in chars
    )


def possible(items: Items, text: str) -> bool:
    """Whether an item may begin like this."""
    return items.texts is None or items.texts.counts[states(items.texts, text)[-1]] != 0


def states(table: Texts, text: str) -> list[int]:
    """The states that a text comes through, one behind each character."""
    found = [0]
    for char in text:
        found.append(table.moves[found[-1]][table.letters[bisect_right(table.starts, ord(char)) - 1]])
    return found[1:] or found


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def ends(frame: Frame, text: str) -> bool:
    """Whether an item of this text is not allowed here."""
    return (encoded(text) + END).startswith(frame.stops)


def with_item(frame: Frame, items: Items, text: str) -> Frame:
    """The array with one item more, whose text may be spelled in two ways."""
    texts = ("0", "-0") if items.kind == "integer" and text in ("0", "-0") else (text,)
    seen = (*frame.seen, *(each for each in texts if possible(items, each)))
    return frame._replace(seen=seen, stops=(*frame.stops, *(stop(items, each, seen) for each in texts)))


def stop(items: Items, text: str, seen: Sequence[str]) -> bytes:
    """The shortest beginning of a text that leads to no item but those seen. The text itself is not to come again."""
    table = items.texts
    if table is None:
        return encoded(text) + (END if items.most is None or len(text) < items.most else b"")
    for at, state in enumerate(states(table, text) if text else [], 1):
        left = table.counts[state]
        if 0 <= left <= len(seen) and sum([each.startswith(text[:at]) for each in seen]) >= left:
            return encoded(text[:at])
    return encoded(text) + END
