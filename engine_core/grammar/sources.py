"""What a client asked for as the source that the automaton library compiles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.engine_core.grammar import ebnf
from penstock.engine_core.grammar.fields import read_json, text_of
from penstock.engine_core.grammar.positions import BOUNDED
from penstock.engine_core.grammar.regexes import (
    any_of,
    check_ends,
    check_lark,
    check_regex,
    check_schema,
    check_texts,
    lark_regex,
)
from penstock.engine_core.grammar.schema import compile_schema
from penstock.engine_core.grammar.tags import TagGrammar
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar

SHORT = 4096  # characters of a schema, which take 0.2 ms to be read as JSON


class Source(msgspec.Struct, frozen=True):
    """A serialised grammar of llguidance, and what it does not hold exactly.

    In Lark wherever there is one grammar alone and it is long: llguidance reads that without the GIL, but holds it as
    long as it reads JSON, for milliseconds, in the process where all streams would wait. A short schema is read sooner
    as JSON, by a millisecond.
    """

    text: str
    approximations: tuple[str, ...] = ()
    unique: bytes = b""  # as `Automaton.unique`


class SchemaForm:
    """What schemas of one request become: rewritten, with the request's whitespace."""

    def __init__(self, whitespace: str, *, lenient: bool) -> None:
        self._lenient = lenient
        self._approximations: list[str] = []
        self.unique = b""  # of the schema that an output follows, as `Automaton.unique`
        match whitespace:
            case "none":
                self._options: dict[str, Any] = {"whitespace_flexible": False}
            case "bounded":
                self._options = {"whitespace_pattern": BOUNDED}
            case pattern:
                check_regex(pattern)
                self._options = {"whitespace_pattern": pattern}

    @property
    def approximations(self) -> tuple[str, ...]:
        """Of all schemas so far."""
        return tuple(dict.fromkeys(self._approximations))

    def form(self, schema: object, *, lenient: bool = False, follows: bool = False) -> dict[str, Any]:
        """A grammar for llguidance, by its kind: `json_schema` or `lark_grammar`. If the output `follows` this schema
        alone, `unique` says what the grammar does not hold.

        Raises UnsupportedSchema.
        """
        found = compile_schema(
            schema, self._options, lenient=lenient or self._lenient, follows=follows, check=check_schema
        )
        self._approximations += found.approximations
        self.unique = msgspec.json.encode(found.unique) if found.unique else b""
        return {"json_schema": found.json} if found.lark is None else {"lark_grammar": found.lark}


def source_of(grammar: Grammar, tokens: GrammarTokens) -> Source:
    """Raises InvalidRequest where the grammar is malformed or asks for what no automaton holds."""
    source = text_of(grammar)
    schemas = SchemaForm(grammar.whitespace, lenient=grammar.lenient)
    match grammar.kind:
        case "json_object":
            text = schema_source(schemas, {"type": "object"})
        case "json_schema":
            text = schema_source(schemas, read_json(source))
        case "regex":
            text = regex_source(source)
        case "choice":
            choices = read_choices(source)
            check_texts(choices)
            text = pattern_source(any_of(choices))
        case "grammar":
            text = grammar_source(source, {name: tokens.specials[name] for name in tokens.ends})
        case "structural_tag":
            text = TagGrammar(schemas, tokens.specials, tokens.plain, tokens.ends).source(read_json(source))
        case other:
            raise InvalidRequest(f"{other!r} is no kind of grammar", code="invalid_grammar")
    return Source(text, schemas.approximations, schemas.unique)


def schema_source(schemas: SchemaForm, schema: object) -> str:
    """A grammar of one schema."""
    form = schemas.form(schema, follows=True)
    if "lark_grammar" in form:
        lark: str = form["lark_grammar"]
        return lark
    text = json.dumps(form["json_schema"])
    if len(text) <= SHORT:
        return f'{{"grammars": [{{"name": "json", "json_schema": {text}}}]}}'
    return f"start: %json {text}"


def grammar_source(text: str, ends: Mapping[str, int]) -> str:
    """A grammar in EBNF or in Lark. `ends` are the model's end-of-sequence tokens."""
    kind, found = ebnf.translate(text) if ebnf.is_ebnf(text) else ("lark", text)
    if kind == "regex":
        return regex_source(found)
    if found.lstrip().startswith("{"):  # which the automaton library takes for grammars in JSON, past our limits
        raise InvalidRequest("a grammar in Lark begins with a rule, and none with {", code="invalid_grammar")
    check_lark(found)
    check_ends(found, ends)
    return found


def regex_source(pattern: str) -> str:
    """A grammar of one regular expression."""
    check_regex(pattern)
    return pattern_source(pattern)


def pattern_source(pattern: str) -> str:
    return f"start: /{lark_regex(pattern)}/"


def read_choices(source: str) -> list[str]:
    """Raises InvalidRequest unless it is a list of strings, at least one."""
    found = read_json(source)
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise InvalidRequest("choices are a list of strings, at least one", code="invalid_grammar")
    return list(dict.fromkeys(found))
