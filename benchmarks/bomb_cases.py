"""Grammars that somebody might send to harm a server, and some that only look like it.

Each case is the fields of a request. `salt` makes every call's grammars new to every cache. The expected outcome is the
same for all of them: a 400 that names the field, or an output that follows the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

JSON = dict[str, Any]
Fields = dict[str, Any]


def nest(depth: int, inner: str, opening: str, closing: str) -> str:
    return opening * depth + inner + closing * depth


def objects(names: int, salt: int, schema: JSON, required: int = 0) -> JSON:
    """An object of so many properties, the first ones required."""
    found = [f"p{salt}_{number}" for number in range(names)]
    return {"type": "object", "properties": dict.fromkeys(found, schema), "required": found[:required]}


def branches(count: int, salt: int, *, apart: bool) -> list[JSON]:
    """Branches of a union; `apart` if no value can be in two of them."""
    kinds: list[JSON] = [{"const": f"{salt}-{number}"} if apart else {"type": "string"} for number in range(count)]
    return [
        {"type": "object", "properties": {"kind": kind, f"v{number}": {"type": "integer"}}, "required": ["kind"]}
        for number, kind in enumerate(kinds)
    ]


def deep_schema(depth: int, salt: int) -> JSON:
    found: JSON = {"type": "integer", "minimum": salt}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


def regexes(salt: int) -> Mapping[str, str]:
    """Patterns for `regex`."""
    return {
        "nested quantifiers": nest(12, f"a{salt}", "(", "+)+"),
        "nested stars": nest(200, f"a{salt}", "(", "*)*") + "b",
        "nested counts": f"((a{{100}}){{100}}){{{100 + salt}}}",
        "nested ranges": f"(([a-z]{{1,200}}){{1,200}}){{1,{200 + salt}}}",
        "exponential alternation": "(a|aa|aaa|a*)*b" * 20 + str(salt),
        "exponential automaton": f"(a|b)*a(a|b){{24}}{salt}",
        "wide exponential automaton": f"(.*a.{{30}})|(.*b.{{31}})|(.*c.{{{32 + salt}}})",
        "unicode classes": rf"\p{{L}}{{1,5000}}{salt}",
        "many unicode classes": r"(\p{L}\p{N}\p{P}|\p{Lu}\p{Ll})" * 300 + str(salt),
        "unicode exponential": rf"(\p{{L}}|\w)*\p{{Lu}}(\p{{L}}|\d){{18}}{salt}",
        "a megabyte": f"{salt}" + "a[bc]d?" * 150_000,
        "a megabyte of alternatives": "|".join([f"{salt}x{number:05}" for number in range(90_000)]),
        "ten thousand groups": nest(10_000, f"a{salt}", "(", ")"),
        "many optional parts": f"{salt}" + "".join([f"(x{number})?" for number in range(5_000)]),
        "counts behind letters": f"[a-z]{{200}}X((c{{1000}}){{1000}}){{{10 + salt}}}",
        "a literal behind letters": f"[a-z]{{100}}X{salt}" + "q" * 90_000,
        "huge count": f"[a-z]{{1000000000}}{salt}",
        "a long count": f"[a-z]{{100000}}{salt}",
        "intersecting dots": "(.*x.*y.*)" * 40 + str(salt),
    }


def schemas(salt: int) -> Mapping[str, JSON]:
    """Schemas for `guided_json`."""
    words = [f"{salt}-{number:07}" for number in range(90_000)]
    here: JSON = {"$ref": "#"}
    return {
        "enum of a megabyte": {"enum": words},
        "enum of one long string": {"enum": ["x" * 1_000_000 + str(salt)]},
        "deep schema": deep_schema(100, salt),
        "endless object": {"type": "object", "properties": {f"n{salt}": here}, "required": [f"n{salt}"]},
        "endless array": {"type": "array", "items": here, "minItems": 1, "title": str(salt)},
        "a reference to itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "title": str(salt)}}},
        "references in a ring": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{(n + 1) % 300}"}]} for n in range(300)},
            "title": str(salt),
        },
        "doubling references": {
            "$ref": "#/$defs/d40",
            "$defs": {"d0": {"type": "integer", "minimum": salt}}
            | {f"d{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{n - 1}"}] * 2, "minItems": 2}
               for n in range(1, 41)},
        },
        "doubling unions": {
            "$ref": "#/$defs/d24",
            "$defs": {"d0": {"enum": [salt, 1]}}
            | {f"d{n}": {"anyOf": [
                {"$ref": f"#/$defs/d{n - 1}"}, {"type": "array", "items": {"$ref": f"#/$defs/d{n - 1}"}}]}
               for n in range(1, 25)},
        },
        "huge minItems": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9 + salt},
        "large minItems": {"type": "array", "items": {"type": "integer"}, "minItems": 10_000 + salt},
        "huge maxItems": {"type": "array", "items": {"type": "boolean"}, "maxItems": 10**9 + salt},
        "nested maxItems": {
            "type": "array", "maxItems": 1000 + salt, "minItems": 1000, "items": {
                "type": "array", "maxItems": 1000, "minItems": 1000, "items": {
                    "type": "array", "maxItems": 1000, "minItems": 1000, "items": {"type": "null"}}}},
        "huge minLength": {"type": "string", "minLength": 10**9 + salt},
        "large maxLength": {"type": "string", "maxLength": 1_000_000 + salt},
        "huge numbers": {"type": "integer", "minimum": -(10**300) - salt, "maximum": 10**300},
        "tiny multiples": {"type": "number", "multipleOf": 1e-12, "minimum": salt, "maximum": 1e12},
        "coprime multiples": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941 + salt)]},
        "500 optional properties": objects(500, salt, {"type": "integer"}),
        "5,000 optional properties": objects(5_000, salt, {"type": "integer"}),
        "5,000 required properties": objects(5_000, salt, {"type": "integer"}, 5_000),
        "20 optional, 10 at least": objects(20, salt, {"type": "integer"}) | {"minProperties": 10},
        "100 optional, 50 at least": objects(100, salt, {"type": "integer"}) | {"minProperties": 50},
        "unique items": {"type": "array", "items": {"type": "integer", "minimum": salt}, "uniqueItems": True,
                         "maxItems": 10_000},
        "unique values of an enum": {"type": "array", "items": {"enum": [*range(salt, salt + 30)]}, "uniqueItems": True,
                                     "minItems": 20},
        "500 branches apart": {"oneOf": branches(500, salt, apart=True)},
        "300 branches alike": {"oneOf": branches(300, salt, apart=False)},
        "intersections": {"allOf": [{"anyOf": branches(12, salt + n, apart=False)} for n in range(12)]},
        "nested conditions": {"allOf": [
            {"if": {"properties": {f"c{n}": {"const": salt}}, "required": [f"c{n}"]},
             "then": {"required": [f"t{n}"]}, "else": {"required": [f"e{n}"]}} for n in range(24)],
            "properties": {f"{letter}{n}": {"type": "integer"} for n in range(24) for letter in "cte"},
            "type": "object", "additionalProperties": False},
        "exponential pattern": {"type": "string", "pattern": f"^(a|b)*a(a|b){{24}}{salt}$"},
        "crossed patterns": {
            "allOf": [{"type": "string", "pattern": f"{letter}.{{12}}{salt}"} for letter in "abcdefgh"]},
        "hundreds of pattern keys": {"type": "object", "patternProperties": {
            f"^{salt}.*{number}$": {"type": "integer"} for number in range(400)}, "additionalProperties": False},
        "excluded values": {"type": "string", "not": {"enum": words[:20_000]}},
    }  # fmt: skip


def grammars(salt: int) -> Mapping[str, str]:
    """Grammars for `guided_grammar`, in EBNF and in Lark."""
    letters = " | ".join([f'r{number} "{number}"' for number in range(3_000)])
    chain = "\n".join([f'r{n} ::= "a" r{n + 1} | "b" r{n + 1}' for n in range(5_000)])
    doubled = "\n".join([f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)])
    return {
        "no base": f'root ::= "{salt}" root',
        "left recursion": f'root ::= root "a" | root root | "{salt}"',
        "hidden left recursion": f'root ::= b root "a" | "{salt}"\nb ::= "x"? "y"?',
        "ambiguity": f'root ::= root root root | root root | "a" | "" | "{salt}"',
        "ambiguity of many kinds": 'root ::= x root | y root | "."\nx ::= [a-z]* [a-m]*\ny ::= [a-z]* [k-z]* '
        + f'"{salt}"?',
        "unit rules in a ring": f'root ::= a | "{salt}"\na ::= b\nb ::= c\nc ::= root',
        "thousands of rules": f'root ::= "{salt}" ({letters})\n'
        + "\n".join([f'r{n} ::= "x{n}"' for n in range(3_000)]),
        "a chain behind letters": f'root ::= [a-z]{{40}} "X" tail\ntail ::= "{salt}" tail',
        "a doubling chain behind letters": f'root ::= [a-z]{{40}} "{salt}" r0\n{doubled}\nr40 ::= "c"',
        "slow and slower": f'root ::= root root root | root root | [a-z] | "{salt}"',
        "a chain of rules": f'root ::= "{salt}" r0\n{chain}\nr5000 ::= "c"',
        "a doubling chain": f'root ::= "{salt}" r0\n{doubled}\nr40 ::= "c"',
        "repeats of repeats": f'root ::= (((("a"{{1000}}){{1000}}){{1000}})){{{100 + salt}}}',
        "wide repeats": f'root ::= ("a" root "b"){{0,{9_000 + salt}}}',
        "deep groups": "root ::= " + nest(50_000, f'"{salt}"', "(", ")"),
        "lark left recursion": f'start: start "a" | start start | "{salt}"',
        "lark repeats": f'start: (("a" | "b" start) ~ 1000) ~ {1000 + salt}',
        "lark terminals": "start: " + " | ".join([f"T{n}" for n in range(2_000)])
        + "\n" + "\n".join([f"T{n}: /[a-z]*{n}{salt}[a-z]*/" for n in range(2_000)]),
        "lark deep groups": "start: " + nest(50_000, f'"{salt}"', "(", ")"),
        "a megabyte of one rule": "root ::= " + " ".join([f'"{salt}{number}"' for number in range(90_000)]),
        "unclosed": 'root ::= "' + "a" * 500_000 + str(salt),
        "slashes": "root ::= " + "\\" * 500_000 + str(salt),
    }  # fmt: skip


def others(salt: int) -> Mapping[str, Fields]:
    """Lists of choices, tags, patterns of whitespace, tools."""
    tag: JSON = {"type": "const_string", "value": str(salt)}
    for _ in range(300):
        tag = {"type": "sequence", "elements": [tag]}
    tools = [
        {"type": "function", "function": {"name": f"t{salt}_{number}", "strict": True,
                                          "parameters": objects(40, salt, {"type": "string"}, 40)
                                          | {"additionalProperties": False}}}
        for number in range(100)
    ]  # fmt: skip
    return {
        "100,000 choices": {"guided_choice": [f"{salt}-{number:06}" for number in range(100_000)]},
        "choices of one stem": {"guided_choice": [f"{salt}" + "a" * number for number in range(1, 1_500)]},
        "a deep tag": {"structural_tag": {"format": tag}},
        "a pattern of whitespace": {"guided_json": {"type": "array", "items": {"type": "integer", "minimum": salt}},
                                    "whitespace": r"((\s+)+)+"},
        "an exponential whitespace": {"guided_json": {"type": "array", "items": {"type": "integer", "minimum": salt}},
                                      "whitespace": r"(\s| )*\t(\s| ){20}"},
        "a hundred strict tools": {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"anyOf": [tool["function"]["parameters"] for tool in tools]}}}},  # type: ignore[index]
    }  # fmt: skip


def texts(salt: int) -> Mapping[str, Callable[[str], bytes]]:
    """Whole bodies, of the beginning of one: what no client library would write."""

    def body(field: str, value: str) -> Callable[[str], bytes]:
        return lambda begun: f"{begun},{json.dumps(field)}:{value}}}".encode()

    return {
        "deep schema of JSON": body("guided_json", nest(10_000, f'{{"minimum":{salt}}}', '{"items":', "}")),
        "deep schema as text": body("guided_json", json.dumps(nest(10_000, f'{{"minimum":{salt}}}', '{"not":', "}"))),
        "deep JSON elsewhere": body("metadata", nest(10_000, str(salt), "[", "]")),
        "deep enum": body("guided_json", '{"enum":[' + nest(10_000, str(salt), "[", "]") + "]}"),
        "one key many times": body("guided_json", "{" + f'"type":"string","minLength":{salt},' * 20_000 + '"a":1}'),
        "long number": body("guided_json", '{"minimum":' + "9" * 100_000 + "}"),
        "long fraction": body("guided_json", '{"type":"number","minimum":1e-99999' + str(salt) + "}"),
    }


def cases(salt: int) -> dict[str, Fields]:
    """Every case whose fields a client library can write."""
    found: dict[str, Fields] = {f"regex: {name}": {"regex": text} for name, text in regexes(salt).items()}
    found |= {f"schema: {name}": {"guided_json": schema} for name, schema in schemas(salt).items()}
    found |= {f"grammar: {name}": {"guided_grammar": text} for name, text in grammars(salt).items()}
    return found | dict(others(salt))
