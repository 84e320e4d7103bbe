"""Instances of a schema for the corpus: drawn from it and spoiled one step at a time, then judged by jsonschema.

The judge is jsonschema's validator of the announced draft, with three changes: `multipleOf` is decimal arithmetic (the
library divides floats and finds that 19.99 is no multiple of 0.01); `nullable: true` beside `type` allows null, as
OpenAPI 3.0.3 says and as the engine takes it; and the formats that the engine enforces are checked in every draft, by
the grammars of their RFCs, since the library checks most of them only with further packages."""

from __future__ import annotations

import copy
import functools
import ipaddress
import json
import random
import re
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from typing import Any

import jsonschema
from jsonschema import validators

WANTED = 6  # instances of each sort
TRIES = 400
MAX_DEPTH = 7
TIME = r"([01]\d|2[0-3]):([0-5]\d):([0-5]\d|60)(\.\d+)?([zZ]|([+-])([01]\d|2[0-3]):([0-5]\d))"  # RFC 3339
LABEL = r"[a-zA-Z0-9]([-a-zA-Z0-9]{0,61}[a-zA-Z0-9])?"  # RFC 1123
GRAMMARS = {
    "duration": r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)",  # RFC 3339, appendix A
    "email": rf"[^@\s\"]+@({LABEL})(\.{LABEL})*",
    "hostname": rf"{LABEL}(\.{LABEL})*",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",  # RFC 4122
    "uri": r"[a-zA-Z][-+.a-zA-Z0-9]*:[^\s\\\"<>^`{|}]*",  # RFC 3986, without the parts of its path
}


def _formed(name: str, text: object) -> bool:
    if not isinstance(text, str):
        return True
    try:
        match name:
            case "ipv4":
                ipaddress.IPv4Address(text)
            case "ipv6":
                ipaddress.IPv6Address(text)
            case "date":
                return re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is not None and bool(date.fromisoformat(text))
            case "time":
                return _time(text)
            case "date-time":
                day, mark, rest = text[:10], text[10:11], text[11:]
                return mark in ("t", "T") and _formed("date", day) and _formed("time", rest)
            case _:
                return re.fullmatch(GRAMMARS[name], text, re.ASCII) is not None
    except ValueError:
        return False
    return True


def _time(text: str) -> bool:
    """A time of RFC 3339: a leap second is the last of a day in UTC."""
    found = re.fullmatch(TIME, text, re.ASCII)
    if found is None or found[3] != "60":
        return found is not None
    offset = int(f"{found[6]}{int(found[7]) * 60 + int(found[8])}") if found[6] else 0
    return (int(found[1]) * 60 + int(found[2]) - offset) % 1440 == 1439


def _checker() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker(())
    for name in (*GRAMMARS, "ipv4", "ipv6", "date", "time", "date-time"):
        checker.checks(name)(functools.partial(_formed, name))
    return checker


