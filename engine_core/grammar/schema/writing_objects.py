"""Objects as llguidance takes them: properties in order, required, one pattern for each kind of other key. The number
of properties is written as alternatives of which keys are present."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from penstock.engine_core.grammar import automata, runs
from penstock.engine_core.grammar.patterns import NOTHING, Choice, Node, PatternError, Sequence
from penstock.engine_core.grammar.schema.cells import ANY, NEVER, Layer, Object, Term, all_of
from penstock.engine_core.grammar.schema.scalars import String
from penstock.engine_core.grammar.schema.writer import Json, Writer
from penstock.engine_core.grammar.schema.writing_scalars import MAX_EXCLUDED

MAX_PRESENCE = 256  # alternatives for which optional keys of one object are present
MAX_OVERLAPPING = 4  # patterns of keys of one object that can match the same key
ANY_KEY = "^"  # found in every key


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """An object's keys, resolved: the named ones in order with what their values must match, and the others: a pattern
    (None: any other key) with what its values must match."""

    terms: dict[str, Term]
    required: frozenset[str]
    others: tuple[tuple[Node | None, Term], ...]
    fewest: int
    most: int | None


def write(writer: Writer, cell: Object) -> list[Json]:
    """The alternatives of a cell of objects. Raises UnsupportedSchema."""
    writer.obstacles(cell.obstacles)
    try:
        return _alternatives(writer, cell)
    except PatternError as error:
        patterned = any(layer.patterns for layer in cell.layers)
        writer.left_out("patternProperties" if patterned else "propertyNames", str(error))
    return _alternatives(writer, dataclasses.replace(cell, layers=_without_patterns(cell), names=()))


def _alternatives(writer: Writer, cell: Object) -> list[Json]:
    """Raises PatternError where a pattern of keys has no form."""
    cells = with_others(writer, cell) if cell.others else [cell]
    written = (_written(writer, one) for found in cells for one in sized(writer, _resolved(writer, found)))
    return [one for one in written if one is not None]


def with_others(writer: Writer, cell: Object) -> Iterator[Object]:
    """Alternatives by which key is the other that the cell must have: each that the cell knows, or one it does not."""
    if not cell.others:
        yield cell
        return
    other = cell.others[0]
    known = Layer(tuple((name, ANY) for name in other.names), annotates=False)
    made = dataclasses.replace(cell, others=cell.others[1:]).meet(Object((known,)))
    assert made is not None, "names alone rule nothing out"
    for name in other.candidates(made.known_names()):
        named_so = Object((Layer(((name, other.term),), annotates=False),), (name,))
        found = made.meet(named_so)
        if found is not None and not writer.algebra.hollow(found):
            yield from with_others(writer, found)
    if writer.algebra.closed(made):
        return
    if other.patterns or other.inside is not None or any(layer.patterns for layer in made.layers):
        writer.left_out("not", "of keys by pattern has no exact form")
        yield from with_others(writer, made)
    elif not writer.algebra.covers(other.term, made.rest()):
        writer.left_out("not", "of additionalProperties has no exact form")
        yield from with_others(writer, made)
    else:
        yield from _one_unnamed(writer, made)


def _one_unnamed(writer: Writer, cell: Object) -> Iterator[Object]:
    """Objects with at least one key that the cell does not name, by which of the named ones are there too: llguidance
    counts them all."""
    terms = cell.terms_of(cell.known_names())
    optional = [n for n, term in terms.items() if n not in cell.required and not writer.algebra.empty(term)]
    if 2 ** len(optional) > MAX_PRESENCE:
        writer.left_out("not", f"of additionalProperties, with more than {MAX_PRESENCE} ways to choose keys")
        yield from with_others(writer, cell)
        return
    for size in range(len(optional) + 1):
        for chosen in itertools.combinations(optional, size):
            gone = Layer(tuple((name, NEVER) for name in optional if name not in chosen), annotates=False)
            found = cell.meet(Object((gone,), chosen, len(cell.required) + size + 1))
            if found is not None and not writer.algebra.hollow(found):
                yield from with_others(writer, found)


def _without_patterns(cell: Object) -> tuple[Layer, ...]:
    return tuple(
        dataclasses.replace(layer, patterns=(), rest=ANY) if layer.patterns else layer for layer in cell.layers
    )


def _resolved(writer: Writer, cell: Object) -> Keys:
    terms: dict[str, Term] = {}
    listed = _listed_names(writer, cell) if cell.names else None
    for name, term in cell.terms_of(dict.fromkeys((*cell.known_names(), *(listed or ())))).items():
        allowed = not cell.names or not writer.algebra.empty(cell.key_term(name))
        terms[name] = term if allowed and not writer.algebra.empty(term) else NEVER
    others = () if listed is not None else _others(writer, cell)
    return Keys(terms, frozenset(cell.required), others, cell.min_properties, cell.max_properties)


def _listed_names(writer: Writer, cell: Object) -> tuple[str, ...] | None:
    """All keys that propertyNames allows, where it lists them."""
    out: list[str] = []
    for found in writer.algebra.cells(all_of(*cell.names)):
        if isinstance(found, String):
            if found.among is None or found.patterns or found.not_patterns or found.formats or found.not_formats:
                return None
            out.extend(found.among)
    return tuple(out)


def _names_pattern(writer: Writer, cell: Object) -> Node | None:
    """The pattern of all keys that propertyNames allows; None for any. Raises PatternError."""
    options: list[Node] = []
    for found in writer.algebra.cells(all_of(*cell.names)):
        if isinstance(found, String):
            if found == String():
                return None
            options.append(_string_pattern(found))
    return options[0] if len(options) == 1 else Choice(tuple(options))


def _string_pattern(cell: String) -> Node:
    """One pattern for all that a cell of strings asks for. Raises PatternError."""
    if cell.formats or cell.not_formats:
        raise PatternError("a format of keys has no exact form")
    nodes = list(cell.patterns)
    if cell.min_length or cell.max_length is not None:
        nodes.append(runs.of_length(cell.min_length, cell.max_length))
    if len(nodes) == 1 and not cell.not_patterns and not cell.excluded and cell.among is None:
        return nodes[0]
    found = [run for node in nodes if (run := runs.run_of(node)) is not None]
    if len(found) == len(nodes) > 0 and not cell.not_patterns and cell.among is None:
        run = runs.common_run(found)
        return runs.run_without(run, cell.excluded) if cell.excluded else runs.pattern_of(run)
    lists = [automata.inverted(automata.of_texts(cell.excluded))] if cell.excluded else []
    if cell.among is not None:
        lists.append(automata.of_texts(cell.among))
    return automata.pattern(automata.combined(nodes, cell.not_patterns, *lists))


def _others(writer: Writer, cell: Object) -> tuple[tuple[Node | None, Term], ...]:
    """The unnamed keys, by pattern. Patterns with one meaning are joined; the rest are made disjoint."""
    nodes = list(dict.fromkeys(node for layer in cell.layers for node, _ in layer.patterns))
    allowed = _names_pattern(writer, cell) if cell.names else None
    if not nodes:
        rest = cell.rest()
        return () if writer.algebra.empty(rest) else ((allowed, rest),)
    groups: dict[Term, list[tuple[tuple[Node, ...], tuple[Node, ...]]]] = {}
    kinds = list(_kinds(nodes))
    for inside, outside in kinds:
        term = all_of(*(_layer_term(layer, inside) for layer in cell.layers))
        if not writer.algebra.empty(term):
            groups.setdefault(term, []).append((inside, outside))
    out: list[tuple[Node | None, Term]] = []
    for term, combinations in groups.items():
        if len(combinations) == len(kinds):
            return ((allowed, term),)
        every_pattern = len(combinations) == len(kinds) - 1 and all(inside for inside, _ in combinations)
        node = _found_in_any(nodes) if every_pattern and allowed is None else _combined(combinations, allowed)
        if node is not None:
            out.append((node, term))
    return tuple(out)


def _kinds(nodes: list[Node]) -> Iterator[tuple[tuple[Node, ...], tuple[Node, ...]]]:
    """Every way in which a key can match some patterns and not others. Raises PatternError: too many."""
    if len(nodes) > 1 and all(automata.apart(a, b) for a, b in itertools.combinations(nodes, 2)):
        yield from (((node,), ()) for node in nodes)
        yield (), tuple(nodes)
        return
    if len(nodes) > MAX_OVERLAPPING:
        raise PatternError(f"more than {MAX_OVERLAPPING} patterns of keys that overlap")
    for choice in itertools.product((True, False), repeat=len(nodes)):
        inside = tuple(node for node, taken in zip(nodes, choice, strict=True) if taken)
        yield inside, tuple(node for node, taken in zip(nodes, choice, strict=True) if not taken)


def _layer_term(layer: Layer, inside: tuple[Node, ...]) -> Term:
    found = [term for node, term in layer.patterns if node in inside]
    return all_of(*found) if found else layer.rest


def _found_in_any(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else Choice(tuple(nodes))


def _combined(combinations: list[tuple[tuple[Node, ...], tuple[Node, ...]]], allowed: Node | None) -> Node | None:
    """The pattern of keys found in all patterns of `inside` and none of `outside`, for any of the combinations; None
    where there is no such key. Raises PatternError."""
    if allowed is None and all(len(inside) == 1 and not outside for inside, outside in combinations):
        return _found_in_any([inside[0] for inside, _ in combinations])
    whole = None
    for inside, outside in combinations:
        part = automata.combined(inside if allowed is None else (allowed, *inside), outside)
        whole = part if whole is None else automata.either(whole, part)
    assert whole is not None, "a group has a combination"
    return None if automata.empty(whole) else automata.pattern(whole)


def sized(writer: Writer, keys: Keys) -> Iterator[Keys]:
    """minProperties and maxProperties as alternatives of present keys, of those left to llguidance only what it holds.

    llguidance lets an unnamed key be repeated, so it can count such keys up to a limit but not beyond one.
    """
    terms = {name: term for name, term in keys.terms.items() if term != NEVER or keys.others}
    optional = [name for name, term in terms.items() if name not in keys.required and term != NEVER]
    certain = len(keys.required)
    fewest = max(0, keys.fewest - certain)
    most = None if keys.most is None else keys.most - certain
    if most is not None and not keys.others and most >= len(optional):
        most = None
    plain = dataclasses.replace(keys, terms=terms, fewest=0, most=None)
    if (most is not None and most < fewest) or (most is not None and most < 0):
        return
    if fewest == 0 and most is None:
        yield plain
    elif fewest > 0 and most is None:
        yield from _at_least(writer, plain, optional, fewest)
    else:
        assert most is not None, "one of the two bounds is there"
        yield from _between(writer, plain, optional, fewest, most)


def _without(keys: Keys, names: set[str]) -> Keys:
    """Keys of those names may not be there; they stay known, so that no other key takes their name."""
    terms = {name: NEVER if name in names else term for name, term in keys.terms.items()}
    return dataclasses.replace(keys, terms=terms)


def _with(keys: Keys, names: set[str]) -> Keys:
    return dataclasses.replace(keys, required=keys.required | names)


def _at_least(writer: Writer, keys: Keys, optional: list[str], fewest: int) -> Iterator[Keys]:
    """Alternatives by the first `fewest` optional keys that are present, in order."""
    if fewest == 1 and keys.others:
        if len(optional) <= MAX_PRESENCE:
            for at, name in enumerate(optional):
                yield _with(_without(keys, set(optional[:at])), {name})
            yield dataclasses.replace(_without(keys, set(optional)), fewest=1)
            return
    elif not keys.others and fewest > len(optional):
        return
    elif math.comb(len(optional), fewest) <= MAX_PRESENCE:
        if keys.others:
            writer.left_out("minProperties", "keys that the schema does not name cannot be counted up to two or more")
            yield keys
            return
        for chosen in itertools.combinations(range(len(optional)), fewest):
            gone = {optional[i] for i in range(chosen[-1]) if i not in chosen}
            yield _with(_without(keys, gone), {optional[i] for i in chosen})
        return
    writer.left_out("minProperties", f"more than {MAX_PRESENCE} ways to choose keys")
    yield keys


def _between(writer: Writer, keys: Keys, optional: list[str], fewest: int, most: int) -> Iterator[Keys]:
    """Alternatives by the optional keys that are present; without other keys only the largest sets matter."""
    sizes = range(min(most, len(optional)) + 1) if keys.others else [min(most, len(optional))]
    if not keys.others:
        ways = math.comb(len(optional), sizes[0]) * math.comb(sizes[0], min(fewest, sizes[0]))
    else:
        ways = sum(math.comb(len(optional), size) for size in sizes)
    if ways > MAX_PRESENCE:
        writer.left_out(
            "maxProperties" if fewest == 0 else "minProperties", f"more than {MAX_PRESENCE} ways to choose keys"
        )
        yield keys
        return
    for size in sizes:
        for chosen in itertools.combinations(optional, size):
            gone = set(optional) - set(chosen)
            if not keys.others:
                for needed in itertools.combinations(chosen, fewest):
                    yield _with(_without(keys, gone), set(needed))
                continue
            missing = max(0, fewest - size)
            if missing > 1:
                writer.left_out(
                    "minProperties", "keys that the schema does not name cannot be counted up to two or more"
                )
            one = _with(_without(keys, gone), set(chosen))
            if most == size:
                yield dataclasses.replace(one, others=())
            else:
                yield dataclasses.replace(one, fewest=missing, most=most - size)


def _written(writer: Writer, keys: Keys) -> Json | None:
    """None where no object is left."""
    out: Json = {"type": "object"}
    properties: dict[str, object] = {}
    for name, term in keys.terms.items():
        if term != NEVER:
            properties[name] = writer.child(term)
    closed = not keys.others
    if properties:
        out["properties"] = properties
    required = [name for name in keys.terms if name in keys.required]
    if any(properties.get(name) is False for name in required):
        return None
    if required:
        out["required"] = required
    patterns: dict[str, object] = {}
    for node, term in keys.others:
        schema = writer.child(term)
        if node is None and not keys.terms:
            if schema != {}:
                out["additionalProperties"] = schema
            continue
        # llguidance keeps known keys out of a pattern, and {} adds nothing to their own schemas
        plain = schema == {} and all(map(_spelled_once, keys.terms))
        if node is None and (plain or sum(map(len, keys.terms)) > MAX_EXCLUDED):
            properties.update({name: False for name, gone in keys.terms.items() if gone == NEVER})
            out["properties"] = properties
            if not plain:
                writer.left_out("additionalProperties", "the named keys are too many to be told apart from others")
                out["additionalProperties"] = schema
                continue
            patterns[ANY_KEY] = schema
            closed = True
            continue
        closed = True
        for text in _key_patterns(node, tuple(keys.terms)):
            patterns[text] = schema
    if patterns:
        out["patternProperties"] = patterns
    if closed:
        out["additionalProperties"] = False
    if keys.fewest:
        out["minProperties"] = keys.fewest + len(required)
    if keys.most is not None and keys.others:
        out["maxProperties"] = keys.most + len(required)
    return out


def _spelled_once(name: str) -> bool:
    """Whether llguidance has one spelling for a key: it writes control characters in two."""
    return all(" " <= char != "\x7f" for char in name)


def _key_patterns(node: Node | None, known: tuple[str, ...]) -> list[str]:
    """The patterns of unnamed keys, without the named ones. Raises PatternError."""
    if node is None:
        return [automata.excluding(known)]
    taken = [name for name in known if automata.matches(node, name)]
    run = runs.run_of(node)
    if taken and run is not None:
        node = runs.run_without(run, taken)
        if node == NOTHING:
            return []
    elif taken:
        left = automata.common(automata.language(node), automata.inverted(automata.of_texts(taken)))
        if automata.empty(left):
            return []
        node = automata.pattern(left)
    return [automata.spelled(node if not isinstance(node, Choice) else Sequence((node,)))]
