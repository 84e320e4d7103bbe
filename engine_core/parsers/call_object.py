"""One call written as a JSON object: {"name": "f", "arguments": {...}}, or with "parameters"."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import msgspec

from penstock.engine_core.parsers.scanning import BLANKS, Reading, Scan, ValueEnd

# Up to the arguments, in the order that models are taught; from there on they are passed on as they come.
HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
LONGEST_HEAD = 1024  # characters
MOST_HELD = 1 << 16  # characters of a call in another order
LONGEST_TAIL = 1024  # characters of what follows the arguments


def read_object(scan: Scan, names: Container[str] | None = None) -> Reading[str | None]:
    """Tell the call that begins with the next brace, or return the text that is none, which is taken. `names`: the
    only functions that may be called; None: any."""
    end, known = ValueEnd(), 0
    while True:
        found = HEAD.match(scan.text[:LONGEST_HEAD]) if known < LONGEST_HEAD else None
        name = string_of(found[1]) if found else None
        if found and name is not None:
            head = scan.take(found.end())
            if not knows(names, name):
                return head
            scan.tell_call(name)
            yield from scan.arguments()
            yield from read_tail(scan)
            return None
        size = end.find(scan.text[known:MOST_HELD])
        if size >= 0:
            text = scan.take(known + size)
            call = whole_call(text)
            if call is None or not knows(names, call[0]):
                return text
            scan.tell_call(*call)
            return None
        known = len(scan.text)
        if known >= MOST_HELD or not (yield from scan.more()):
            return scan.take(MOST_HELD)


def knows(names: Container[str] | None, name: str) -> bool:
    return bool(name) and (names is None or name in names)


def read_tail(scan: Scan) -> Reading[None]:
    """What follows the arguments, up to the closing brace, is dropped when it is JSON, and else is content."""
    while True:
        members = scan.text.lstrip(BLANKS)
        if members and members[0] not in ",}":
            return
        end = ValueEnd(depth=1).find(scan.text[:LONGEST_TAIL]) if members else -1
        if end >= 0 or (members and len(scan.text) >= LONGEST_TAIL):
            break
        if not (yield from scan.more()):
            scan.tell(scan.take(len(scan.text)).strip(BLANKS))
            return
    tail = scan.take(end if end >= 0 else LONGEST_TAIL)
    if end < 0 or not is_json('{"":0' + tail):
        scan.tell(tail)


def whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose object is complete; None if it is none."""
    try:
        value: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str):
        return None
    if arguments is None and not value.keys() - {"name", "arguments", "parameters", "type"}:
        return name, "{}"
    if isinstance(arguments, str):  # the object as text, as OpenAI's form has it
        return (name, arguments) if is_json(arguments) and arguments.lstrip(BLANKS).startswith("{") else None
    return (name, msgspec.json.encode(arguments).decode()) if isinstance(arguments, dict) else None


def string_of(quoted: str) -> str | None:
    try:
        return str(msgspec.json.decode(quoted, type=str))
    except msgspec.DecodeError:
        return None


def is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
