"""Reasoning at the beginning of an output, opened by the model or by the prompt."""

from __future__ import annotations

import pytest

from penstock.engine_core.parsers.dialect import BRACKETS, THINK
from penstock.engine_core.parsers.reasoning import ReasoningParser
from penstock.protocol.messages import Piece
from tests.engine_core.parsers.outputs import content_of, parsed, parser, reasoning_of


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"), ("why\n</think>\n\nso", True, "why", "so"),
        ("<think>why</think>so", True, "why", "so"), ("so <think>why</think>", False, "", "so <think>why</think>"),
        ("<think>\n\n</think>\n\nso", False, "", "so"), ("<think>why", False, "why", ""), ("why", True, "why", ""),
        ("<thi", False, "", "<thi"), ("<thi", True, "<thi", ""), ("\n<think>\nwhy</think>", False, "why", ""),
        (" so", False, "", " so"), ("<think>a </thin</think> b", False, "a </thin", "b"), ("", True, "", ""),
        ("</think>so", True, "", "so"), ("<think>a</think>b</think>", False, "a", "b</think>"),
        ("<think>why</thi", False, "why</thi", ""), ("why</thi", True, "why</thi", ""),
    ],
)  # fmt: skip
def test_texts(text: str, inside: bool, reasoning: str, content: str) -> None:
    for cuts in ([text], list(text)):
        pieces = parsed(parser(None, inside=inside), cuts)
        assert (reasoning_of(pieces), content_of(pieces)) == (reasoning, content)


def test_blanks_of_a_structure_behind_it() -> None:
    for cuts in (["why\n</think> \nso"], [*"why\n</think> \nso"]):
        machine, out = ReasoningParser(THINK, inside=True, exact=True), list[Piece]()
        assert "".join([machine.push(cut, out) for cut in cuts]) == " \nso"
        assert reasoning_of(out) == "why"


def test_other_markers() -> None:
    machine, out = ReasoningParser(BRACKETS, inside=False), list[Piece]()
    assert machine.push("[THINK]why[/THINK]so", out) == "so"
    assert [piece.text for piece in out] == ["why"]
    assert machine.over


def test_when_it_thinks() -> None:
    machine, out = ReasoningParser(THINK, inside=False), list[Piece]()
    assert (machine.thinking, machine.over) == (False, False)
    machine.push("<think>", out)
    assert machine.thinking
    machine.push("</think>", out)
    assert (machine.thinking, machine.over) == (False, False)
    machine.push("so", out)
    assert machine.over
    assert ReasoningParser(THINK, inside=True).thinking