def _multiple(validator: Any, step: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(value, "number") and Decimal(str(value)) % Decimal(str(step)) != 0:
        yield jsonschema.ValidationError(f"{value} is not a multiple of {step}")


def _type(validator: Any, kinds: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if value is None and isinstance(schema, dict) and schema.get("nullable") is True:
        return
    listed = [kinds] if isinstance(kinds, str) else kinds
    if not any(validator.is_type(value, kind) for kind in listed):
        yield jsonschema.ValidationError(f"{value!r} is not of type {listed}")


def judge(schema: object) -> Any:
    """The validator of a schema, for its own draft or 2020-12."""
    kind = validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return validators.extend(kind, {"multipleOf": _multiple, "type": _type})(schema, format_checker=_checker())


def _follow(schema: Any, root: Any) -> Any:
    while isinstance(schema, dict) and "$ref" in schema:
        reference = schema["$ref"]
        found = root
        if reference.startswith("#/"):
            for token in reference[2:].split("/"):
                found = found[token]
        elif reference != "#":
            found = next(part for part in root.get("$defs", {}).values() if part.get("$anchor") == reference[1:])
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**found, **siblings, "required": [*found.get("required", []), *siblings.get("required", [])]}
    return schema


def drawn(schema: Any, root: Any, dice: random.Random, depth: int = 0) -> Any:
    """A value that should match most of a schema."""
    schema = _follow(schema, root)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return dice.choice(["any", 7, None, True])
    for listed in ("enum", "examples"):
        if schema.get(listed):
            return copy.deepcopy(dice.choice(schema[listed]))
    if "const" in schema:
        return copy.deepcopy(schema["const"])
    parts = [dice.choice(schema[key]) for key in ("anyOf", "oneOf") if key in schema] + schema.get("allOf", [])
    parts = [_follow(part, root) for part in parts]
    if "type" not in schema and parts and not any(key in schema for key in ("properties", "items")):
        values = [drawn(part, root, dice, depth) for part in parts]
        return (
            {k: v for value in values for k, v in value.items()}
            if all(isinstance(v, dict) for v in values)
            else values[0]
        )
    kind = schema.get("type", "object" if "properties" in schema else dice.choice(["string", "integer"]))
    kind = dice.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        return _drawn_object(schema, parts, root, dice, depth)
    if kind == "array":
        return _drawn_array(schema, root, dice, depth)
    return _drawn_scalar(kind, schema, dice)


def _drawn_object(schema: Any, parts: Any, root: Any, dice: random.Random, depth: int) -> dict[str, Any]:
    required = {name for part in (schema, *parts) for name in part.get("required", [])}
    out = {}
    for part in (schema, *parts):
        for name, child in part.get("properties", {}).items():
            if child is not False and (name in required or dice.random() < (0.6 if depth < 3 else 0.15)):
                out[name] = drawn(child, root, dice, depth + 1)
    rest = schema.get("additionalProperties", True)
    names = schema.get("propertyNames", {}).get("enum", ["alpha", "beta", "x-extra"])
    patterned = next(iter(schema.get("patternProperties", {}).values()), None)
    if rest is not False or patterned is not None:
        for name in names:
            if dice.random() < 0.4 and name not in out:
                out[name] = drawn(rest if patterned is None else patterned, root, dice, depth + 1)
    for name in required - out.keys():
        out[name] = "given"
    return out


def _drawn_array(schema: Any, root: Any, dice: random.Random, depth: int) -> list[Any]:
    items = schema.get("items", {})
    prefix = schema.get("prefixItems", items if isinstance(items, list) else [])
    if isinstance(items, list):
        items = schema.get("additionalItems", {})
    out = [drawn(child, root, dice, depth + 1) for child in prefix]
    least = max(schema.get("minItems", 0), schema.get("minContains", 0))
    most = min(schema.get("maxItems", 3), least + 3)
    while len(out) < least or (items is not False and len(out) < most and dice.random() < 0.6):
        wanted = schema["contains"] if "contains" in schema and dice.random() < 0.5 else items
        out.append(drawn(wanted, root, dice, depth + 1))
    return out


def _drawn_scalar(kind: str, schema: Any, dice: random.Random) -> Any:
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", -3))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 40))
        step = schema.get("multipleOf", 1 if kind == "integer" else 0.25)
        spread = int((high - low) / step)
        value = Decimal(str(low)) + Decimal(str(step)) * dice.randint(0, max(0, spread))
        return int(value) if value == int(value) else float(value)
    if kind == "string":
        length = max(schema.get("minLength", 0), dice.randint(0, min(schema.get("maxLength", 9), 9)))
        return "".join(dice.choice('abcdeé 0Z-"\\/\n') for _ in range(length))
    return dice.choice([True, False]) if kind == "boolean" else None


def spoiled(value: Any, dice: random.Random) -> Any:
    """A copy with one thing changed somewhere."""
    value = copy.deepcopy(value)
    holders = [v for v in _walk(value) if isinstance(v, dict | list) and v]
    if not holders or dice.random() < 0.15:
        return dice.choice([None, 3, "other", -1, [], {}, [value], {"wrong": value}, 10**6, 0.123])
    holder = dice.choice(holders)
    if isinstance(holder, dict):
        name = dice.choice(list(holder))
        match dice.randint(0, 3):
            case 0:
                del holder[name]
            case 1:
                holder[f"{name}_2"] = holder[name]
            case _:
                holder[name] = dice.choice([None, -1, "?", [], {}, 10**6, 0.5, True])
    else:
        at = dice.randrange(len(holder))
        match dice.randint(0, 2):
            case 0:
                del holder[at]
            case 1:
                holder.extend([holder[at]] * dice.randint(1, 3))
            case _:
                holder[at] = dice.choice([None, -1, "?", [], {}, 0.5])
    return value


def _walk(value: Any) -> Iterator[Any]:
    yield value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        yield from _walk(child)


def instances(schema: object, seed: str) -> tuple[list[Any], list[Any]]:
    """Valid and invalid instances, as jsonschema judges them; the same for the same seed."""
    dice = random.Random(seed)
    validator = judge(schema)
    valid: dict[str, Any] = {}
    invalid: dict[str, Any] = {}
    for _ in range(TRIES):
        value = drawn(schema, schema, dice)
        for candidate in (value, spoiled(value, dice), spoiled(value, dice)):
            sort = valid if validator.is_valid(candidate) else invalid
            if len(sort) < WANTED:
                sort[json.dumps(candidate, sort_keys=True)] = candidate
        if len(valid) == len(invalid) == WANTED:
            break
    return list(valid.values()), list(invalid.values())
