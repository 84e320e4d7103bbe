"""A rewritten schema as a Lark grammar, where it asks for what llguidance's own grammar of schemas does not hold: items
that are unique among few values, items that match `contains`, bounds beyond 64 bits, numbers that are no integers.

The schemas that hold one of these become rules, down from the root; everything else stays a schema of its own within.
Which values of a set are used is the parameter of a rule, a bit for each. Whitespace stands in the rules: the library
skips none between a rule and a schema.
Source: llguidance's documentation, "Lark syntax" and "Parametric grammars"."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeAlias

from llguidance import regex_to_lark

from penstock.engine_core.grammar import automata
from penstock.engine_core.grammar.schema.writing import LISTED, NAMED, ONE
from penstock.engine_core.grammar.schema.writing_objects import ANY_KEY
from penstock.engine_core.grammar.schema.writing_scalars import holds, numerals
from penstock.protocol.errors import UnsupportedSchema

Json: TypeAlias = dict[str, object]
State: TypeAlias = tuple[int, int]  # items of an array so far: those that match, and all
OPTIONS = "x-guidance"  # a schema's key for options of the library
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NOTHING = '""'
MAX_COPIED = 4  # times the schema's text: what several schemas of a grammar refer to stands in each of them
MAX_COMPARED = 500  # characters of several patterns of keys: of longer ones llguidance may not see that they are apart
MIN_COPIED = 20_000  # characters that a grammar may have whatever the schema


def grammar(schema: Json, options: Json) -> str | None:
    """A Lark grammar of a rewritten schema, with the library's `options` for JSON; None where it needs none.

    Raises UnsupportedSchema for an object that has no form in Lark, and for a grammar that would grow too long.
    """
    found = schema.get("$defs", {})
    assert isinstance(found, dict), "$defs are written as an object"
    body = {keyword: value for keyword, value in schema.items() if keyword != "$defs"}
    if not any(_own(part) for root in (body, *found.values()) for part in _parts(root)):
        return None
    writer = _Rules(found, options, max(MIN_COPIED, MAX_COPIED * len(json.dumps(schema))))
    return writer.source(body) if writer.needs(body) else None


def _children(node: Json) -> Iterator[Json]:
    for keyword, value in node.items():
        found: list[object] = []
        if keyword in NAMED and isinstance(value, dict):
            found = list(value.values())
        elif keyword in LISTED and isinstance(value, list):
            found = value
        elif keyword in ONE:
            found = [value]
        yield from (child for child in found if isinstance(child, dict))


def _parts(root: Json) -> list[Json]:
    """A schema and all schemas within."""
    level = [root]
    for node in level:
        level.extend(_children(node))
    return level


def _target(node: Json) -> str | None:
    reference = node.get("$ref")
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else None


def _referenced(node: Json) -> dict[str, None]:
    """Names of the definitions that a schema refers to."""
    return dict.fromkeys(target for part in _parts(node) if (target := _target(part)) is not None)


def _whole(node: Json, keyword: str) -> int | None:
    value = node.get(keyword)
    return value if isinstance(value, int) else None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _own(node: Json) -> bool:
    """Whether a schema itself has no form but Lark's."""
    if "uniqueItems" in node or "contains" in node or "not" in node:
        return True
    keys = node.get("patternProperties")
    if isinstance(keys, dict) and len(keys) > 1 and sum(map(len, keys)) > MAX_COMPARED:
        return True
    return any(not holds(node.get("type"), node[bound]) for bound in BOUNDS if bound in node)


