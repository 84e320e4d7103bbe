"""Reasoning at the beginning of an output, opened by the model or by the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.parsers.dialect import ANSWER, BRACKETS, GEMMA, PROSE, RESPONSE, SEED, THINK, OutputParser
from penstock.engine_core.parsers.reasoning import Markers, ReasoningParser
from tests.engine_core.parsers.outputs import content_of, cut, parsed, parser, reasoning_of


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
        pieces = parsed(OutputParser(ReasoningParser(THINK, inside=True, exact=True), None), cuts)
        assert (reasoning_of(pieces), content_of(pieces)) == ("why", " \nso")


def test_other_markers() -> None:
    machine = ReasoningParser(BRACKETS, inside=False)
    pieces = machine.push("[THINK]why[/THINK]so")
    assert (reasoning_of(pieces), content_of(pieces)) == ("why", "so")
    assert machine.over


def test_when_it_thinks() -> None:
    machine = ReasoningParser(THINK, inside=False)
    assert (machine.thinking, machine.over) == (False, False)
    machine.push("<think>")
    assert machine.thinking
    machine.push("</think>")
    assert (machine.thinking, machine.over) == (False, False)
    machine.push("so")
    assert machine.over
    assert ReasoningParser(THINK, inside=True).thinking


@pytest.mark.parametrize(
    ("markers", "text", "reasoning", "content"),
    [
        (PROSE, "Here is my thought process:\nwhy\n\nHere is my response:\nso", "why", "so"),
        (PROSE, "Here's my thought process: why Here's my response: so", "why", "so"),
        (PROSE, "Here is my response: so", "", "Here is my response: so"), (PROSE, "Here is", "", "Here is"),
        (GEMMA, "<|channel>thought\nwhy<channel|>so", "why", "so"), (GEMMA, "<|channel>", "", "<|channel>"),
        (SEED, "<seed:think>why</seed:think>so", "why", "so"),
        (RESPONSE, "<think>why</think><response>so </response>", "why", "so"),
        (ANSWER, "<think>\nwhy\n</think>\n<answer>\n so <b>\n</answer>", "why", "so <b>"),
        (ANSWER, "<think>why</think>\nso</answer>", "why", "so</answer>"),
        (ANSWER, "<think>why</think>\n<answ", "why", "<answ"),
        (ANSWER, "<think>why</think><answer>so\n</ans", "why", "so\n</ans"),
        (ANSWER, "<think>why</think><answer>so</answer>\nmore", "why", "so\nmore"),
        (ANSWER, "<think>why</think>\n", "why", ""),
    ],
)  # fmt: skip
def test_markers_of_other_models(markers: Markers, text: str, reasoning: str, content: str) -> None:
    for cuts in ([text], list(text), cut(text, [9, 17, 23, 31])):
        machine = OutputParser(ReasoningParser(markers, inside=False), None)
        pieces = parsed(machine, cuts)
        assert (reasoning_of(pieces), content_of(pieces)) == (reasoning, content)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "<", "\n", " ", "a"]), max_size=9),
    places=st.lists(st.integers(0, 80), max_size=12),
)  # fmt: skip
def test_any_cut_of_an_answer_in_marks_gives_the_same(parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    first, *others = [parsed(OutputParser(ReasoningParser(ANSWER, inside=False), None), cuts)
                      for cuts in ([text], list(text), cut(text, places))]  # fmt: skip
    assert others == [first, first]
