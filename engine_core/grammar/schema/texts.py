"""Cells of strings: lengths, patterns, formats and lists of values; and their complements."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from penstock.engine_core.grammar import automata
from penstock.engine_core.grammar.patterns import Node, PatternError, read, written
from penstock.engine_core.grammar.schema.bounds import MAX_EXCLUDED
from penstock.engine_core.grammar.schema.cells import Text
from penstock.engine_core.grammar.schema.formats import APART, PATTERNS

T = TypeVar("T")


def intersect(a: Text, b: Text) -> Text | None:
    """Strings of both; None where there are none, as far as that is seen."""
    longest = b.longest if a.longest is None else a.longest if b.longest is None else min(a.longest, b.longest)
    among = (
        b.among if a.among is None else a.among if b.among is None else tuple(t for t in a.among if t in set(b.among))
    )
    cell = Text(
        max(a.shortest, b.shortest),
        longest,
        _merged(a.patterns, b.patterns),
        _merged(a.not_patterns, b.not_patterns),
        _merged(a.formats, b.formats),
        _merged(a.not_formats, b.not_formats),
        among,
        _merged(a.excluded, b.excluded),
    )
    cell = narrowed(cell)
    return None if empty(cell) else cell


def _merged(a: tuple[T, ...], b: tuple[T, ...]) -> tuple[T, ...]:
    return a if a == b or not b else tuple(dict.fromkeys(a + b))


def narrowed(cell: Text) -> Text:
    """A cell with a list of values keeps those that obey everything else; what cannot be told stays."""
    if cell.among is None:
        return cell
    longest = len(max(cell.among, key=len, default="")) if cell.longest is None else cell.longest
    banned = set(cell.excluded)
    kept = [t for t in cell.among if cell.shortest <= len(t) <= longest and t not in banned]
    patterns: list[Node] = []
    not_patterns: list[Node] = []
    for nodes, wanted, unknown in ((cell.patterns, True, patterns), (cell.not_patterns, False, not_patterns)):
        for node in nodes:
            try:
                kept = [text for text in kept if automata.matches(node, text) is wanted]
            except PatternError:
                unknown.append(node)
    return dataclasses.replace(
        Text(formats=cell.formats, not_formats=cell.not_formats),
        patterns=tuple(patterns),
        not_patterns=tuple(not_patterns),
        among=tuple(kept),
    )


def empty(cell: Text) -> bool:
    """Whether no string is left. False where that is not seen."""
    if cell.among is not None and not cell.among:
        return True
    if cell.longest is not None and cell.shortest > cell.longest:
        return True
    if len(APART.intersection(cell.formats)) > 1 or set(cell.formats) & set(cell.not_formats):
        return True
    if set(cell.patterns) & set(cell.not_patterns):
        return True
    if len(cell.patterns) + len(cell.not_patterns) > 1 or (cell.patterns and cell.longest == 0):
        return _apart(cell)
    return cell.longest == 0 and "" in cell.excluded


def _apart(cell: Text) -> bool:
    """Whether the patterns have no string in common."""
    try:
        found = None
        for node in cell.patterns:
            found = automata.language(node) if found is None else automata.common(found, automata.language(node))
        for node in cell.not_patterns:
            other = automata.inverted(automata.language(node))
            found = other if found is None else automata.common(found, other)
    except PatternError:
        return False
    return found is not None and automata.empty(found)


def complement(cell: Text) -> list[Text]:
    """Cells of all other strings."""
    out = []
    if cell.shortest > 0:
        out.append(Text(longest=cell.shortest - 1))
    if cell.longest is not None:
        out.append(Text(shortest=cell.longest + 1))
    if cell.among is not None:
        out.append(Text(excluded=cell.among))
    if cell.excluded:
        out.append(Text(among=cell.excluded))
    out.extend(Text(not_patterns=(node,)) for node in cell.patterns)
    out.extend(Text(patterns=(node,)) for node in cell.not_patterns)
    out.extend(Text(not_formats=(name,)) for name in cell.formats)
    out.extend(Text(formats=(name,)) for name in cell.not_formats)
    return out


def write(cell: Text) -> tuple[dict[str, object], str]:
    """The schema that llguidance holds exactly, and what had to be left out of it: a keyword and a reason, or ''."""
    trouble = "not: a format has no complement" if cell.not_formats else ""
    out: dict[str, object] = {}
    if cell.among is not None:
        out["enum"] = list(cell.among)
    else:
        out["type"] = "string"
        if cell.shortest:
            out["minLength"] = cell.shortest
        if cell.longest is not None:
            out["maxLength"] = cell.longest
    patterns = []
    excluded = [
        t for t in cell.excluded if len(t) >= cell.shortest and (cell.longest is None or len(t) <= cell.longest)
    ]
    if sum(map(len, excluded)) > MAX_EXCLUDED:
        return out, "not: too many strings are excluded"
    if excluded:
        patterns.append(automata.excluding(excluded))
    for node in cell.patterns:
        try:
            patterns.append(automata.spelled(node))
        except PatternError as error:
            trouble = f"pattern: {error}"
    for node in cell.not_patterns:
        try:
            patterns.append(written(_inverse(node)))
        except PatternError as error:
            trouble = f"not: the complement of a pattern: {error}"
    patterns.extend(written(read(PATTERNS[name])) for name in cell.formats if name in PATTERNS)
    conjuncts: list[dict[str, object]] = [{"type": "string", "pattern": text} for text in patterns]
    conjuncts.extend({"type": "string", "format": name} for name in cell.formats if name not in PATTERNS)
    if conjuncts:
        out.update({k: v for k, v in conjuncts[0].items() if k != "type"})
    if len(conjuncts) > 1:
        out["allOf"] = conjuncts[1:]
    return out, trouble


def _inverse(node: Node) -> Node:
    return automata.pattern(automata.inverted(automata.language(node)))
