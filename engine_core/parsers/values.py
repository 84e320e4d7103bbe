"""Values of arguments that are written without their type: what a schema makes of their text.

Python's literals become JSON here too: the arguments of a call like f(city="Rome", days=[1, 2], exact=True).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Kinds = frozenset[str]  # JSON Schema's names of types; empty: any
ANY: Kinds = frozenset()
TEXT: Kinds = frozenset(("string",))


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
    if kinds != TEXT and (written := other_than_text(text)) is not None:
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


TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<number>-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"""
    r"""|(?P<word>[A-Za-z_]+)|(?P<sign>[\[\](){},:]))""",
    re.DOTALL,
)
KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
WORDS: Mapping[str, str] = {
    "True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"
}  # fmt: skip
TUPLE = "(,"  # an opening parenthesis behind which a comma has come; a tuple is a list
POINT = re.compile(r"(?<!\d)(?=\.)|(?<=\.)(?!\d)")  # where JSON wants a digit beside a number's point
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
ESCAPED: Mapping[str, str] = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "\\": "\\", "'": "'", '"': '"'
}  # fmt: skip


def as_json(literal: str) -> str | None:
    """The JSON of one literal; None for what is no literal of JSON's kinds."""
    return converted(literal, None)


def keywords_json(text: str) -> str | None:
    """The JSON object of keyword arguments as they stand between parentheses; None if they are not literals."""
    return converted(f"{{{text}}}", [])


def converted(literal: str, keys: list[str] | None) -> str | None:
    """As `as_json`. `keys`: the outermost object has keywords in place of keys, which are added there."""
    parts: list[str] = []
    opened: list[int] = []  # where brackets stand that are open
    at, end = 0, len(literal.rstrip())
    while at < end:
        if keys is not None and len(opened) == 1 and (key := KEY.match(literal, at)):
            parts += (f'"{key[1]}"', ":")
            keys.append(key[1])
            at = key.end()
            continue
        found = TOKEN.match(literal, at)
        part = None if found is None else token_json(found)
        if found is None or part is None or (part == ":" and keys is not None and len(opened) == 1):
            return None
        at = found.end()
        if found["sign"] and part in "([{":
            opened.append(len(parts))
        elif found["sign"] and part in ")]}":
            if not close(parts, opened.pop() if opened else -1, part):
                return None
            continue
        elif part == "," and opened and parts[opened[-1]] == "(":
            parts[opened[-1]] = TUPLE
        parts.append(part)
    if keys is not None and len(set(keys)) < len(keys):
        return None
    try:
        value = msgspec.json.decode(" ".join(parts))  # what stands side by side does not become one
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.json.encode(value).decode()


def close(parts: list[str], start: int, bracket: str) -> bool:
    """Close the bracket at `start`, -1 for none, whose contents stand behind it; False where another one would. A
    trailing comma is none, and parentheses around one value are nothing."""
    opening = parts[start] if start >= 0 else ""
    empty = start == len(parts) - 1
    if parts[-1:] == [","] and start < len(parts) - 2:
        parts.pop()
    if opening == "(" and not empty:
        parts[start], closing = "", ""
    elif opening in ("(", TUPLE):
        parts[start], closing = "[", "]"
    else:
        closing = bracket
    parts.append(closing)
    return opening[:1] + bracket in ("()", "[]", "{}")


def token_json(found: re.Match[str]) -> str | None:
    """One token of Python as one of JSON."""
    match found.lastgroup:
        case "text":
            return msgspec.json.encode(unquoted(found["text"])).decode()
        case "number":
            return POINT.sub("0", found["number"])
        case "word":
            return WORDS.get(found["word"])
        case _:
            return found["sign"]


def unquoted(text: str) -> str:
    """The value of a string literal. An escape that Python does not know stands for itself; two surrogates that belong
    together are the character that JSON means by them."""
    found = ESCAPE.sub(unescaped, text[1:-1])
    return found if found.isascii() else found.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is None:
        return ESCAPED.get(found[4], found[0])
    number = int(code, 16)
    return chr(number) if number <= 0x10FFFF else "\ufffd"
