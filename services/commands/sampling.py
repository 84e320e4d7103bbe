"""Fields of a request from the command line."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from penstock.protocol.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy; default: the model's own")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    help_of_set = "any other field of the request, its value in JSON or as text; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="fields", help=help_of_set)


def fields(namespace: argparse.Namespace) -> dict[str, Any]:
    """What the options say of a request. Raises ConfigError for a --set without a value."""
    found: dict[str, Any] = {}
    if namespace.temperature is not None:
        found["temperature"] = namespace.temperature
    if namespace.max_tokens is not None:
        found["max_tokens"] = namespace.max_tokens
    for word in namespace.fields:
        name, equals, text = word.partition("=")
        if not (name and equals):
            raise ConfigError("--set", word, "it must be NAME=VALUE")
        found[name] = value(text)
    return found


def value(text: str) -> Any:
    """JSON, or the text itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
