"""Where an output puts whitespace between its JSON tokens, and its likely next tokens if it goes on like that.

Where whitespace may stand a grammar forces nothing, however little else it leaves: behind the `{` of an object with one
required key stand that key, or a space and the key, or a line break. A model is not as free. It writes spaces behind
colons and commas, or breaks lines and indents by depth, and does at each place what it did at places like it: between
the same two bytes. What an output did there last is what it will do, then what the model's outputs mostly do there,
then what most texts have.

What is found is a guess, to be verified like any draft.
"""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLMatcher

from penstock.engine_core.grammar.tokens import ABSENT, GrammarTokens

BLANKS = b" \t\r\n"
QUOTE, ESCAPE, NEWLINE, DIGIT = b'"'[0], b"\\"[0], b"\n"[0], b"0"[0]
OPENING, ENDING = b"{[", b"}]"
NUMBERS = frozenset(b"-0123456789")
SPACED = b":,"  # what most texts put a space behind
VALUES = b'"{[]tfn-159'  # what values begin with, and what ends a list of them
CLOSING = b",}]:"  # what follows a key or a value
APART = b'{}[]:,"' + BLANKS  # what mostly ends a token
LONGEST = 96  # bytes of a guess
FARTHEST = 16  # places for whitespace in a guess whose forerunner came true
KEPT = 8  # guesses of one place
MOST_PLACES = 256  # of which guesses are kept
STRONGEST = 16  # votes
MOST_VAIN = 16
MOST_UNREAD = 512  # tokens that wait to be read

Between = tuple[int, int]  # the bytes before and behind whitespace, of numbers DIGIT; 0 before the first, or ANY behind
ANY = 256


@dataclass(frozen=True, slots=True)
class Blank:
    """Whitespace: its beginning, and the indentation repeated for each open object and list."""

    head: bytes
    each: bytes = b""

    def text(self, depth: int) -> bytes:
        return self.head + self.each * depth


@dataclass(frozen=True, slots=True)
class Place:
    """Within an output, between two JSON tokens."""

    before: int = 0  # the last byte that is no whitespace
    blank: bytes = b""  # whitespace since
    depth: int = 0  # objects and lists that are open

    def behind(self, text: bytes) -> Place:
        """Where this text, which begins here, ends. Brackets in its strings are taken to come in pairs."""
        kept = text.rstrip(BLANKS)
        if not kept:
            return Place(self.before, self.blank + text, self.depth)
        opened = sum([kept.count(byte) for byte in OPENING]) - sum([kept.count(byte) for byte in ENDING])
        return Place(kept[-1], text[len(kept) :], self.depth + opened)


START = Place()
SPACE, NOTHING = Blank(b" "), Blank(b"")


class Habits:
    """Owner of what all outputs of a model mostly do, by a running majority: votes against a habit wear it down."""

    def __init__(self) -> None:
        self._found: dict[Between, tuple[Blank, int]] = {}

    def tell(self, between: Between, blank: Blank) -> None:
        """An output put this whitespace there."""
        known, votes = self._found.get(between, (blank, 0))
        if known == blank:
            self._found[between] = blank, min(votes + 1, STRONGEST)
        else:
            self._found[between] = (known, votes - 1) if votes > 1 else (blank, 1)

    def guess(self, between: Between) -> Blank:
        """What the next output will put there."""
        found = self._found.get(between)
        if found is not None:
            return found[0]
        before, behind = between
        return SPACE if before in SPACED and behind not in SPACED else NOTHING


