"""A call's object: its arguments flow as soon as it is known to be one."""

from __future__ import annotations

import pytest

from penstock.engine_core.parsers.call_object import LONGEST_TAIL, MOST_HELD, CallObject, Stage
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

CALL, ARGUMENTS, CONTENT = PieceKind.CALL, PieceKind.ARGUMENTS, PieceKind.CONTENT


def told(*cuts: str, names: tuple[str, ...] | None = None) -> tuple[CallObject, list[tuple[int, str]], str]:
    """The machine, what it gave, and what stood behind the object."""
    machine, out, rest = CallObject(names), list[Piece](), ""
    for cut in cuts:
        rest = machine.push(cut, out)
    return machine, [(piece.kind, piece.text) for piece in out], rest


def test_arguments_flow() -> None:
    machine, pieces, _ = told('{"name": "f", "argu', 'ments": {"a"', ": 1")
    assert machine.stage is Stage.ARGUMENTS
    assert pieces == [(CALL, "f"), (ARGUMENTS, '{"a"'), (ARGUMENTS, ": 1")]
    machine, pieces, rest = told('{"name":"f","parameters":{}} x')
    assert (machine.stage, pieces, rest) == (Stage.DONE, [(CALL, "f"), (ARGUMENTS, "{}")], " x")


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
        machine, pieces, rest = told(*cuts)
        assert machine.stage is Stage.DONE
        assert rest == ""
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
    machine, pieces, rest = told(text + "!")
    assert (machine.stage, pieces) == (Stage.FAILED, [])
    assert machine.held + rest == text + "!"


def test_only_known_names_where_names_are_given() -> None:
    assert told('{"name": "g", "arguments": {}}', names=("f",))[0].stage is Stage.FAILED
    assert told('{"arguments": {}, "name": "g"}', names=("f",))[0].stage is Stage.FAILED
    assert told('{"name": "f", "arguments": {}}', names=("f",))[0].stage is Stage.DONE


def test_what_is_wrong_behind_the_arguments_is_content() -> None:
    machine, pieces, rest = told('{"name": "f", "arguments": {} oops}')
    assert (machine.stage, rest) == (Stage.DONE, " oops}")
    machine, pieces, rest = told('{"name": "f", "arguments": {}, oops} y')
    assert pieces[-1] == (CONTENT, ", oops}")
    assert rest == " y"


def test_what_is_held_is_bounded() -> None:
    machine, _, rest = told('{"x": "' + "a" * MOST_HELD)
    assert machine.stage is Stage.FAILED
    assert len(machine.held) == MOST_HELD
    machine, pieces, rest = told('{"name": "f", "arguments": {}, "x": "' + "a" * LONGEST_TAIL)
    assert machine.stage is Stage.DONE
    assert len(pieces[-1][1]) == LONGEST_TAIL
    assert rest
