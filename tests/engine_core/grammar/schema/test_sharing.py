"""Copies in a rewritten schema become references, and nothing else changes."""

from __future__ import annotations

from typing import Any

from penstock.engine_core.grammar.schema.writing import LEAST, share
from tests.engine_core.grammar.schema.judging import same

ADDRESS = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 40} for name in ("street", "city", "country", "postcode")},
    "required": ["street", "city"],
    "additionalProperties": False,
}


def resolved(schema: Any, definitions: dict[str, Any]) -> Any:
    """Without the references that `share` made."""
    if isinstance(schema, list):
        return [resolved(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    target = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if target.startswith("same-"):
        return resolved(definitions[target], definitions)
    return {key: resolved(value, definitions) for key, value in schema.items() if key != "$defs"}


def test_copies_become_references() -> None:
    inner = {"type": "array", "items": dict(ADDRESS), "prefixItems": [dict(ADDRESS), False]}
    schema = {"type": "object", "properties": {"home": ADDRESS, "work": dict(ADDRESS), "all": inner}}
    shared = share(schema)
    assert shared["properties"]["home"] == shared["properties"]["work"] == {"$ref": "#/$defs/same-0"}  # type: ignore[index]
    assert resolved(shared, shared["$defs"]) == schema  # type: ignore[arg-type]
    assert list(shared["$defs"]) == ["same-0"]  # type: ignore[call-overload]


def test_what_is_short_or_stands_once_stays() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}, "c": ADDRESS}}
    assert share(schema) == schema
    assert len(repr(ADDRESS)) > LEAST


def test_copies_in_definitions_and_in_copies() -> None:
    person = {"type": "object", "properties": {"home": ADDRESS, "work": ADDRESS, "age": {"type": "integer"}}}
    schema = {
        "anyOf": [person, {"type": "array", "items": dict(person)}, {"$ref": "#/$defs/other"}],
        "$defs": {"other": {"type": "object", "properties": {"who": dict(person)}, "required": ["who"]}},
    }
    shared = share(schema)
    definitions: Any = shared["$defs"]
    assert sorted(definitions) == ["other", "same-0", "same-1"]
    assert resolved(shared, definitions) == {"anyOf": schema["anyOf"]}
    assert resolved(definitions["other"], definitions) == schema["$defs"]["other"]  # type: ignore[index]


def test_values_that_look_alike_are_told_apart() -> None:
    long = "x" * LEAST
    options: list[Any] = [{"enum": [long, 1]}, {"enum": [long, "1"]}, {"enum": [long, True]}, {"enum": [long, 1.0]}]
    assert share({"anyOf": options}) == {"anyOf": options}
    items = [{"type": "array", "prefixItems": [], "items": False, "enum": [long]}]
    items.append({"type": "array", "prefixItems": [], "items": {}, "enum": [long]})
    assert share({"anyOf": items}) == {"anyOf": items}


def test_a_shared_schema_judges_as_before() -> None:
    schema = {"type": "object", "properties": {"a": ADDRESS, "b": {"type": "array", "items": ADDRESS}}}
    home = {"street": "s", "city": "c"}
    assert same(schema, {"a": home, "b": [home, {**home, "postcode": "p" * 41}]}, {"a": home, "b": [home]}, {"a": {}})


def test_objects_with_other_names_are_other_objects() -> None:
    renamed = {**ADDRESS, "properties": {f"{name}2": part for name, part in ADDRESS["properties"].items()}}  # type: ignore[attr-defined]
    schema = {"anyOf": [ADDRESS, renamed]}
    assert share(schema) == schema
