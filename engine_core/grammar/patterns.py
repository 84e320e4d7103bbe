"""Patterns of JSON Schema: regular expressions of ECMA-262, read into a tree and written in the automaton's dialect.

The dialects differ where a schema's author would not think of it: `[a&&b]` and `[[a]` are set operations in one and
plain characters in the other, `.` and `\\s` cover different characters, `\\d` and `\\w` are ASCII in ECMA-262. Reading
and writing anew leaves no such difference. `\\A`, `\\Z` and a leading `(?i)` are taken as Python writes them."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Generic, NoReturn, TypeAlias, TypeVar

LAST = 0x10FFFF
MAX_PATTERN = 20_000  # characters
MAX_GROUPS = 60  # groups inside one another
MAX_REPEAT = 100_000
LOOKAHEAD = "lookahead is supported right after the start only"
Ranges: TypeAlias = tuple[tuple[int, int], ...]
Part = TypeVar("Part", covariant=True)  # a node of a pattern, or of a grammar's rules (`rules`)


class PatternError(ValueError):
    """A pattern that cannot be read, or that asks for more than a regular language. The message is for the user."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chars:
    """One character out of sorted, disjoint ranges. `properties` are Unicode classes as written, such as \\p{L}."""

    ranges: Ranges
    properties: tuple[str, ...] = ()
    negated: bool = False  # only with properties; ranges alone are complemented when read


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """Start or end of the text."""

    end: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence(Generic[Part]):
    """One after the other; nothing at all when empty."""

    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Choice(Generic[Part]):
    """One of these."""

    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat(Generic[Part]):
    """At least `least` and at most `most` times; None: any number."""

    part: Part
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """A lookahead."""

    part: Node
    negative: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A pattern that was not understood, and why: nothing can be said of what it matches."""

    pattern: str
    reason: str


NOTHING = Chars(())  # no text at all
Node: TypeAlias = Chars | Edge | Sequence["Node"] | Choice["Node"] | Repeat["Node"] | Ahead | Opaque


def united(*groups: Ranges) -> Ranges:
    """Ranges that cover what any of the groups covers."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(r for group in groups for r in group):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def complemented(ranges: Ranges) -> Ranges:
    """Ranges that cover every other character."""
    out = []
    start = 0
    for low, high in united(ranges):
        if low > start:
            out.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        out.append((start, LAST))
    return tuple(out)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Ranges that cover what both cover."""
    return tuple((max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) <= min(b, d))


def within(ranges: Ranges, code: int) -> bool:
    """Whether a range holds the character."""
    return any(low <= code <= high for low, high in ranges)


def single(*characters: str) -> Ranges:
    return united(tuple((ord(c), ord(c)) for c in characters))


DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
NEWLINE: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
ANY_CHAR: Ranges = ((0, LAST),)
NO_CHAR = r"[^\x{0}-\x{10FFFF}]"  # in the automaton's dialect
# What `\s` covers in Unicode, for patterns in Rust's dialect.
WHITE: Ranges = (*((0x09, 0x0D), (0x20, 0x20), (0x85, 0x85)), *SPACE[2:-1])
RUST_FLAGS = re.compile(r"([is]+):")


def _class_escape(letter: str) -> Ranges | None:
    for lower, ranges in (("d", DIGIT), ("w", WORD), ("s", SPACE)):
        if letter == lower:
            return ranges
        if letter == lower.upper():
            return complemented(ranges)
    return None


class _Reader:
    """A position in a pattern."""

    def __init__(self, text: str, *, rust: bool = False) -> None:
        if len(text) > MAX_PATTERN:
            raise PatternError(f"it is longer than {MAX_PATTERN} characters")
        self.text = text
        self.at = 0
        self.depth = 0
        self.rust = rust  # as Rust's regex crate reads it
        self.dot_all = False  # a dot is a line end too
        self.folds = text.startswith("(?i)")  # case is ignored
        if self.folds:
            self.at = 4
        elif rust and (flags := re.match(r"\(\?([is]+)\)", text)):
            self.at, self.folds, self.dot_all = flags.end(), "i" in flags[1], "s" in flags[1]

    def fail(self, why: str) -> NoReturn:
        raise PatternError(f"{why}, at character {self.at} of {self.text[:200]!r}")

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.text):
            self.fail("the pattern ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def choice(self) -> Node:
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and not self.peek("|") and not self.peek(")"):
            parts.append(self.repeated(self.atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def repeated(self, node: Node) -> Node:
        bounds = self.bounds()
        if bounds is None:
            return node
        if isinstance(node, Edge | Ahead):
            self.fail("an assertion is repeated")
        self.take("?")  # a lazy match matches the same texts
        if self.take("+"):
            self.fail("possessive matching is not regular")
        return Repeat(node, *bounds)

    def bounds(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(mark):
                return bounds
        if not self.peek("{"):
            return None
        inside, closed, _ = self.text[self.at + 1 :].partition("}")
        least, comma, most = inside.partition(",")
        ascii_digits = all(n.isascii() and n.isdigit() and len(n) < 9 for n in (least, most or "0"))
        if not closed or not ascii_digits:
            return None  # a brace that starts no bound is a plain character
        self.at += len(inside) + 2
        high = int(least) if not comma else int(most) if most else None
        if max(int(least), high or 0) > MAX_REPEAT or (high is not None and high < int(least)):
            self.fail("a repetition is too long or upside down")
        return int(least), high

    def atom(self) -> Node:
        char = self.next()
        match char:
            case "(":
                return self.group()
            case "[":
                return self.bracket()
            case ".":
                if self.dot_all:
                    return Chars(ANY_CHAR)
                return Chars(complemented(single("\n") if self.rust else NEWLINE))
            case "^":
                return Edge(end=False)
            case "$":
                return Edge(end=True)
            case "\\":
                return self.escape()
            case "*" | "+" | "?":
                self.fail("nothing is repeated")
        return self.literal(char)

    def literal(self, char: str) -> Chars:
        same = {char, char.lower(), char.upper()} if self.folds and char.isascii() else {char}
        return Chars(single(*same))

    def group(self) -> Node:
        self.depth += 1
        if self.depth > MAX_GROUPS:
            self.fail("groups are nested too deeply")
        ahead = None
        flags = self.folds, self.dot_all
        if self.take("?"):
            if self.take("=") or self.take("!"):
                ahead = self.text[self.at - 1] == "!"
            elif self.take("<=") or self.take("<!"):
                self.fail("lookbehind is not supported")
            elif self.take("P<") or self.take("<"):
                while self.next() != ">":
                    pass
            elif self.rust and (found := RUST_FLAGS.match(self.text, self.at)):
                self.at = found.end()
                self.folds, self.dot_all = self.folds or "i" in found[1], self.dot_all or "s" in found[1]
            elif not self.take(":"):
                self.fail("this kind of group is not supported")
        node = self.choice()
        if not self.take(")"):
            self.fail("a group is not closed")
        self.depth -= 1
        self.folds, self.dot_all = flags
        return node if ahead is None else Ahead(node, ahead)

    def escape(self) -> Node:
        if self.take("A"):
            return Edge(end=False)
        if self.take("Z") or self.take("z"):
            return Edge(end=True)
        if self.peek("b") or self.peek("B"):
            self.fail("word boundaries are not supported")
        if self.at < len(self.text) and self.text[self.at] in "123456789k":
            self.fail("backreferences are not regular")
        found = self.escaped()
        return found if isinstance(found, Chars) else self.literal(found)

    def escaped(self) -> Chars | str:
        """What follows a backslash, in a bracket or outside."""
        char = self.next()
        if self.rust and char in "dDwW":
            return Chars((), (f"\\{char}",))
        if self.rust and char in "sS":
            return Chars(WHITE if char == "s" else complemented(WHITE))
        if (ranges := _class_escape(char)) is not None:
            return Chars(ranges)
        if char in "pP":
            name = self.next()
            if name == "{":
                end = self.text.find("}", self.at)
                name = self.text[self.at : end] if end > 0 else ""
                self.at = end + 1
            if not name.replace("_", "").replace("=", "").isalnum():
                self.fail("a Unicode class has no name")
            return Chars((), (f"\\{char}{{{name}}}",))
        plain = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}.get(char)
        if plain is not None:
            return plain
        if char == "c" and self.at < len(self.text) and self.text[self.at].isascii() and self.text[self.at].isalpha():
            return chr(ord(self.next()) % 32)
        if char in "xu":
            return self.code(char)
        if char.isascii() and char.isalnum():
            self.fail(f"\\{char} is not known")
        return char

    def code(self, letter: str) -> str:
        width = 2 if letter == "x" else 4
        if self.take("{"):
            digits, closed, _ = self.text[self.at :].partition("}")
            self.at += len(digits) + 1
        else:
            digits, closed = self.text[self.at : self.at + width], "}" * (self.at + width <= len(self.text))
            self.at += width
        if not closed or not digits or not all(c in "0123456789abcdefABCDEF" for c in digits) or len(digits) > 6:
            self.fail(f"\\{letter} needs hexadecimal digits")
        value = int(digits, 16)
        if 0xD800 <= value < 0xDC00 and self.take("\\u"):
            low = ord(self.code("u"))
            value = 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00)
        if value > LAST or (0xD800 <= value < 0xE000 and letter == "x"):
            self.fail("this is no character")
        return chr(value)

    def bracket(self) -> Chars:
        negated = self.take("^")
        groups: list[Ranges] = []
        properties: list[str] = []
        while not self.take("]"):
            if self.rust and (self.peek("[") or self.peek("&&") or self.peek("~~") or self.peek("--")):
                self.fail("set operations within brackets are not supported")
            first = self.member()
            low = first.ranges
            if self.peek("-") and not self.peek("-]"):
                mark = self.at
                self.at += 1
                last = self.member()
                one = len(low) == 1 and low[0][0] == low[0][1] and not first.properties
                if one and len(last.ranges) == 1 and last.ranges[0][0] == last.ranges[0][1] and not last.properties:
                    if last.ranges[0][0] < low[0][0]:
                        self.fail("a range is upside down")
                    low = ((low[0][0], last.ranges[0][0]),)
                else:
                    self.at = mark + 1  # a class beside a dash: both stand for themselves
                    low = united(low, single("-"))
            properties.extend(first.properties)
            groups.append(self.folded(low))
        ranges = united(*groups)
        if properties:
            return Chars(ranges, tuple(properties), negated)
        return Chars(complemented(ranges) if negated else ranges)

    def folded(self, ranges: Ranges) -> Ranges:
        if not self.folds:
            return ranges
        lower = tuple((max(a, 65) + 32, min(b, 90) + 32) for a, b in ranges if a <= 90 and b >= 65)
        upper = tuple((max(a, 97) - 32, min(b, 122) - 32) for a, b in ranges if a <= 122 and b >= 97)
        return united(ranges, lower, upper)

    def member(self) -> Chars:
        char = self.next()
        if char != "\\":
            return Chars(single(char))
        if self.take("b"):
            return Chars(single("\b"))
        found = self.escaped()
        return found if isinstance(found, Chars) else Chars(single(found))


@functools.lru_cache(maxsize=4096)
def read(pattern: str, *, rust: bool = False) -> Node:
    """The tree of a pattern, in the dialect of ECMA-262 or of Rust's regex crate. Raises PatternError."""
    reader = _Reader(pattern, rust=rust)
    node = reader.choice()
    if reader.at < len(pattern):
        reader.fail("a parenthesis is not opened")
    return node


