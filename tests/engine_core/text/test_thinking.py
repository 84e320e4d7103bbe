"""What a request wants of reasoning, in the words that its template knows."""

from __future__ import annotations

import pytest

from penstock.engine_core.parsers.dialect import THINK
from penstock.engine_core.text.rendering import asks_to_think, left_open, thinking_arguments
from penstock.engine_core.text.template import ChatTemplate
from penstock.protocol.errors import InvalidRequest

SWITCH = ChatTemplate({"default": "{% if enable_thinking is defined and enable_thinking %}x{% endif %}"}, {})
EFFORT = ChatTemplate({"default": "{{ reasoning_effort }}"}, {})
NEITHER = ChatTemplate({"default": "{{ messages }}"}, {})


def test_nothing_said_is_nothing_told() -> None:
    assert thinking_arguments("", {}, SWITCH, reasons=True) == {}
    assert thinking_arguments("", {}, NEITHER, reasons=True) == {}


@pytest.mark.parametrize(("effort", "on"), [("none", False), ("low", True), ("high", True)])
def test_switches_and_efforts(effort: str, on: bool) -> None:
    assert thinking_arguments(effort, {}, SWITCH, reasons=True) == {"enable_thinking": on}
    assert thinking_arguments(effort, {}, EFFORT, reasons=True) == {"reasoning_effort": effort}


def test_what_the_request_gave_itself_stays() -> None:
    assert thinking_arguments("high", {"enable_thinking": False}, SWITCH, reasons=True) == {}


def test_a_template_that_knows_no_effort() -> None:
    with pytest.raises(InvalidRequest) as caught:
        thinking_arguments("high", {}, NEITHER, reasons=False)
    assert caught.value.param == "reasoning_effort"
    with pytest.raises(InvalidRequest):
        thinking_arguments("none", {}, NEITHER, reasons=True)
    assert thinking_arguments("none", {}, NEITHER, reasons=False) == {}


def test_being_asked_to_think() -> None:
    assert asks_to_think({"enable_thinking": True})
    assert asks_to_think({"thinking": True})
    assert asks_to_think({"reasoning_effort": "low"})
    assert not asks_to_think({"enable_thinking": False, "reasoning_effort": "none"})
    assert not asks_to_think({})


def test_only_the_very_end_of_a_prompt_opens_reasoning() -> None:
    assert left_open("user: hi\nassistant: <think>\n", THINK, None)
    assert not left_open("user: what does <think> mean\nassistant: ", THINK, None)
    assert not left_open("assistant: <think>\n\n</think>\n\n", THINK, None)
    assert left_open("x", THINK, "<think>half a")
    assert not left_open("x", THINK, "<think>a</think> half")
