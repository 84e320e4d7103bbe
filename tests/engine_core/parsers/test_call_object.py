"""A call's object: its arguments flow as soon as it is known to be one."""

from __future__ import annotations

import pytest

from penstock.engine_core.parsers.call_object import LONGEST_TAIL, MOST_HELD, read_object
from penstock.engine_core.parsers.scanning import Reading, Scan, StreamParser
from penstock.protocol.messages import PieceKind

CALL, ARGUMENTS, CONTENT = PieceKind.CALL, PieceKind.ARGUMENTS, PieceKind.CONTENT


class Alone(StreamParser):
    """One object, and what stands behind it."""

    def __init__(self, names: tuple[str, ...] | None = None) -> None:
        super().__init__()
        self._names = names
        self.failed: str | None = None
        self.done = False
        self.rest = ""

    def _read(self, scan: Scan) -> Reading[None]:
        self.failed = yield from read_object(scan, self._names)
        self.done, self.rest = True, scan.text


def told(*cuts: str, names: tuple[str, ...] | None = None) -> tuple[Alone, list[tuple[int, str]]]:
    """The parser, and what it gave."""
    parser = Alone(names)
    return parser, [(piece.kind, piece.text) for cut in cuts for piece in parser.push(cut)]


def test_arguments_flow() -> None:
    parser, pieces = told('{"name": "f", "argu', 'ments": {"a"', ": 1")
    assert parser.open
    assert pieces == [(CALL, "f"), (ARGUMENTS, '{"a"'), (ARGUMENTS, ": 1")]
    parser, pieces = told('{"name":"f","parameters":{}} x')
    assert (parser.failed, parser.open, parser.rest) == (None, False, " x")
    assert pieces == [(CALL, "f"), (ARGUMENTS, "{}")]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"a":1}, "name": "f"}', '{"a":1}'), ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f"}', "{}"), ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"type": "function", "name": "f", "parameters": {"b": []}}', '{"b": []}'),
        ('{"name": "f", "arguments": {}, "id": "1{2"}', "{}"),
    ],
)  # fmt: skip
def test_forms_that_are_calls(text: str, arguments: str) -> None:
    for cuts in ([text], list(text)):
        parser, pieces = told(*cuts)
        assert (parser.done, parser.failed, parser.rest) == (True, None, "")
        assert pieces[0] == (CALL, "f")
        assert "".join(part for _, part in pieces[1:]) == arguments


@pytest.mark.parametrize(
    "text",
    [
        '{"name": 5, "arguments": {}}', '{"a": 1}',
        '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "x"}',
        '{"name": "f", "age": 3}', '{"name" "f"}', '{"name": "", "arguments": {}}',
    ],
)  # fmt: skip
def test_forms_that_are_none(text: str) -> None:
    parser, pieces = told(text + "!")
    assert pieces == []
    assert parser.failed is not None
    assert parser.failed + parser.rest == text + "!"


def test_only_known_names_where_names_are_given() -> None:
    assert told('{"name": "g", "arguments": {}}', names=("f",))[0].failed
    assert told('{"arguments": {}, "name": "g"}', names=("f",))[0].failed
    assert told('{"name": "f", "arguments": {}}', names=("f",))[0].failed is None


def test_what_is_wrong_behind_the_arguments_is_content() -> None:
    parser, pieces = told('{"name": "f", "arguments": {} oops}')
    assert (parser.done, parser.rest) == (True, " oops}")
    parser, pieces = told('{"name": "f", "arguments": {}, oops} y')
    assert pieces[-1] == (CONTENT, ", oops}")
    assert parser.rest == " y"


def test_what_is_held_is_bounded() -> None:
    parser, _ = told('{"x": "' + "a" * MOST_HELD)
    assert parser.failed is not None
    assert len(parser.failed) == MOST_HELD
    parser, pieces = told('{"name": "f", "arguments": {}, "x": "' + "a" * LONGEST_TAIL)
    assert parser.done
    assert len(pieces[-1][1]) == LONGEST_TAIL
    assert parser.rest
