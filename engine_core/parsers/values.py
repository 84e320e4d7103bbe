"""Values of arguments that are written without their type: what a schema makes of their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.engine_core.parsers.literals import as_json

Kinds = frozenset[str]  # JSON Schema's names of types; empty: any
ANY: Kinds = frozenset()


def kinds_of(schema: object) -> Kinds:
    """The types that a schema allows, as far as it says so itself."""
    if not isinstance(schema, Mapping):
        return ANY
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset((said,))
    if isinstance(said, list):
        return frozenset(kind for kind in said if isinstance(kind, str))
    if isinstance(words := schema.get("enum"), list) and words:
        return frozenset(kind_of(word) for word in words)
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list) and parts:
            found = [kinds_of(part) for part in parts]
            return frozenset().union(*found) if all(found) else ANY
    return ANY


def parameter_kinds(tools: Sequence[Any]) -> dict[str, dict[str, Kinds]]:
    """Of each function of a request's tools, by the names of its parameters."""
    found: dict[str, dict[str, Kinds]] = {}
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        known = properties if isinstance(properties, dict) else {}
        found[function["name"]] = {name: kinds_of(schema) for name, schema in known.items()}
    return found


def value_of(text: str, kinds: Kinds) -> bytes:
    """JSON of a value that is one of these kinds. What is none of them is told all the same: as the JSON that it is,
    or else as text."""
    if kinds != {"string"} and (written := other_than_text(text)) is not None:
        kind = kind_of(msgspec.json.decode(written))
        if "string" not in kinds or kind in kinds or (kind == "integer" and "number" in kinds):
            return written
    return msgspec.json.encode(text)


def other_than_text(text: str) -> bytes | None:
    """The text as JSON if it is some, or a literal of Python's, which templates write as well; None for strings."""
    written: str | None = text.strip()
    try:
        value: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        written = as_json(text)
        value = "" if written is None else msgspec.json.decode(written)
    return None if written is None or isinstance(value, str) else written.encode()


def kind_of(value: object) -> str:
    """JSON Schema's name of a value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