def plain_char(code: int) -> str:
    """A character that stands for itself, in a set or outside."""
    char = chr(code)
    if char.isalnum() if code < 0x80 else code > 0xA0 and char.isprintable():
        return char
    return f"\\x{{{code:X}}}"


def clipped(ranges: Ranges) -> Ranges:
    """Without the surrogates, which are no characters."""
    out: list[tuple[int, int]] = []
    for low, high in ranges:
        if low < 0xD800:
            out.append((low, min(high, 0xD7FF)))
        if high > 0xDFFF:
            out.append((max(low, 0xE000), high))
    return tuple(out)


def _holdable(ranges: Ranges) -> Ranges:
    """The ranges as llguidance can take them.

    It lets a set of all control characters (a newline aside) that lacks `"` or a backslash match those two, escaped
    (seen in 1.9.1: `^[^"]$` accepts `"\\""`). Without one of the control characters it does not: NUL is given up.
    """
    controls = (within(ranges, code) for code in range(0x20) if code != 0x0A)
    quotes = (within(ranges, code) for code in (0x22, 0x5C))
    if all(controls) and not all(quotes):
        return ((1, ranges[0][1]), *ranges[1:])
    return ranges


@functools.lru_cache(maxsize=4096)
def written_chars(node: Chars) -> str:
    """A set of characters in the automaton's dialect."""
    ranges = _holdable(clipped(node.ranges))
    if not ranges and not node.properties:
        return NO_CHAR
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and not node.properties:
        return plain_char(ranges[0][0])
    outside = clipped(complemented(ranges))
    if not node.properties and len(outside) < len(ranges):
        return "[^" + "".join(_range(*r) for r in outside) + "]" if outside else r"[\x{0}-\x{10FFFF}]"
    return f"[{'^' * node.negated}{''.join(_range(*r) for r in ranges)}{''.join(node.properties)}]"