class _Rules:
    """Writes the rules of one grammar, each schema once."""

    def __init__(self, definitions: dict[str, Json], options: Json, longest: int) -> None:
        self._definitions = definitions
        self._options = options
        self._lines: list[str] = []
        self._known: dict[str, str] = {}  # a schema's text, or `$ref` and a name → its rule
        self._reach = {name: _referenced(node) for name, node in definitions.items()}
        self._lark = self._holding()  # definitions that need rules
        self._waiting: list[str] = []  # definitions whose rules `source` writes: they may refer to one another for long
        self._longest = longest
        self._length = 0  # of the schemas within
        pattern = options.get("whitespace_pattern")
        self._space = f"{self._rule('WS?')} " if isinstance(pattern, str) else ""
        if isinstance(pattern, str):
            self._lines.append(f"WS: /{regex_to_lark(pattern, '')}/")
        self._comma = f'{self._space}"," {self._space}'

    def _holding(self) -> set[str]:
        users: dict[str, list[str]] = {name: [] for name in self._definitions}
        for name, targets in self._reach.items():
            for target in targets:
                users[target].append(name)
        level = [name for name, node in self._definitions.items() if any(map(_own, _parts(node)))]
        found = set(level)
        for name in level:
            more = [user for user in users[name] if user not in found]
            level.extend(more)
            found.update(more)
        return found

    def source(self, root: Json) -> str:
        start = f"start: {self.rule(root)}"
        for name in self._waiting:
            rule = self._known[f"$ref {name}"]
            self._lines[int(rule[1:])] = f"{rule}: {self.rule(self._definitions[name])}"
        return "\n".join([start, *self._lines])

    def needs(self, node: Json) -> bool:
        """Whether a schema, or one that it refers to, has no form but Lark's."""
        return any(_own(part) or _target(part) in self._lark for part in _parts(node))

    def rule(self, node: Json) -> str:
        """The rule of a schema."""
        target = _target(node)
        if target is not None and target in self._lark:
            return self._defined(target)
        text = json.dumps(node)
        if text not in self._known:
            self._known[text] = self._rule(self._body(node)) if self.needs(node) else self._schema(node)
        return self._known[text]

    def _defined(self, name: str) -> str:
        key = f"$ref {name}"
        if key not in self._known:
            self._known[key] = self._rule(NOTHING)
            self._waiting.append(name)
        return self._known[key]

    def _rule(self, body: str) -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _schema(self, node: Json) -> str:
        """The rule of a schema that the library takes as it is, with the definitions that it refers to."""
        reached = dict(_referenced(node))
        waiting = list(reached)
        for name in waiting:
            waiting.extend(more for more in self._reach[name] if more not in reached)
            reached.update(self._reach[name])
        definitions: Json = {"$defs": {name: self._definitions[name] for name in reached}} if reached else {}
        text = json.dumps({**node, **definitions, OPTIONS: self._options})
        self._length += len(text)
        if self._length > self._longest:
            reason = f"what is left beside rules in Lark has more than {self._longest} characters"
            raise UnsupportedSchema("schema", "", reason)
        return self._rule(f"%json {text}")

    def _body(self, node: Json) -> str:
        options = node.get("anyOf")
        if isinstance(options, list):
            plain = [option for option in options if not self.needs(option)]
            rules = [self.rule(option) for option in options if self.needs(option)]
            if plain:
                rules.append(self.rule({"anyOf": plain} if len(plain) > 1 else plain[0]))
            return " | ".join(rules)
        match node.get("type"):
            case "integer" | "number" as kind:
                return self._number(node, "fraction" if "not" in node else kind)
            case "array" if "uniqueItems" in node:
                return self._unique(node)
            case "array" if "contains" in node:
                return self._counted(node)
            case "array":
                return self._array(node)
            case "object":
                return self._object(node)
        raise AssertionError("rewritten schemas name one type, or list alternatives")

    def _number(self, node: Json, kind: str) -> str:
        low, high = _whole(node, "minimum"), _whole(node, "maximum")
        over, under = _whole(node, "exclusiveMinimum"), _whole(node, "exclusiveMaximum")
        pattern = numerals(
            kind,
            low if over is None else over,
            high if under is None else under,
            low_open=over is not None,
            high_open=under is not None,
        )
        assert pattern is not None, "a cell without numbers is not written"
        return f"/{pattern}/"

    def _brackets(self, opening: str, body: str | None, closing: str, *, empty: bool) -> str:
        """`body` is None where nothing can stand inside."""
        inside = "" if body is None else f"({body} {self._space}){'?' if empty else ''} "
        return f'"{opening}" {self._space}{inside}"{closing}"'

    def _unique(self, node: Json) -> str:
        values = node["items"]
        assert isinstance(values, dict), "the values of unique items are listed"
        fewest, most = _whole(node, "minItems") or 0, _whole(node, "maxItems")
        assert most is not None, "there are no more items than values"
        place = len(self._lines)
        one, more = f"r{place}", f"r{place + 1}"
        listed = self._listed(values, "enum")
        texts = [json.dumps(value, ensure_ascii=False) for value in listed]
        alternatives = [f"{_literal(text)} {more}::set_bit({i}) %if bit_clear({i})" for i, text in enumerate(texts)]
        self._lines.append(f"{one}::_: {' | '.join(alternatives)}")
        # a comma after the last value would lead nowhere; the library takes counts up to 63
        goes_on = f"{self._comma}{one}::_ %if bit_count_le(_, {most - 1})"
        ends = f"{NOTHING} %if bit_count_gt(_, {fewest - 1})" if fewest else NOTHING
        self._lines.append(f"{more}::_: {ends} | {goes_on}")
        return self._brackets("[", None if most == 0 else f"{one}::0x0", "]", empty=fewest == 0)

    def _counted(self, node: Json) -> str:
        """A rule for each number of items that match and, where that matters, of all items so far."""
        least, highest = _whole(node, "minContains") or 0, _whole(node, "maxContains")
        fewest, most = _whole(node, "minItems") or 0, _whole(node, "maxItems")
        matching, other = node["contains"], node["items"]
        if highest is not None:
            other = self._listed(other, "anyOf")[0]
        kinds = [(self.rule(kind), step) for kind, step in ((other, 0), (matching, 1)) if isinstance(kind, dict)]
        top = least if highest is None else highest
        length = most if most is not None else 0 if fewest <= least else fewest
        names: dict[State, str] = {}
        bodies: dict[State, list[str]] = {}
        level: list[State | None] = [None]  # before the first item
        for state in level:
            before = "" if state is None else f"{names[state]} {self._comma}"
            for kind, step in kinds:
                found, total = state or (0, 0)
                if (highest is not None and found + step > highest) or (most is not None and total + 1 > most):
                    continue
                target = min(found + step, top), min(total + 1, length)
                if target not in names:
                    names[target] = self._rule(NOTHING)
                    bodies[target] = []
                    level.append(target)
                bodies[target].append(before + kind)
        for state, alternatives in bodies.items():
            self._lines[int(names[state][1:])] = f"{names[state]}: {' | '.join(alternatives)}"
        ends = [names[state] for state in names if state[0] >= least and (not length or state[1] >= fewest)]
        body = f"({' | '.join(ends)})" if ends else None
        return self._brackets("[", body, "]", empty=least == 0 and fewest == 0)

    def _listed(self, node: object, keyword: str) -> list[object]:
        """What a schema lists by a keyword, itself or the definition that it refers to."""
        assert isinstance(node, dict), "such a schema is an object"
        target = _target(node)
        found = (node if target is None else self._definitions[target])[keyword]
        assert isinstance(found, list), "alternatives and values are listed"
        return found

    def _array(self, node: Json) -> str:
        prefix = node.get("prefixItems", [])
        rest = node.get("items", {})
        fewest, most = _whole(node, "minItems") or 0, _whole(node, "maxItems")
        assert isinstance(prefix, list), "items are listed"
        prefix = prefix[:most]
        body: str | None = None
        if isinstance(rest, dict) and (most is None or most > len(prefix)):
            first = 0 if prefix else 1
            low = max(first, fewest - len(prefix)) - first
            high = "" if most is None else most - len(prefix) - first
            item = self.rule(rest)
            more = f"({self._comma}{item}){{{low},{high}}}"
            body = more if prefix else f"{item} {more}"
        for at in range(len(prefix) - 1, -1, -1):
            before = self._comma if at else ""
            body = self._rule(f"{before}{self.rule(prefix[at])} {body or ''}")
            if at and at >= fewest:
                body = self._rule(f"{NOTHING} | {body}")
        return self._brackets("[", body, "]", empty=fewest == 0)

    def _object(self, node: Json) -> str:
        properties, required = node.get("properties", {}), node.get("required", [])
        assert isinstance(properties, dict), "properties are named"
        assert isinstance(required, list), "required keys are listed"
        present = {name: child for name, child in properties.items() if child is not False}
        low, high = self._unnamed(node, len(present), len(required))
        keys = self._other_keys(node, list(properties)) if high != 0 else []
        first: str | None = None
        rest = NOTHING
        if keys:
            other = self._rule(" | ".join(keys))
            more = f" ({self._comma}{other}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
            first = other if high == 1 else other + more
            rest = self._rule(f"({self._comma}{other}){{{low},{'' if high is None else high}}}")
        for name in reversed(present):
            key = _literal(json.dumps(name, ensure_ascii=False))
            member = self._rule(f'{key} {self._space}":" {self._space}{self.rule(present[name])}')
            behind, optional = f"{member} {rest}", name not in required
            first = self._rule(f"{behind} | {first}" if optional and first is not None else behind)
            rest = self._rule(f"{self._comma}{behind}{f' | {rest}' if optional else ''}")
        return self._brackets("{", first, "}", empty=not required and low == 0)

    def _unnamed(self, node: Json, known: int, required: int) -> tuple[int, int | None]:
        """How many keys without a name there may be."""
        fewest, most = _whole(node, "minProperties"), _whole(node, "maxProperties")
        if (fewest is not None or most is not None) and known != required:
            raise UnsupportedSchema("minProperties", "", "keys cannot be counted beside what has a form in Lark alone")
        return max(0, (fewest or 0) - required), None if most is None else most - required

    def _other_keys(self, node: Json, names: list[str]) -> list[str]:
        """Members whose keys have no name, by pattern."""
        patterns = node.get("patternProperties", {})
        assert isinstance(patterns, dict), "patterns are keys"
        rest = node.get("additionalProperties", {})
        found: dict[str | None, object] = dict(patterns)
        if rest is not False:
            if names or patterns:
                raise UnsupportedSchema("additionalProperties", "", "the named keys are too many to be told apart")
            found[None] = rest
        out = []
        for pattern, child in found.items():
            if not isinstance(child, dict):
                continue
            text: Json = {"type": "string"}
            if pattern is not None and (names or pattern != ANY_KEY):
                text["pattern"] = automata.excluding(names) if pattern == ANY_KEY else pattern
            out.append(f'{self.rule(text)} {self._space}":" {self._space}{self.rule(child)}')
        return out
