"""Regular languages as automata over ranges of characters: what a pattern matches, what two have in common, what is
left when one is taken away, and the pattern of the result (Thompson 1968; Brzozowski and McCluskey 1963). Sizes are
bounded: PatternError where an automaton or a pattern would grow past them."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from penstock.engine_core.grammar.patterns import (
    ANY_CHAR,
    LOOKAHEAD,
    NOTHING,
    Ahead,
    Chars,
    Choice,
    Edge,
    Node,
    Opaque,
    PatternError,
    Ranges,
    Repeat,
    Sequence,
    plain_char,
    read,
    united,
    within,
    written,
    written_chars,
)

State = TypeVar("State")

MAX_LINKS = 6000  # of the nondeterministic automaton of one pattern
MAX_STATES = 150  # of a deterministic one
MAX_WRITTEN = 30_000  # characters and operators of a pattern made from an automaton
MAX_REMEMBERED = 32  # patterns of a conjunction whose beginnings are remembered
ANYTHING = "(?s:.*)"
ANYTHING_MORE = "(?s:.+)"
EMPTY: Node = Sequence(())


class _Thread:
    """A nondeterministic automaton while it is put together; state 0 starts, state 1 accepts."""

    def __init__(self, node: Node) -> None:
        self.free: list[list[tuple[int, Edge | None]]] = [[], []]  # state → (next state, only at this edge)
        self.moves: list[list[tuple[Chars, int]]] = [[], []]
        self.links = 0
        self.build(node, 0, 1)

    def state(self) -> int:
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def link(self, a: int, b: int, edge: Edge | None = None) -> None:
        self.links += 1
        if self.links > MAX_LINKS:
            raise PatternError("it is too large")
        self.free[a].append((b, edge))

    def build(self, node: Node, a: int, b: int) -> None:
        match node:
            case Chars():
                self.moves[a].append((node, b))
                self.links += 1
            case Edge():
                self.link(a, b, node)
            case Choice(parts):
                for part in parts:
                    self.build(part, a, b)
            case Sequence(parts):
                for part in parts:
                    middle = self.state()
                    self.build(part, a, middle)
                    a = middle
                self.link(a, b)
            case Repeat(part, least, most):
                self.repeat(part, least, most, a, b)
            case Ahead():
                raise PatternError(LOOKAHEAD)
            case Opaque(_, reason):
                raise PatternError(reason)

    def repeat(self, part: Node, least: int, most: int | None, a: int, b: int) -> None:
        for _ in range(least):
            middle = self.state()
            self.build(part, a, middle)
            self.link(a, a)  # counted, so that a long repetition of nothing ends too
            a = middle
        if most is None:
            loop = self.state()
            self.link(a, loop)
            self.build(part, loop, loop)
            self.link(loop, b)
            return
        for _ in range(most - least):
            self.link(a, b)
            middle = self.state()
            self.build(part, a, middle)
            a = middle
        self.link(a, b)

    def closure(self, states: Iterable[int], start: bool, end: bool) -> frozenset[int]:
        seen = set(states)
        pending = list(seen)
        while pending:
            for target, edge in self.free[pending.pop()]:
                if target not in seen and (edge is None or (end if edge.end else start)):
                    seen.add(target)
                    pending.append(target)
        return frozenset(seen)


@functools.lru_cache(maxsize=512)
def _thread(node: Node) -> _Thread:
    anything = Repeat(Chars(ANY_CHAR), 0, None)
    return _Thread(Sequence((anything, node, anything)))


def _holds(chars: Chars, char: str) -> bool:
    code = ord(char)
    inside = within(chars.ranges, code)
    for group in chars.properties:
        name = group[3:-1]
        if len(name) > 2:
            raise PatternError(f"{group} is not supported here")
        inside |= unicodedata.category(char).startswith(name) is (group[1] == "p")
    return inside is not chars.negated


def matches(node: Node, text: str) -> bool:
    """Whether the pattern is found somewhere in the text. Raises PatternError where that cannot be told."""
    thread = _thread(node)
    last = len(text)
    states = thread.closure((0,), True, last == 0)
    for at, char in enumerate(text, 1):
        reached = {target for state in states for chars, target in thread.moves[state] if _holds(chars, char)}
        states = thread.closure(reached, False, at == last)
    return 1 in states


@dataclasses.dataclass(frozen=True, slots=True)
class Language:
    """A complete deterministic automaton: `moves[state][letter]`, where letter i is any character of `letters[i]`."""

    letters: tuple[Ranges, ...]
    moves: tuple[tuple[int, ...], ...]
    accepts: frozenset[int]


def _alphabet(sets: Iterable[Ranges]) -> tuple[Ranges, ...]:
    """The coarsest partition of all characters that tells every given set from its complement."""
    turns: dict[int, int] = {0: 0}  # character → the sets, a bit each, that begin or end with it
    for place, ranges in enumerate(set(sets)):
        for low, high in united(ranges):
            turns[low] = turns.get(low, 0) ^ 1 << place
            turns[high + 1] = turns.get(high + 1, 0) ^ 1 << place
    cuts = sorted(turns)
    classes: dict[int, list[tuple[int, int]]] = {}
    inside = 0
    for low, after in zip(cuts, [*cuts[1:], ANY_CHAR[0][1] + 1], strict=True):
        inside ^= turns[low]
        if low < after:
            classes.setdefault(inside, []).append((low, after - 1))
    return tuple(united(tuple(ranges)) for ranges in classes.values())


def language(node: Node) -> Language:
    """All texts in which the pattern is found. Raises PatternError: too large, or of Unicode classes."""
    found = _language(node)
    if isinstance(found, str):
        raise PatternError(found)
    return found


@functools.lru_cache(maxsize=256)
def _language(node: Node) -> Language | str:
    """The language, or why there is none: that may have taken as long to find out."""
    try:
        return _determinized(_thread(node))
    except PatternError as error:
        return str(error)


def _determinized(thread: _Thread) -> Language:
    if any(chars.properties for moves in thread.moves for chars, _ in moves):
        raise PatternError("a Unicode class is not supported here")
    sets = {chars.ranges for moves in thread.moves for chars, _ in moves}
    letters = _alphabet(sets)
    heads = [ranges[0][0] for ranges in letters]
    inside = {ranges: [within(ranges, head) for head in heads] for ranges in sets}
    # state → for each letter, the states behind it
    rows = [
        [[to for chars, to in moves if inside[chars.ranges][i]] for i in range(len(heads))] for moves in thread.moves
    ]
    closed: dict[frozenset[int], frozenset[int]] = {}

    def behind(state: tuple[frozenset[int], bool]) -> Iterator[tuple[frozenset[int], bool]]:
        around = [rows[place] for place in state[0] if thread.moves[place]]
        for letter in range(len(heads)):
            reached = frozenset([target for row in around for target in row[letter]])
            if reached not in closed:
                closed[reached] = thread.closure(reached, False, False)
            yield closed[reached], False

    order, moves = _explored((thread.closure((0,), True, False), True), behind, MAX_STATES * 4)
    accepts = frozenset(i for i, (states, start) in enumerate(order) if 1 in thread.closure(states, start, True))
    return _smallest(Language(letters, moves, accepts))


def _explored(
    first: State, behind: Callable[[State], Iterable[State]], most: int
) -> tuple[list[State], tuple[tuple[int, ...], ...]]:
    """Every state that can be reached, and the numbers of those behind each. Raises PatternError beyond `most`."""
    numbers, order, moves = {first: 0}, [first], []
    for state in order:
        row = []
        for target in behind(state):
            if target not in numbers:
                if len(order) >= most:
                    raise PatternError("it is too large")
                numbers[target] = len(order)
                order.append(target)
            row.append(numbers[target])
        moves.append(tuple(row))
    return order, tuple(moves)


def of_texts(texts: Iterable[str]) -> Language:
    """Exactly the given texts."""
    trie: list[dict[str, int]] = [{}]
    accepts = set()
    for text in texts:
        at = 0
        for char in text:
            if char not in trie[at]:
                trie[at][char] = len(trie)
                trie.append({})
            at = trie[at][char]
        accepts.add(at)
    letters = _alphabet([((ord(c), ord(c)),) for node in trie for c in node])
    sink = len(trie)
    rows = []
    for node in [*trie, {}]:
        by_code = {ord(c): target for c, target in node.items()}
        rows.append(tuple(by_code.get(r[0][0], sink) if r[0][0] == r[0][1] else sink for r in letters))
    return Language(letters, tuple(rows), frozenset(accepts))


def inverted(lang: Language) -> Language:
    """All other texts."""
    return dataclasses.replace(lang, accepts=frozenset(range(len(lang.moves))) - lang.accepts)


def common(one: Language, two: Language) -> Language:
    """Texts of both."""
    return _paired(one, two, lambda a, b: a and b)


def combined(wanted: Iterable[Node], unwanted: Iterable[Node], *among: Language) -> Language:
    """Texts of the languages in which all wanted patterns are found and no unwanted one. Raises PatternError."""
    found = _combined(tuple(wanted), tuple(unwanted))
    if isinstance(found, str):
        raise PatternError(found)
    parts = [*(() if found is None else (found,)), *among]
    return functools.reduce(common, parts) if parts else inverted(of_texts(()))


@functools.lru_cache(maxsize=1024)
def _combined(wanted: tuple[Node, ...], unwanted: tuple[Node, ...]) -> Language | str | None:
    """None where there is no pattern; a text says why there is no language. Conjunctions grow a pattern at a time."""
    if not (wanted or unwanted):
        return None
    try:
        if len(wanted) + len(unwanted) > MAX_REMEMBERED:
            return functools.reduce(common, [*map(language, wanted), *(inverted(language(n)) for n in unwanted)])
        before = _combined(wanted, unwanted[:-1]) if unwanted else _combined(wanted[:-1], ())
        if isinstance(before, str):
            return before
        last = inverted(language(unwanted[-1])) if unwanted else language(wanted[-1])
        return last if before is None else common(before, last)
    except PatternError as error:
        return str(error)


def either(one: Language, two: Language) -> Language:
    """Texts of at least one."""
    return _paired(one, two, lambda a, b: a or b)


def _paired(one: Language, two: Language, holds: Callable[[bool, bool], bool]) -> Language:
    letters = _alphabet([*one.letters, *two.letters])
    heads = [ranges[0][0] for ranges in letters]
    places = list(zip(_places(one, heads), _places(two, heads), strict=True))

    def behind(state: tuple[int, int]) -> Iterator[tuple[int, int]]:
        return ((one.moves[state[0]][a], two.moves[state[1]][b]) for a, b in places)

    order, moves = _explored((0, 0), behind, MAX_STATES * 10)
    accepts = frozenset(i for i, (a, b) in enumerate(order) if holds(a in one.accepts, b in two.accepts))
    return _smallest(Language(letters, moves, accepts))


def _places(lang: Language, codes: list[int]) -> list[int]:
    """The letter of each character."""
    starts = sorted((low, letter) for letter, ranges in enumerate(lang.letters) for low, _ in ranges)
    return [starts[bisect.bisect_right(starts, code, key=lambda start: start[0]) - 1][1] for code in codes]


def forget() -> None:
    """Give up what is remembered of patterns. Requests write them, and a tree takes a hundred times its pattern."""
    for remembered in (_thread, _language, _combined, apart, read, written_chars):
        remembered.cache_clear()


def empty(lang: Language) -> bool:
    """Whether it has no text at all; every state of a language is reachable."""
    return not lang.accepts


@functools.lru_cache(maxsize=1024)
def apart(one: Node, two: Node) -> bool:
    """Whether no text is found by both patterns. False where that cannot be told."""
    try:
        return empty(common(language(one), language(two)))
    except PatternError:
        return False


def _smallest(lang: Language) -> Language:
    """The same language with no two states alike (Moore 1956). State 0 stays the start."""
    block = [int(state in lang.accepts) for state in range(len(lang.moves))]
    count = len(set(block))
    while True:
        signs: dict[tuple[int, ...], int] = {}
        block = [
            signs.setdefault((own, *map(block.__getitem__, row)), len(signs))
            for own, row in zip(block, lang.moves, strict=True)
        ]
        if len(signs) == count:
            break
        count = len(signs)
    moves: dict[int, tuple[int, ...]] = {}
    for state, row in enumerate(lang.moves):
        moves.setdefault(block[state], tuple(block[target] for target in row))
    assert block[0] == 0, "blocks are numbered as they are met"
    return Language(lang.letters, tuple(moves[b] for b in range(count)), frozenset(block[s] for s in lang.accepts))


def _joined(*parts: Node) -> Node:
    flat: list[Node] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        flat.extend(part.parts if isinstance(part, Sequence) else (part,))
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def _either(*parts: Node) -> Node:
    flat: dict[Node, None] = {}
    ranges: Ranges = ()
    for part in parts:
        for option in part.parts if isinstance(part, Choice) else (part,):
            if isinstance(option, Chars):
                ranges = united(ranges, option.ranges)
            else:
                flat[option] = None
    options: list[Node] = [*([Chars(ranges)] if ranges else []), *flat]
    if not options:
        return NOTHING
    return options[0] if len(options) == 1 else Choice(tuple(options))


def _size(node: Node) -> int:
    match node:
        case Chars(ranges):
            return len(ranges)
        case Sequence(parts) | Choice(parts):
            return 1 + sum(_size(part) for part in parts)
        case Repeat(part):
            return 1 + _size(part)
    return 1


def pattern(lang: Language) -> Node:
    """An anchored pattern of the language, by elimination of its states, the least connected first."""
    if len(lang.moves) > MAX_STATES:
        raise PatternError("it is too large")
    start, end = -1, -2
    arcs: dict[int, dict[int, Node]] = {start: {0: EMPTY}, end: {}}
    for state, row in enumerate(lang.moves):
        arcs[state] = {}
        for i, target in enumerate(row):
            arcs[state][target] = _either(arcs[state].get(target, NOTHING), Chars(lang.letters[i]))
        if state in lang.accepts:
            arcs[state][end] = EMPTY
    sources: dict[int, set[int]] = {state: set() for state in arcs}
    for state, row_of in arcs.items():
        for target in row_of:
            sources[target].add(state)
    left = set(range(len(lang.moves)))
    while left:
        state = min(left, key=lambda s: (len(sources[s] - {s}) * len(arcs[s].keys() - {s}), s))
        left.remove(state)
        loop = arcs[state].pop(state, None)
        around = EMPTY if loop is None or loop in (NOTHING, EMPTY) else Repeat(loop, 0, None)
        for source in sources.pop(state) - {state}:
            into = arcs[source].pop(state)
            for target, out in arcs[state].items():
                node = _either(arcs[source].get(target, NOTHING), _joined(into, around, out))
                if _size(node) > MAX_WRITTEN:
                    raise PatternError("it is too large")
                arcs[source][target] = node
                sources[target].add(source)
        for target in arcs.pop(state):
            sources[target].discard(state)
    return Sequence((Edge(False), arcs[start].get(end, NOTHING), Edge(True)))


def excluding(texts: Iterable[str]) -> str:
    """A pattern, in the automaton's dialect, of every text but the given ones. Linear in their length."""
    trie: list[tuple[dict[str, int], bool]] = [({}, False)]
    for text in texts:
        at = 0
        for char in text:
            at = trie[at][0].setdefault(char, len(trie))
            if at == len(trie):
                trie.append(({}, False))
        trie[at] = (trie[at][0], True)
    done: dict[int, str] = {}
    for at in range(len(trie) - 1, -1, -1):  # a node comes after its parent
        branches, taken = trie[at]
        if not branches:
            done[at] = ANYTHING_MORE if taken else ANYTHING
            continue
        heads = {char: plain_char(ord(char)) for char in branches}
        given_up = r"\x{0}" if '"' in branches or "\\" in branches else ""  # as `written` does for such sets
        options = ["" if not taken else None, f"[^{given_up}{''.join(heads.values())}]{ANYTHING}"]
        options.extend(heads[char] + done.pop(target) for char, target in branches.items())
        done[at] = f"(?:{'|'.join(option for option in options if option is not None)})"
    return f"^{done[0]}$"


def anchored_inside(node: Node, first: bool = True, last: bool = True) -> bool:
    """Whether an anchor stands where something may come before a start or after an end."""
    match node:
        case Edge(end):
            return not (last if end else first)
        case Sequence(parts):
            final = len(parts) - 1
            return any(anchored_inside(p, first and i == 0, last and i == final) for i, p in enumerate(parts))
        case Choice(parts):
            return any(anchored_inside(part, first, last) for part in parts)
        case Repeat(part):
            return anchored_inside(part, False, False)
    return False


def spelled(node: Node) -> str:
    """A pattern in the automaton's dialect, which has anchors at the ends alone. Raises PatternError."""
    return written(pattern(language(node)) if anchored_inside(node) else node)
