"""Judging a schema front: does the compiled automaton accept what an independent validator accepts, and nothing else?

An automaton writes the keys of an object in the order of the schema and a number in one spelling. Both are by design,
so an instance is written in the schema's order before it is judged: `texts` walks the rewritten schema beside the value
and gives each object's known keys in the order of `properties`, other keys after them; where alternatives order keys
differently, it gives a text for each order, and the instance counts as accepted when one of them is. Integral
floats are written as integers, as the automaton does."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator

import llguidance
import msgspec

from penstock.engine_core.grammar import unique_items
from penstock.engine_core.grammar.schema import compile_schema, lark
from penstock.protocol.errors import UnsupportedSchema

MAX_TEXTS = 64  # orders tried for one instance
LIMITS = llguidance.LLParserLimits(max_items_in_row=50_000, step_max_items=1_000_000)
EOS = 256


class ByteVocabulary:
    """A vocabulary of the 256 bytes and an end token, in the form that llguidance reads."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<eos>")
    special_token_ids = (EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def byte_tokenizer() -> llguidance.LLTokenizer:
    """A tokenizer under which every text has exactly one split."""
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteVocabulary()))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What became of a schema. `matcher` is None where it was refused, and `refusal` says why."""

    schema: object
    matcher: llguidance.LLMatcher | None
    refusal: str
    approximations: tuple[str, ...]
    rewrite_seconds: float
    compile_seconds: float
    unique: tuple[unique_items.Place, ...] = ()


def compiled(tokenizer: llguidance.LLTokenizer, schema: object, lenient: bool = False) -> Compiled:
    """Compile one schema as a request's is, fallbacks of lenient included."""
    start = time.process_time()
    try:
        made = compile_schema(schema, {"whitespace_pattern": "[ ]?"}, lenient=lenient, follows=True)
    except UnsupportedSchema as error:
        return Compiled(schema, None, error.message, (), time.process_time() - start, 0.0)
    middle = time.process_time()
    grammar = made.lark or llguidance.LLMatcher.grammar_from_json_schema(json.dumps(made.json))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    refusal = matcher.get_error().partition("\n")[0] if matcher.is_error() else ""
    rewritten = {key: value for key, value in made.json.items() if key != lark.OPTIONS}
    return Compiled(
        rewritten, None if refusal else matcher, refusal, made.approximations, middle - start,
        time.process_time() - middle, msgspec.convert(made.unique, tuple[unique_items.Place, ...]),
    )  # fmt: skip


def accepts(matcher: llguidance.LLMatcher, text: str) -> bool:
    """Whether the whole text is one that the automaton can produce. The matcher is left as it was."""
    walk = matcher.deep_copy()
    tokens = list(text.encode())
    return walk.try_consume_tokens(tokens) == len(tokens) and walk.is_accepting() and not walk.is_error()


def accepts_value(compiled_schema: Compiled, value: object) -> bool:
    """Whether the automaton accepts a value in the schema's own order of keys."""
    assert compiled_schema.matcher is not None, "a refused schema accepts nothing"
    matcher, unique = compiled_schema.matcher, compiled_schema.unique
    return any(
        accepts(matcher, text) and (not unique or unique_items.follow(unique, unique_items.Spot(), text.encode()))
        for text in texts(value, compiled_schema.schema)
    )


def texts(value: object, schema: object) -> tuple[str, ...]:
    """JSON texts of a value, one for each order of keys that the rewritten schema can give it."""
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    found = dict.fromkeys(itertools.islice(_texts(value, schema, definitions), MAX_TEXTS))
    return tuple(found) or (_scalar(value),)


def _scalar(value: object) -> str:
    return json.dumps(_spelled(value), ensure_ascii=False, separators=(",", ":"))


def _spelled(value: object) -> object:
    """Integral floats as integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    return value


def _texts(value: object, schema: object, definitions: dict[str, object]) -> Iterator[str]:
    if not isinstance(value, dict | list):
        yield _scalar(value)
        return
    seen = set()
    for option in _options(schema, definitions):
        parts = _object(value, option) if isinstance(value, dict) else _array(value, option)
        choices = [
            [prefix + text for text in itertools.islice(_texts(child, inner, definitions), MAX_TEXTS)]
            for prefix, child, inner in parts
        ]
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        for chosen in itertools.islice(itertools.product(*choices), MAX_TEXTS):
            text = opening + ",".join(chosen) + closing
            if text not in seen:
                seen.add(text)
                yield text


def _options(schema: object, definitions: dict[str, object]) -> Iterator[dict[str, object]]:
    """The alternatives of a rewritten schema, references followed."""
    while isinstance(schema, dict) and "$ref" in schema:
        schema = definitions[str(schema["$ref"]).removeprefix("#/$defs/")]
    if not isinstance(schema, dict):
        yield {}
        return
    branches = schema.get("anyOf")
    if not isinstance(branches, list):
        yield schema
        return
    for branch in branches:
        yield from _options(branch, definitions)


def _object(value: dict[str, object], schema: dict[str, object]) -> list[tuple[str, object, object]]:
    known = schema.get("properties", {})
    assert isinstance(known, dict)
    patterned = schema.get("patternProperties", {})
    assert isinstance(patterned, dict)
    others = next(iter(patterned.values()), schema.get("additionalProperties", {}))
    order = [*(name for name in known if name in value), *(name for name in value if name not in known)]
    return [(f"{_scalar(name)}:", value[name], known.get(name, others)) for name in order]


def _array(value: list[object], schema: dict[str, object]) -> list[tuple[str, object, object]]:
    prefix = schema.get("prefixItems", [])
    assert isinstance(prefix, list)
    rest = schema.get("items", {})
    if "contains" in schema:
        rest = {"anyOf": [rest, schema["contains"]]}
    return [("", item, prefix[i] if i < len(prefix) else rest) for i, item in enumerate(value)]
