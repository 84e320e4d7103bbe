"""Every machine gives the same for every way of cutting its text, reads what it is for, and drops nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.engine_core.parsers.formats import UNTYPED, CallFormat
from penstock.engine_core.parsers.values import other_than_text
from tests.engine_core.parsers.outputs import (
    ALONE,
    ARGUMENTS,
    CALLS,
    WRITERS,
    Call,
    calls_of,
    content_of,
    cut,
    parsed,
    parser,
    reasoning_of,
    soups,
)

FORMATS = [None, *CallFormat]
PLACES = st.lists(st.integers(0, 10_000), max_size=40)


@pytest.mark.parametrize("calls", FORMATS)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), places=PLACES, inside=st.booleans())
def test_any_cut_gives_the_same(calls: CallFormat | None, data: st.DataObject, places: list[int], inside: bool) -> None:
    text = data.draw(soups(calls))
    whole = parser(calls, inside=inside)
    by_cuts, by_characters = parser(calls, inside=inside), parser(calls, inside=inside)
    expected = parsed(whole, [text])
    assert parsed(by_cuts, cut(text, places)) == expected
    assert parsed(by_characters, list(text)) == expected
    assert whole.called == by_cuts.called == by_characters.called
    assert whole.complete == by_cuts.complete == by_characters.complete
    assert whole.thinking == by_cuts.thinking


@pytest.mark.parametrize(("calls", "form"), WRITERS)
@settings(max_examples=60, deadline=None)
@given(asked=CALLS, places=PLACES, thought=st.text("ab<\n ", max_size=9), said=st.text("ab.<", max_size=9))
def test_calls_are_read(
    calls: CallFormat, form: str, asked: list[Call], places: list[int], thought: str, said: str
) -> None:
    if calls in UNTYPED:  # whose strings a schema must tell from other values; none is known here
        strings = [value for _, each in asked for value in each.values() if isinstance(value, str)]
        assume(not any(other_than_text(value) for value in strings))
        # Seed OSS writes a value without the lines that are read past where a model writes them.
        assume(
            calls is not CallFormat.SEED_OSS or not any(value[:1] == "\n" or value[-1:] == "\n" for value in strings)
        )
    if calls is CallFormat.HARMONY:
        analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        preamble = f"<|channel|>commentary<|message|>{said}<|end|><|start|>assistant" if said else ""
        pieces = parsed(machine := parser(calls), cut(analysis + preamble + WRITERS[calls, form](asked), places))
        assert (reasoning_of(pieces), content_of(pieces), machine.complete) == (thought, said, True)
        assert [(name, json.loads(arguments)) for name, arguments in calls_of(pieces)] == asked
        return
    before = "" if calls in ALONE else said
    text = f"<think>\n{thought}\n</think>\n\n{before}" + ("\n" if before else "") + WRITERS[calls, form](asked)
    machine = parser(calls)
    pieces = parsed(machine, cut(text, places))
    assert machine.complete
    assert reasoning_of(pieces) == thought.strip()
    assert content_of(pieces) == before
    found = [(name, json.loads(arguments)) for name, arguments in calls_of(pieces)]
    assert found == asked


@pytest.mark.parametrize("calls", FORMATS)
@settings(max_examples=20, deadline=None)
@given(text=st.text("abc.,!?\n é", max_size=60), places=PLACES)
def test_plain_text_stays_as_it_is(calls: CallFormat | None, text: str, places: list[int]) -> None:
    assert content_of(parsed(parser(calls), cut(text, places))) == text


@pytest.mark.parametrize("calls", FORMATS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_nothing_is_dropped_where_nothing_is_called(calls: CallFormat | None, data: st.DataObject) -> None:
    text = data.draw(soups(calls))
    machine = parser(calls, reasoning=False)
    pieces = parsed(machine, [text])
    if not machine.called and calls is not CallFormat.HARMONY:  # whose headers are no text
        assert content_of(pieces) == text
    letters = [letter for letter in text if letter in "ab"]
    kept = "".join(piece.text for piece in pieces)
    if calls is None:
        assert [letter for letter in kept if letter in "ab"] == letters


@pytest.mark.parametrize(("calls", "form"), WRITERS)
@settings(max_examples=15, deadline=None)
@given(asked=CALLS, place=st.integers(0, 10_000))
def test_an_output_that_breaks_off_tells_no_more_than_the_whole(
    calls: CallFormat, form: str, asked: list[Call], place: int
) -> None:
    text = WRITERS[calls, form](asked)
    machine = parser(calls)
    pieces = parsed(machine, [text[: place % (len(text) + 1)]])
    whole = calls_of(parsed(parser(calls), [text]))
    for (name, arguments), (asked_name, asked_arguments) in zip(calls_of(pieces), whole, strict=False):
        assert name == asked_name
        assert asked_arguments.startswith(arguments)


@settings(max_examples=20, deadline=None)
@given(arguments=ARGUMENTS)
def test_arguments_are_passed_on_as_they_were_written(arguments: dict[str, object]) -> None:
    written = json.dumps(arguments, indent=3)
    text = f'<tool_call>{{"name":"f","arguments":{written}}}</tool_call>'
    assert calls_of(parsed(parser(CallFormat.HERMES), list(text))) == [("f", written)]


def test_reasoning_is_known_while_it_comes() -> None:
    machine = parser(CallFormat.HERMES)
    states = []
    for piece in ("<think>", "why", "</think>", "so"):
        machine.push(piece)
        states.append((machine.thinking, machine.plain))
    assert states == [(True, False), (True, False), (False, False), (False, False)]
    machine = parser(None)
    assert not machine.plain
    machine.push("so")
    assert machine.plain
    assert parser(None, inside=True).thinking


ENDLESS = {
    CallFormat.HERMES: ("<tool_call>{" * 20_000, '<tool_call>{"name":"f","arguments":{},' + ' "a": 1,' * 20_000),
    CallFormat.LLAMA: ('{"name": "f", "parameters": {' * 5_000, "\n" * 200_000),
    CallFormat.MISTRAL: ("[TOOL_CALLS]" * 20_000, "[TOOL_CALLS]f" * 10_000),
    CallFormat.PYTHONIC: ("[f(" * 50_000,),
    CallFormat.QWEN3_CODER: (
        "<tool_call>{" * 20_000,
        "<tool_call><function=f><parameter=a>" + "</parameter>\n" * 10_000 + "</tool_call>",
    ),
    CallFormat.KIMI_K2: ("<|tool_calls_section_begin|>" * 10_000, "<|tool_call_begin|> " * 10_000),
    CallFormat.MINIMAX_M2: (
        "<minimax:tool_call>" + '<invoke name="f">' * 10_000 + "</minimax:tool_call>",
        '<minimax:tool_call><invoke name="f"><parameter name="a">' + "</parameter>\n" * 10_000 + "</minimax:tool_call>",
    ),
    CallFormat.GEMMA4: (
        "<|tool_call>call:f{" + 'a:<|"|>' * 20_000 + "<tool_call|>", "<|tool_call>call:f{a:" + "[" * 100_000
    ),
    CallFormat.OLMO3: ("<function_calls>" + "f()" * 40_000 + "</function_calls>", "<function_calls>f(" + "[" * 50_000),
    CallFormat.HARMONY: ("<|start|>" * 20_000, "<|channel|>final<|message|>a<|end|>" * 5_000, " to=" * 40_000),
}  # fmt: skip


@pytest.mark.parametrize("calls", ENDLESS)
def test_a_long_text_costs_no_more_than_its_length(calls: CallFormat) -> None:
    for text in ENDLESS[calls]:
        cuts = [text[at : at + 11] for at in range(0, len(text), 11)]
        machine = parser(calls)
        assert parsed(machine, cuts) == parsed(parser(calls), [text])
