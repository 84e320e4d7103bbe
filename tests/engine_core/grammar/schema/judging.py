"""What the tests of the schema front share: a rewritten schema against jsonschema, value by value."""

from __future__ import annotations

import functools
import re
from typing import Any

import llguidance

from benchmarks.schema_instances import judge
from benchmarks.schema_judge import Compiled, accepts_value, byte_tokenizer, compiled
from penstock.engine_core.grammar.schema.unique_items import MARK
from penstock.engine_core.grammar.schema.writing import rewrite
from penstock.protocol.errors import UnsupportedSchema


@functools.cache
def tokenizer() -> llguidance.LLTokenizer:
    return byte_tokenizer()


def made(schema: object, lenient: bool = False) -> Compiled:
    """A schema compiled; it must not be refused."""
    out = compiled(tokenizer(), schema, lenient)
    assert out.matcher is not None, out.refusal
    return out


def refusal(schema: object) -> UnsupportedSchema:
    """Why a schema is refused; it must be."""
    try:
        rewritten = rewrite(schema, follows=True)
    except UnsupportedSchema as error:
        return error
    raise AssertionError(f"not refused: {rewritten.schema}")


def portable(schema: Any) -> Any:
    """A rewritten schema with its patterns in Python's dialect, and `uniqueItems` where the output is followed."""
    if isinstance(schema, list):
        return [portable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "pattern":
            out[key] = python_pattern(value)
        elif key == "patternProperties":
            out[key] = {python_pattern(text): portable(part) for text, part in value.items()}
        elif key in ("enum", "const"):
            out[key] = value
        elif key == MARK:
            out["uniqueItems"] = True
        else:
            out[key] = portable(value)
    return out


def python_pattern(text: str) -> str:
    spelled = re.sub(r"\\x\{([0-9A-F]+)\}", lambda found: f"\\U{int(found[1], 16):08X}", text)
    return re.sub(r"\$(?=$|\))", r"\\Z", spelled)


def same(schema: Any, *values: Any) -> bool:
    """Whether the schema compiles; automaton, rewritten schema and jsonschema must agree on all values if so."""
    out = compiled(tokenizer(), schema)
    if out.matcher is None:
        return False
    original = judge(schema)
    rewritten = judge(portable(out.schema))
    for value in values:
        wanted = original.is_valid(value)
        assert rewritten.is_valid(value) is wanted, (value, wanted, out.schema)
        assert accepts_value(out, value) is wanted, (value, wanted, out.schema)
    return True
