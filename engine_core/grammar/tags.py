"""Structural tags into grammars: free text with structures between markers, as tool calls are written.

Two spellings are taken. The older one: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}. The newer one:
{"format": FORMAT}, where a format is one of const_string, json_schema, regex, grammar, any_text, sequence, or,
optional, tag, triggered_tags and tags_with_separator. Beyond what others know, an any_text that is all of a tag's
content takes `max_tokens`, after which the control token that ends the tag must come, a json_schema `lenient`, and a
regex or grammar `quoted`: then the output is the JSON string of a text that follows it.
Source: XGrammar's documentation of structural tags; vLLM's `structural_tag`.

Text before a trigger ends where the trigger first stands, so a trigger cannot be written without its structure.

Control tokens stand for themselves in what marks a structure: the begin and the end of a tag, a trigger, a separator.
Everything else is text, whatever it reads like. An end-of-sequence token ends the output, so it can only be the end of
a tag that nothing follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol, TypeVar

from penstock.engine_core.grammar import ebnf
from penstock.engine_core.grammar.lark import quoted_grammar, quoted_regex
from penstock.engine_core.grammar.regexes import check_ends, check_lark, lark_regex, quoted
from penstock.protocol.errors import InvalidRequest

DEEPEST = 32
MOST_TAGS = 1000
MOST_TOKENS = 1 << 24  # of free text that is bounded
TERMINAL = "T"  # Lark tells a terminal from a rule by its first letter
JSON = Mapping[str, Any]

T = TypeVar("T")

WORDS: Mapping[str, str] = {"dict": "an object", "list": "a list", "str": "a string"}


class SchemaForm(Protocol):
    """What a schema becomes: a grammar by its kind, `json_schema` or `lark_grammar`."""

    def form(self, schema: object, *, lenient: bool = False) -> dict[str, Any]: ...


class TagGrammar:
    """Collects the Lark rules of one structural tag and the grammars that they refer to.

    `specials` has control tokens by their text, `plain` is the others, as ranges of ids, and `ends` names those
    control tokens that end a sequence.
    """

    def __init__(
        self, schemas: SchemaForm, specials: Mapping[str, int], plain: str = "", ends: Set[str] = frozenset()
    ) -> None:
        self._schemas = schemas
        self._plain = plain
        self._ends = ends
        self._rules: list[str] = ["TEXT: /(?s:.*)/"]
        self._others: list[dict[str, Any]] = []
        names = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._ids = specials

    def source(self, tag: object) -> str:
        """The serialised grammar. Raises InvalidRequest naming the place."""
        found = expect(tag, dict, "structural_tag")
        if "format" in found:
            body = self._format(found["format"], "format", 0, last=True)
        else:
            body = self._triggered(older(found), "structural_tag", 0, last=True)
        text = "\n".join([f"start: {body}", *self._rules])
        for lark in (text, *[other.get("lark_grammar", "") for other in self._others]):
            check_lark(lark)
        return json.dumps({"grammars": [{"name": "tag", "lark_grammar": text}, *self._others]})

    def _format(self, value: object, path: str, depth: int, *, last: bool) -> str:
        """A Lark expression in brackets. `last`: the output ends with it."""
        if depth > DEEPEST:
            raise wrong(path, f"formats are nested deeper than {DEEPEST} levels")
        found = expect(value, dict, path)
        match found.get("type"):
            case "const_string":
                return quoted(expect(found.get("value"), str, f"{path}.value"))
            case "json_schema":
                lenient = found.get("lenient") is True
                return self._schema(found.get("json_schema"), f"{path}.json_schema", lenient=lenient)
            case "regex" if is_quoted(found):
                pattern = expect(found.get("pattern"), str, f"{path}.pattern")
                return self._other({"lark_grammar": quoted_regex(pattern)})
            case "grammar" if is_quoted(found):
                text = expect(found.get("grammar"), str, f"{path}.grammar")
                return self._other({"lark_grammar": quoted_grammar(text)})
            case "regex":
                return self._rule(f"/{lark_regex(expect(found.get('pattern'), str, f'{path}.pattern'))}/", TERMINAL)
            case "grammar":
                return self._grammar(expect(found.get("grammar"), str, f"{path}.grammar"))
            case "any_text":
                return "TEXT"
            case "sequence":
                return self._sequence(items(found, "elements", path), f"{path}.elements", depth, last=last)
            case "or":
                elements = items(found, "elements", path)
                parts = [
                    self._format(element, f"{path}.elements[{number}]", depth + 1, last=last)
                    for number, element in enumerate(elements)
                ]
                return f"({' | '.join(parts)})"
            case "optional":
                return f"({self._format(found.get('content'), f'{path}.content', depth + 1, last=last)})?"
            case "tag":
                return self._tag(found, path, depth, last=last)
            case "triggered_tags":
                return self._triggered(found, path, depth, last=last)
            case "tags_with_separator":
                return self._separated(found, path, depth, last=last)
            case other:
                raise wrong(f"{path}.type", f"{other!r} is no format that is served")

    def _sequence(self, elements: Sequence[object], path: str, depth: int, *, last: bool) -> str:
        for number, element in enumerate(elements[:-1]):
            if isinstance(element, dict) and element.get("type") in ("any_text", "triggered_tags"):
                raise wrong(f"{path}[{number}]", "free text must come last, or within a tag that ends")
        parts = [
            self._format(element, f"{path}[{number}]", depth + 1, last=last and number == len(elements) - 1)
            for number, element in enumerate(elements)
        ]
        return f"({' '.join(parts)})"

    def _tag(self, tag: JSON, path: str, depth: int, trigger: str = "", *, last: bool) -> str:
        """A tag without the trigger that has been written before it."""
        begin = expect(tag.get("begin"), str, f"{path}.begin")
        ends = tag.get("end", "")
        ends = ends if isinstance(ends, list) and ends else [ends]
        texts = [expect(end, str, f"{path}.end") for end in ends]
        content = tag["schema"] if "schema" in tag else tag.get("content")
        if "schema" in tag:
            content = {"type": "json_schema", "json_schema": content}
        kind = content.get("type") if isinstance(content, dict) else None
        pieces = [self._marker(begin[len(trigger) :], f"{path}.begin")]
        if kind == "any_text" and last and self._ends >= set(texts):
            assert isinstance(content, dict)
            pieces.append(self._bounded(content.get("max_tokens"), path))
        elif kind == "any_text" and all(texts):
            assert isinstance(content, dict)
            pieces.append(self._until(texts, content.get("max_tokens"), path))
        elif kind == "regex" and not is_quoted(content) and all(texts) and not any(map(self._special.search, texts)):
            pattern = lark_regex(expect(expect(content, dict, path).get("pattern"), str, f"{path}.content.pattern"))
            pieces.append(self._rule(f"/{pattern}/ ({' | '.join(map(quoted, texts))})", TERMINAL))
        else:
            if kind in ("any_text", "triggered_tags") and any(texts):
                raise wrong(f"{path}.content", "free text needs an end that is not empty")
            pieces.append(self._format(content, f"{path}.content", depth + 1, last=False))
            # The end of the sequence comes by itself behind the last structure.
            marks = [quoted("") if last and end in self._ends else self._marker(end, f"{path}.end") for end in texts]
            pieces.append(f"({' | '.join(marks)})")
        return f"({' '.join(pieces)})"

    def _triggered(self, value: JSON, path: str, depth: int, *, last: bool) -> str:
        triggers = [expect(text, str, f"{path}.triggers") for text in items(value, "triggers", path)]
        tags = items(value, "tags", path)
        once, least = bool(value.get("stop_after_first")), bool(value.get("at_least_one"))
        groups: dict[str, list[str]] = {}
        for number, entry in enumerate(tags):
            place = f"{path}.tags[{number}]"
            tag = expect(entry, dict, place)
            begin = expect(tag.get("begin"), str, f"{place}.begin")
            trigger = min((text for text in triggers if text and begin.startswith(text)), key=len, default=None)
            if trigger is None:
                raise wrong(f"{place}.begin", "it starts with none of the triggers")
            groups.setdefault(trigger, []).append(self._tag(tag, place, depth, trigger, last=last and once))
        parts = [f"{self._until([text], path=path)} ({' | '.join(rest)})" for text, rest in groups.items()]
        tag_rule = self._rule(" | ".join(parts))
        if once:
            return tag_rule if least else f"({tag_rule} | TEXT)"
        return f"({tag_rule}{'+' if least else '*'} TEXT)"

    def _separated(self, value: JSON, path: str, depth: int, *, last: bool) -> str:
        tags = items(value, "tags", path)
        once = bool(value.get("stop_after_first"))
        parts = [
            self._tag(expect(tag, dict, place := f"{path}.tags[{number}]"), place, depth + 1, last=last and once)
            for number, tag in enumerate(tags)
        ]
        rule = self._rule(" | ".join(parts))
        separator = self._marker(expect(value.get("separator", ""), str, f"{path}.separator"), f"{path}.separator")
        many = rule if once else f"{rule} ({separator} {rule})*"
        return f"({many})" if value.get("at_least_one") else f"({many})?"

    def _until(self, texts: Sequence[str], most: object = None, path: str = "structural_tag") -> str:
        """Free text that ends where one of these first stands, after at most so many tokens."""
        controls = [text for text in texts if self._special.fullmatch(text)]
        plain = [text for text in texts if not self._special.search(text)]
        if len(controls) + len(plain) < len(texts):
            raise wrong("structural_tag", "what ends free text is a control token or a text, not both")
        marks = [self._marker(text, path) for text in controls]
        parts = [f"{self._bounded(most, path)} ({' | '.join(marks)})"] if marks else []
        if plain and most is not None:
            raise wrong(path, "max_tokens needs a control token as the end")
        if plain:
            name = f"until_{len(self._rules)}"
            self._rules.append(f"{name}[lazy]: TEXT ({' | '.join(map(quoted, plain))})")
            parts.append(name)
        return f"({' | '.join(parts)})"

    def _marker(self, text: str, path: str) -> str:
        """A literal in which control tokens stand for themselves."""
        parts, place = [], 0
        for match in self._special.finditer(text):
            if match[0] in self._ends:
                raise wrong(path, f"{match[0]} ends the output, so nothing can follow it: leave it out")
            if match.start() > place:
                parts.append(quoted(text[place : match.start()]))
            parts.append(f"<[{self._ids[match[0]]}]>")
            place = match.end()
        if place < len(text) or not parts:
            parts.append(quoted(text[place:]))
        return " ".join(parts)

    def _rule(self, body: str, kind: str = "rule") -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _bounded(self, most: object, path: str) -> str:
        """Free text of at most so many tokens. A rule counts them: the library's own limit forbids going back."""
        if most is None:
            return "TEXT"
        if type(most) is not int or not 0 < most <= MOST_TOKENS:
            raise wrong(path, f"max_tokens must be a whole number from 1 to {MOST_TOKENS}")
        name = f"text_{len(self._rules)}"
        self._rules.append(f"{name}: (<[{self._plain}]>){{0,{most}}}")
        return name

    def _schema(self, schema: object, path: str, *, lenient: bool = False) -> str:
        if not isinstance(schema, dict | bool):
            raise wrong(path, "a schema is an object or a boolean")
        return self._other(self._schemas.form(schema, lenient=lenient))

    def _grammar(self, text: str) -> str:
        kind, found = ebnf.translate(text) if ebnf.is_ebnf(text) else ("lark", text)
        if kind == "lark":
            check_ends(found, {name: self._ids[name] for name in self._ends})
        return self._other({"lark_grammar": found if kind == "lark" else f"start: /{found}/"})

    def _other(self, grammar: dict[str, Any]) -> str:
        name = f"g{len(self._others)}"
        self._others.append({"name": name, **grammar})
        return f"@{name}"


def is_quoted(form: object) -> bool:
    """Whether a format is of a JSON string that holds its text."""
    return isinstance(form, dict) and form.get("quoted") is True


def older(tag: JSON) -> JSON:
    """The older spelling as triggered tags."""
    structures = items(tag, "structures", "structural_tag")
    return {"triggers": tag.get("triggers"), "tags": structures}


def items(value: JSON, key: str, path: str) -> Sequence[object]:
    """A list that is not empty."""
    found = expect(value.get(key), list, f"{path}.{key}")
    if not 0 < len(found) <= MOST_TAGS:
        raise wrong(f"{path}.{key}", f"it must hold 1 to {MOST_TAGS} entries")
    return found


def expect(value: object, kind: type[T], path: str) -> T:
    if not isinstance(value, kind):
        raise wrong(path, f"it must be {WORDS[kind.__name__]}")
    return value


def wrong(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"structural tag, {path}: {what}", code="invalid_grammar")