def _range(low: int, high: int) -> str:
    return plain_char(low) if low == high else f"{plain_char(low)}-{plain_char(high)}"


def written(node: Node) -> str:
    """The tree in the automaton's dialect. Raises PatternError for a lookahead."""
    match node:
        case Chars():
            return written_chars(node)
        case Edge(end):
            return "$" if end else "^"
        case Sequence(parts):
            return "".join(f"(?:{written(p)})" if isinstance(p, Choice) else written(p) for p in parts)
        case Choice(parts):
            return "|".join(written(part) for part in parts)
        case Repeat(part, least, most):
            inner = written(part)
            inner = inner if isinstance(part, Chars) else f"(?:{inner})"
            match least, most:
                case 0, None:
                    return f"{inner}*"
                case 1, None:
                    return f"{inner}+"
                case 0, 1:
                    return f"{inner}?"
            return f"{inner}{{{least},{'' if most is None else most}}}"
        case Ahead():
            raise PatternError(LOOKAHEAD)
        case Opaque(_, reason):
            raise PatternError(reason)


def _plain(node: Node) -> bool:
    """Whether there is no lookahead inside."""
    match node:
        case Sequence(parts) | Choice(parts):
            return all(_plain(part) for part in parts)
        case Repeat(part):
            return _plain(part)
    return not isinstance(node, Ahead)


def split(node: Node) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Patterns that must be found and patterns that must not, together the same as one with lookaheads at its start.

    Anywhere else a lookahead stays where it is, for `written` to refuse.
    """
    parts = node.parts if isinstance(node, Sequence) else (node,)
    heads = [part for part in parts[1:] if isinstance(part, Ahead)]
    if not heads or parts[0] != Edge(False) or parts[1 : 1 + len(heads)] != tuple(heads):
        return (node,), ()
    if not all(_plain(head.part) for head in heads):
        return (node,), ()
    start = Edge(False)
    wanted = [Sequence((start, head.part)) for head in heads if not head.negative]
    unwanted = [Sequence((start, head.part)) for head in heads if head.negative]
    rest = parts[1 + len(heads) :]
    wanted.append(Sequence((start, *rest)))
    return tuple(wanted), tuple(unwanted)
