"""Calls in notations of their own between markers, read once they are whole.

Gemma 4 and FunctionGemma write call:f{city:<|"|>Rome<|"|>,days:[1,2]}, where a mark of their own quotes strings, in
which nothing is escaped, and keys of the outermost object stand bare. OLMo 3 writes Python calls in lines. Sources:
the models' chat templates.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from penstock.engine_core.parsers.scanning import PYTHON_SIGNS, ValueEnd
from penstock.engine_core.parsers.tagged import Called, Types
from penstock.engine_core.parsers.values import keywords_json

CALL = re.compile(r"\s*call:([^\s{}]+)(?=\{)")
LITERALS = ("true", "false", "null")
KEY_END = re.compile(r"\s*:")
LINE = re.compile(r"[\s,]*([A-Za-z_][\w.-]*)\(")
CHUNK = 1024  # characters


def notation(quote: str) -> re.Pattern[str]:
    """The tokens of Gemma's notation where strings stand between two of this mark."""
    mark = re.escape(quote)
    return re.compile(
        rf'\s*(?:{mark}(?P<text>.*?){mark}|(?P<json>"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w$-]))'
        r"|(?P<word>[\w$][\w$.-]*)|(?P<sign>[{}\[\],:]))",
        re.DOTALL,
    )


def read_quoted(body: str, types: Types, tokens: re.Pattern[str]) -> list[Called] | None:
    """One call, call:name{...}."""
    del types
    begun = CALL.match(body)
    if begun is None:
        return None
    parts: list[str] = []
    at, end = begun.end(), len(body.rstrip())
    while at < end:
        found = tokens.match(body, at)
        if found is None:
            return None
        at = found.end()
        match found.lastgroup:
            case "text":
                parts.append(msgspec.json.encode(found["text"]).decode())
            case "word" if KEY_END.match(body, at):
                parts.append(msgspec.json.encode(found["word"]).decode())
            case "word" if found["word"] not in LITERALS:
                return None  # text without its mark
            case _:
                parts.append(found[0])
    try:
        values = msgspec.json.decode(" ".join(parts), type=dict[str, Any])  # what stands side by side stays apart
    except (msgspec.DecodeError, RecursionError):
        return None
    return [(begun[1], msgspec.json.encode(values).decode())]


def read_lines(body: str, types: Types) -> list[Called] | None:
    """Calls in Python, one behind another."""
    del types
    calls: list[Called] = []
    at = 0
    while begun := LINE.match(body, at):
        start, at = begun.end(), begun.end() - 1
        value, end = ValueEnd(PYTHON_SIGNS), -1
        while end < 0 and at < len(body):
            chunk = body[at : at + CHUNK]
            end = value.find(chunk)
            at += end if end >= 0 else len(chunk)
        arguments = keywords_json(body[start : at - 1]) if end >= 0 else None
        if arguments is None:
            return None
        calls.append((begun[1], arguments))
    return calls if calls and not body[at:].strip(" \t\r\n,") else None


def read_list(body: str, types: Types) -> list[Called] | None:
    """Calls in Python between brackets."""
    inner = body.strip()
    return read_lines(inner[1:-1], types) if inner.startswith("[") and inner.endswith("]") else None
