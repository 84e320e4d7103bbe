"""The field of a request that holds a grammar. It may be long, so it is passed on unread and parsed here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar

QUOTE = b'"'
TEXTS = ("regex", "grammar")  # kinds whose source is a string of JSON; the others' may be one
WORDS: Mapping[type, str] = {
    dict: "object", list: "array", str: "str", int: "int", float: "float", bool: "bool", type(None): "null",
}  # fmt: skip


def text_of(grammar: Grammar) -> str:
    """The grammar's source. Raises InvalidRequest where its field holds none."""
    if not grammar.unread:
        return grammar.source
    if grammar.kind not in TEXTS and not grammar.unread.startswith(QUOTE):
        return unicode(grammar.unread)
    found = read_json(unicode(grammar.unread))
    if not isinstance(found, str):
        raise InvalidRequest(f"expected `str`, got `{WORDS[type(found)]}`", code="invalid_type")
    return found


def unicode(text: bytes) -> str:
    """Raises InvalidRequest for what is no JSON (RFC 8259)."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not JSON: {error}", code="invalid_json") from None


def read_json(source: str) -> Any:
    """Raises InvalidRequest for what is no JSON (RFC 8259)."""
    try:
        return json.loads(source, parse_constant=no_number)
    except RecursionError:
        raise InvalidRequest("the JSON is nested too deep", code="invalid_grammar") from None
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}", code="invalid_json") from None


def no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
