"""Runs: anchored patterns of characters of one kind, so and so many of them. What they have in common, and what is left
without some texts, is known without an automaton, which would have a state for each count."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine_core.grammar.patterns import (
    ANY_CHAR,
    NOTHING,
    Chars,
    Choice,
    Edge,
    Node,
    PatternError,
    Ranges,
    Repeat,
    Sequence,
    common,
    complemented,
    within,
)

MAX_APART = 500  # characters of texts that are told apart from a run
Run = tuple[Ranges, int, int | None]  # characters of these ranges, at least and at most so many


def of_length(shortest: int, longest: int | None) -> Node:
    """A pattern of the texts with so many characters."""
    return Sequence((Edge(False), Repeat(Chars(ANY_CHAR), shortest, longest), Edge(True)))


def run_of(node: Node) -> Run | None:
    """What an anchored pattern of characters of one kind matches; None for any other pattern."""
    match node:
        case Sequence((Edge(end=False), Chars(ranges, ()), Edge(end=True))):
            return ranges, 1, 1
        case Sequence((Edge(end=False), Repeat(Chars(ranges, ()), least, most), Edge(end=True))):
            return ranges, least, most
    return None


def pattern_of(run: Run) -> Node:
    ranges, least, most = run
    return Sequence((Edge(False), Repeat(Chars(ranges), least, most), Edge(True)))


def common_run(runs: Iterable[Run]) -> Run:
    """Texts of all runs: those of the narrowest bounds, of characters that all have."""
    found: Run = (ANY_CHAR, 0, None)
    for ranges, least, most in runs:
        inside = common(found[0], ranges)
        highest = most if found[2] is None else found[2] if most is None else min(found[2], most)
        found = (inside, max(found[1], least), highest)
    return (NOTHING.ranges, 1, 1) if found[2] is not None and found[1] > found[2] else found


def run_without(run: Run, texts: Iterable[str]) -> Node:
    """The run's texts but the given ones, without an automaton: a count of hundreds would be as many states.

    Raises PatternError where it would be written at too great a length.
    """
    ranges, least, most = run
    taken = set(texts)
    if sum(map(len, taken)) > MAX_APART:
        raise PatternError("it is too large")
    after: dict[str, list[int]] = {"": []}  # beginnings of the texts, and the characters that lead to longer ones
    for start in sorted({text[:end] for text in taken for end in range(1, len(text) + 1)}):
        after[start] = []
        after[start[:-1]].append(ord(start[-1]))
    options: list[Node] = []
    for start, known in after.items():
        literal = tuple(Chars(((ord(char), ord(char)),)) for char in start)
        if not all(within(ranges, ord(char)) for char in start):
            continue
        if start not in taken and len(start) >= least and (most is None or len(start) <= most):
            options.append(Sequence(literal))
        others = common(ranges, complemented(tuple((code, code) for code in known)))
        if others and (most is None or len(start) < most):
            left = None if most is None else most - len(start) - 1
            tail = Repeat(Chars(ranges), max(0, least - len(start) - 1), left)
            options.append(Sequence((*literal, Chars(others), tail)))
    return Sequence((Edge(False), Choice(tuple(options)), Edge(True))) if options else NOTHING
