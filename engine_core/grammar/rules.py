"""The rules of a grammar as a tree: which of them a finite text can satisfy, and which parts of a recursive grammar may
be read in one piece.

The library reads a lexeme as far as it goes. That is exact for a part M of a grammar when no text of M begins another
text of M, and nothing else in the grammar that is read in one piece begins with a character that M begins with: then
the first character says that it is M, and M itself says where it ends. Strings in quotes are such parts, and they are
where nearly all of the time would go if every character were a lexeme of its own.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

from penstock.engine_core.grammar.patterns import Chars, Choice, Ranges, Repeat, Sequence, united

LONGEST_RUN = 32  # parts of a sequence that one lexeme spans
LARGEST = 2_000  # characters and classes that one lexeme is made of, rules inlined


@dataclass(frozen=True)
class Text:
    """These characters."""

    value: str


@dataclass(frozen=True)
class Name:
    """What a rule says."""

    rule: str


@dataclass(frozen=True)
class Lexeme:
    """This, read in one piece."""

    part: Node


Node: TypeAlias = Text | Chars | Name | Sequence["Node"] | Choice["Node"] | Repeat["Node"] | Lexeme


def names(node: Node) -> Iterator[str]:
    """Rules that a node uses."""
    match node:
        case Name(rule):
            yield rule
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from names(part)
        case Repeat(part) | Lexeme(part):
            yield from names(part)


def completable(rules: Mapping[str, Node]) -> set[str]:
    """Rules that some text of finite length satisfies; the others need one another forever."""
    users: dict[str, list[str]] = {}
    for name, node in rules.items():
        for used in set(names(node)):
            users.setdefault(used, []).append(name)
    found: set[str] = set()
    waiting = deque(rules)
    while waiting:
        name = waiting.popleft()
        if name not in found and completed(rules[name], found):
            found.add(name)
            waiting.extend(users.get(name, ()))
    return found


def completed(node: Node, rules: AbstractSet[str]) -> bool:
    """Whether a text satisfies a node that uses no other rules than these. Every class of characters has some."""
    match node:
        case Name(rule):
            return rule in rules
        case Sequence(parts):
            return all(completed(part, rules) for part in parts)
        case Choice(parts):
            return any(completed(part, rules) for part in parts)
        case Repeat(part, low):
            return low == 0 or completed(part, rules)
        case Lexeme(part):
            return completed(part, rules)
    return True


class Reading:
    """What can be said of the nodes of one grammar. Rules that recur are never read in one piece."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._plain = plain_rules(rules)
        self._free: dict[str, bool] = {}
        self._first: dict[str, Ranges] = {}
        self._sizes: dict[str, int] = {}

    def one_piece(self, node: Node) -> bool:
        """Whether a node may be a lexeme as far as the node itself goes."""
        return self.prefix_free(node) and self.size(node) <= LARGEST

    def size(self, node: Node) -> int:
        """Characters and classes that a node without recursion is made of."""
        match node:
            case Text(value):
                return len(value)
            case Chars():
                return 1
            case Name(rule):
                if rule not in self._sizes:
                    self._sizes[rule] = self.size(self._rules[rule])
                return self._sizes[rule]
            case Sequence(parts) | Choice(parts):
                return sum(map(self.size, parts))
            case Repeat(part) | Lexeme(part):
                return self.size(part)

    def prefix_free(self, node: Node) -> bool:
        """Whether it has no empty text, and none that begins another; False where that is not plain to see."""
        match node:
            case Text(value):
                return bool(value)
            case Chars():
                return True
            case Name(rule):
                if rule not in self._free:
                    self._free[rule] = rule in self._plain and self.prefix_free(self._rules[rule])
                return self._free[rule]
            case Choice(parts):
                return all(map(self.prefix_free, parts)) and apart([self.first(part) for part in parts])
            case Repeat(part, low, high):
                return low == high and low > 0 and self.prefix_free(part)
            case Sequence(parts):
                return bool(parts) and all(self._goes_on(parts, place) for place in range(len(parts)))
            case Lexeme(part):
                return self.prefix_free(part)

    def first(self, node: Node) -> Ranges:
        """Characters that a prefix-free node begins with."""
        match node:
            case Text(value):
                return ((ord(value[0]), ord(value[0])),)
            case Chars(ranges):
                return ranges
            case Name(rule):
                if rule not in self._first:
                    self._first[rule] = self.first(self._rules[rule])
                return self._first[rule]
            case Choice(parts):
                return united(*[self.first(part) for part in parts])
            case Repeat(part) | Lexeme(part):
                return self.first(part)
            case Sequence(parts):
                return self._begin(parts)

    def _goes_on(self, parts: tuple[Node, ...], place: int) -> bool:
        """Whether it is plain where the part at this place ends."""
        part = parts[place]
        if not isinstance(part, Repeat) or part.least == part.most:
            return self.prefix_free(part)
        rest = parts[place + 1 :]
        ends = bool(rest) and self.prefix_free(part.part) and self.prefix_free(Sequence(rest))
        return ends and apart([self.first(part.part), self._begin(rest)])

    def _begin(self, parts: tuple[Node, ...]) -> Ranges:
        """Characters that a sequence begins with, those after parts that may be left out included."""
        found = []
        for part in parts:
            found.append(self.first(part))
            if not isinstance(part, Repeat) or part.least:
                break
        return united(*found)


