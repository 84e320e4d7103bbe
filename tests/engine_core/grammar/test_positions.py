"""Positions are the same however an output is cut, and numbers that may go on alike are one."""

from __future__ import annotations

import itertools
import json
import random
import re

from penstock.engine_core.grammar.positions import BOUNDED, likened, schema_of

VALUES = {"s": {"type": "string"}, "n": {"type": "integer", "minimum": 5, "maximum": 120}, "l": {"type": "array"},
          "t": {"type": "string", "maxLength": 9}, "p": {"type": "string", "pattern": "^a"}}  # fmt: skip
SCHEMA = {"type": "object", "properties": VALUES, "x-guidance": {"whitespace_flexible": False}}


def test_it_makes_no_difference_how_an_output_is_cut() -> None:
    schema, rng = schema_of(f"start: %json {json.dumps(SCHEMA)}", 5), random.Random(2)
    assert schema is not None
    text = '{"s":"é\\n\\u00e9€😀","n":117,"t":"a\\"é","p":"a]\\\\","l":[1.5e-3,{"x":[true,null]}],"o\\"":"x"}'.encode()
    whole = [schema.start]
    for end in range(len(text)):
        whole.append(schema.follow(whole[-1], text[end : end + 1]))
    for _ in range(300):
        start, end = sorted(rng.choices(range(len(text) + 1), k=2))
        assert schema.follow(whole[start], text[start:end]) == whole[end]
    assert whole[-1].frames is None


def test_sources_without_positions() -> None:
    spaced = {"x-guidance": {"whitespace_pattern": "x*"}}
    for source in (
        "start: /a/",
        f"start: %json {json.dumps(spaced)}",
        f"start: %json {json.dumps(SCHEMA)}{' ' * (1 << 15)}",
    ):
        assert schema_of(source, 5) is None


def test_digits_that_are_likened_may_go_on_alike() -> None:
    for low, high in ((0, 9), (5, 120), (99, 100), (37, 8123), (500, 1000), (10, 10)):
        allowed = {str(number) for number in range(low, high + 1)}
        found: dict[bytes, set[str]] = {}
        for number in range(1, high + 1):
            text = str(number)
            rest = {each[len(text) :] for each in allowed if each.startswith(text)}
            name = likened(text.encode(), str(low).encode(), str(high).encode())
            assert re.fullmatch(rb"[1-9][0-9]*", name)
            assert found.setdefault(name, rest) == rest
        assert len(found) < 4 * len(str(high)) + 2


def test_whitespace_is_the_same_however_it_is_cut() -> None:
    """Between two tokens of JSON, with what follows it; more than a line break and its indentation is not made one."""
    options = {"whitespace_pattern": BOUNDED}
    schema = schema_of("start: %json " + json.dumps({"type": "array", "x-guidance": options}), 2)
    assert schema is not None
    for blanks in itertools.product(b" \t\r\n", repeat=4):
        text = b"[" + bytes(blanks) + b"1"
        step = schema.start
        for place in range(len(text)):
            step = schema.follow(step, text[place : place + 1])
            assert step == schema.follow(schema.start, text[: place + 1])
    assert schema.follow(schema.start, b"[\n \n").text == b"\n \n"