class Spacing:
    """Owner of one output's habits, which teaches those of all."""

    def __init__(self, tokens: GrammarTokens, shared: Habits) -> None:
        self._tokens = tokens
        self._shared = shared
        self._own: dict[Between, Blank] = {}
        self._loose = False  # its grammar allows whitespace
        self._vain = 0  # looks ahead that met no whitespace, all of them so far
        self._unread: list[int] = []
        self._place = START
        self._quoted = self._escaped = False
        self._known: dict[tuple[Place, int, tuple[int, ...]], list[bytes]] = {}  # guesses, long ones first
        self._said: list[int] = []  # the last guess, as far as the output has not come to it
        self._reach = FARTHEST // 2  # places for whitespace in a guess

    def take(self, token_ids: list[int]) -> None:
        """The output goes on with these tokens."""
        self._unread += token_ids
        if len(self._unread) >= MOST_UNREAD:
            self._unread.clear()  # `likely` is not asked: reading them all at once would take long

    def likely(self, matcher: LLMatcher, forced: list[int]) -> list[int]:
        """Tokens that are likely behind those that are forced now; [] where nothing is. The matcher stays as it is."""
        if self._vain >= MOST_VAIN:
            return []
        self._read()
        if not (forced or matcher.compute_ff_bytes()):
            if not self._may_be_blank(matcher, self._place):
                return []
            self._quoted = False  # whatever it was that was in quotes
        if len(self._known) >= MOST_PLACES:
            self._known.clear()
        known = self._known.setdefault((self._place, self._reach, tuple(forced)), [])
        text = next((text for text in known if self._holds(matcher, forced, text)), None)
        if text is None:
            text = self._walk(matcher, forced)
            if text and text[-1] not in BLANKS:  # a longer one may be found elsewhere
                del known[KEPT - 1 :]
                known.append(text)
                known.sort(key=len, reverse=True)
        found = self._tokens.split(text)
        if text[-1:] not in APART:
            found = found[:-1]  # the last one may be the beginning of a longer one
        if found:
            self._said = forced + found
        return found

    def end(self) -> None:
        """The output has ended."""
        self._read()

    def _holds(self, matcher: LLMatcher, forced: list[int], text: bytes) -> bool:
        """Whether this can come now. It has been found before, so every byte has a token."""
        token_ids = forced + [self._tokens.single[byte] for byte in text]
        return bool(matcher.validate_tokens(token_ids) == len(token_ids))

    def _walk(self, matcher: LLMatcher, forced: list[int]) -> bytes:
        """As far as one way to go on is likely, behind what is forced; nothing where no whitespace may stand in it: the
        rest of a forced run is left out of it because it may be split in another way."""
        taken = matcher.try_consume_tokens(forced) if forced else 0
        place = self._place.behind(self._tokens.text(forced))
        found, passed = b"", 0
        while len(found) < LONGEST and taken >= len(forced):
            step = matcher.compute_ff_bytes()[:LONGEST]
            if not step and passed < self._reach:
                step = self._over_whitespace(matcher, place)
                passed += bool(step)
            token_ids = [self._tokens.single[byte] for byte in step]
            if ABSENT in token_ids:
                del token_ids[token_ids.index(ABSENT) :]
            count = matcher.try_consume_tokens(token_ids) if token_ids else 0
            taken += count
            found += step[:count]
            if not step or count < len(step):
                break
            place = place.behind(step)
        if taken:
            matcher.rollback(taken)
        if not self._loose:
            self._vain += 1
        return found if passed else b""

    def _over_whitespace(self, matcher: LLMatcher, place: Place) -> bytes:
        """Likely whitespace and the one byte that can stand behind it; nothing where there are several or none."""
        if not self._may_be_blank(matcher, place):
            return b""
        if not self._loose:
            self._loose = True
            for between, usual in self._own.items():
                self._shared.tell(between, usual)
        found: list[int] = []
        for byte in candidates(place.before):
            if self._allows(matcher, byte):
                found.append(byte)
                if len(found) > 1 and not NUMBERS.issuperset(found):
                    return b""
        if not found:
            return b""
        gap = self._guess((kind(place.before), kind(found[0]))).text(place.depth - (found[0] in ENDING))
        if not gap.startswith(place.blank):
            return b""  # it does something else here
        return gap[len(place.blank) :] + (bytes(found) if len(found) == 1 else b"")

    def _may_be_blank(self, matcher: LLMatcher, place: Place) -> bool:
        """Whether this is between JSON tokens: strings hold no line breaks."""
        return self._allows(matcher, NEWLINE) or (place.blank != b"" and self._allows(matcher, BLANKS[0]))

    def _allows(self, matcher: LLMatcher, byte: int) -> bool:
        token_id = self._tokens.single[byte]
        return token_id != ABSENT and bool(matcher.validate_tokens([token_id]))

    def _read(self) -> None:
        """Learn from the tokens that have come."""
        if not self._unread:
            return
        if self._said:
            self._judge(self._unread)
        text = self._tokens.text(self._unread)
        self._unread.clear()
        place, quoted, escaped = self._place, self._quoted, self._escaped
        before, blank, depth = place.before, place.blank, place.depth
        for byte in text:
            if quoted:
                if escaped:
                    escaped = False
                elif byte == ESCAPE:
                    escaped = True
                elif byte == QUOTE:
                    quoted, before, blank = False, byte, b""
            elif byte in BLANKS:
                blank += bytes((byte,))
            else:
                depth -= byte in ENDING
                if blank or byte in CLOSING or byte in VALUES:
                    self._learn((kind(before), kind(byte)), indented(blank, depth))
                before, blank, quoted = byte, b"", byte == QUOTE
                depth += byte in OPENING
        self._place, self._quoted, self._escaped = Place(before, blank, depth), quoted, escaped

    def _judge(self, came: list[int]) -> None:
        """See farther where the last guess has come true, as it now has or not."""
        count = min(len(came), len(self._said))
        right = came[:count] == self._said[:count]
        self._said = self._said[count:] if right else []
        if not self._said:
            self._reach = min(2 * self._reach, FARTHEST) if right else 1

    def _learn(self, between: Between, blank: Blank) -> None:
        if len(blank.head) + len(blank.each) > LONGEST:
            return  # no guess is as long, and all outputs' habits together stay small
        if self._guess(between) != blank:
            self._known.clear()
        self._own[between] = blank
        if between[0] in SPACED:
            self._own[between[0], ANY] = blank
        if self._loose:
            self._shared.tell(between, blank)

    def _guess(self, between: Between) -> Blank:
        found = self._own.get(between) or self._own.get((between[0], ANY))
        return self._shared.guess(between) if found is None else found


def indented(blank: bytes, depth: int) -> Blank:
    """Whitespace at this depth; by depth if it is a line break and the same for each."""
    start = blank.rfind(b"\n") + 1
    head, rest = blank[:start], blank[start:]
    if depth <= 0 or not start or len(rest) % depth:
        return Blank(blank)
    each = rest[: len(rest) // depth]
    return Blank(head, each) if each * depth == rest else Blank(blank)


def kind(byte: int) -> int:
    """Numbers are alike."""
    return DIGIT if byte in NUMBERS else byte


def candidates(before: int) -> bytes:
    """The bytes that may follow whitespace after this byte, in JSON."""
    match bytes((before,)):
        case b"{":
            return b'"}'
        case b"\0" | b"[" | b":" | b",":
            return VALUES
        case digit if digit.isdigit():
            return CLOSING + b".0"
        case _:
            return CLOSING