def with_lexemes(rules: Mapping[str, Node], root: str) -> dict[str, Node]:
    """The rules that the root still uses, with lexemes of more than one character wherever they are exact."""
    reading = Reading(rules)
    refused: frozenset[Node] = frozenset()
    while True:
        found = reachable({name: marked(node, reading, refused) for name, node in rules.items()}, root)
        wrong = mistaken({piece for node in found.values() for piece in pieces_of(node)}, reading)
        if not wrong:
            return found
        wide = frozenset(part for part in wrong if any(names(part)))
        refused |= wide or wrong  # a lexeme that spans rules gives way first: theirs may do


def reachable(rules: Mapping[str, Node], root: str) -> dict[str, Node]:
    """The rules that the root uses outside of lexemes."""
    found: set[str] = set()
    level = {root}
    while level:
        found |= level
        level = {name for rule in level for name in used_outside(rules[rule])} - found
    return {name: node for name, node in rules.items() if name in found}


def mistaken(pieces: set[Node], reading: Reading) -> frozenset[Node]:
    """Parts of the lexemes that begin as another piece does."""
    intervals = sorted(
        ((low, high, number) for number, piece in enumerate(pieces) for low, high in reading.first(piece)),
    )
    listed = list(pieces)
    wrong: set[int] = set()
    active: list[tuple[int, int]] = []  # end and piece of the intervals that may reach further
    for low, high, number in intervals:
        active = [each for each in active if each[0] >= low]
        for _, other in active:
            if other != number:
                wrong |= {number, other}
        active.append((high, number))
    return frozenset(piece.part for number in wrong if isinstance(piece := listed[number], Lexeme))


def marked(node: Node, reading: Reading, refused: frozenset[Node]) -> Node:
    """The node with its longest prefix-free parts as lexemes, but for those that were refused."""
    if not isinstance(node, Chars | Name) and node not in refused and reading.one_piece(node):
        return Lexeme(node)
    match node:
        case Choice(parts):
            return Choice(tuple(marked(part, reading, refused) for part in parts))
        case Repeat(part, low, high):
            return Repeat(marked(part, reading, refused), low, high)
        case Sequence(parts):
            return Sequence(tuple(runs(parts, reading, refused)))
        case _:
            return node


def runs(parts: tuple[Node, ...], reading: Reading, refused: frozenset[Node]) -> Iterator[Node]:
    """A sequence's parts, the longest prefix-free runs of them in one piece."""
    place = 0
    while place < len(parts):
        for end in range(min(len(parts), place + LONGEST_RUN), place + 1, -1):
            run = Sequence(parts[place:end])
            if run not in refused and reading.one_piece(run):
                yield Lexeme(run)
                place = end
                break
        else:
            yield marked(parts[place], reading, refused)
            place += 1


def pieces_of(node: Node) -> Iterator[Node]:
    """What is read in one piece: lexemes, and the single characters of everything else."""
    match node:
        case Text(value):
            yield from map(Text, value)
        case Chars() | Lexeme():
            yield node
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from pieces_of(part)
        case Repeat(part):
            yield from pieces_of(part)


def plain_rules(rules: Mapping[str, Node]) -> frozenset[str]:
    """Rules that never come back to themselves, nor lead to one that does."""
    plain: set[str] = set()
    while True:
        more = {name for name, node in rules.items() if name not in plain and plain.issuperset(names(node))}
        if not more:
            return frozenset(plain)
        plain |= more


def used_outside(node: Node) -> Iterator[str]:
    """Rules that a node uses outside of its lexemes."""
    match node:
        case Name(rule):
            yield rule
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from used_outside(part)
        case Repeat(part):
            yield from used_outside(part)


def apart(parts: list[Ranges]) -> bool:
    """Whether no two of them share a character."""
    ends = sorted(each for part in parts for each in part)
    return all(first[1] < second[0] for first, second in itertools.pairwise(ends))
