"""The grammar of an answer: reasoning within its budget, then calls or content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine_core.grammar.answers import Bound, Opening, answer_bound, format_of
from penstock.engine_core.grammar.calls import NO_PARAMETERS, Function
from penstock.engine_core.parsers.dialect import ANALYSIS, THINK, Dialect
from penstock.engine_core.parsers.formats import CallFormat
from penstock.protocol.columns import unpack
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar, ToolUse
from tests.engine_core.grammar.vocabulary import automaton, ids, tokens

G = Function("g", NO_PARAMETERS, False, "tools[0].function")
MODEL = Dialect(calls=CallFormat.HERMES, reasoning=THINK, closing=4091)
CALL = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
DIGITS = Grammar(kind="regex", source="[0-9]+", param="regex")
REQUIRED = ToolUse(names=("g",), required=True)
STRICT = ToolUse(names=("g",), strict=("g",))
OUTSIDE, INSIDE = Opening(inside=False), Opening(inside=True)


def bound(grammar: Grammar | None, use: ToolUse | None, opening: Opening, dialect: Dialect = MODEL) -> Bound:
    return answer_bound(grammar, use, [G], dialect, opening)


def accepts(found: Bound, text: str) -> bool:
    assert found.grammar is not None
    matcher = tokens().matcher(automaton(found.grammar.kind, found.grammar.source).source)
    return all(matcher.consume_token(token) for token in ids(text)) and matcher.is_accepting()


def test_an_answer_that_nothing_binds() -> None:
    auto = ToolUse(names=("g",))
    assert bound(None, None, OUTSIDE) == Bound(None)
    assert bound(None, auto, OUTSIDE).grammar is None


def test_a_grammar_alone_stays_what_it_is() -> None:
    assert bound(DIGITS, None, OUTSIDE) == Bound(DIGITS, reasons=False)
    assert bound(DIGITS, None, Opening(inside=False, closed=True, budget=3)) == Bound(DIGITS, reasons=False)
    found = bound(DIGITS, None, INSIDE)
    assert found.grammar == DIGITS
    assert unpack("i", found.after) == [4091]


@pytest.mark.parametrize(
    ("kind", "source", "own"),
    [
        ("choice", '["<think>x"]', False), ("json_schema", '{"const": "<think>"}', False), ("regex", "<think>x", False),
        ("grammar", 'start: "<think>" "x"', False), ("grammar", 'start: <think> "x"', True),
        ("grammar", 'root ::= "<think>"', False),
        ("structural_tag", '{"format": {"type": "const_string", "value": "<think>x"}}', False),
        ("structural_tag", '{"format": {"type": "tag", "begin": "<think>", "content": {"type": "any_text"},'
                           ' "end": "</think>"}}', True),
    ],
)  # fmt: skip
def test_text_that_reads_like_reasoning_is_none(kind: str, source: str, own: bool) -> None:
    for opening in (OUTSIDE, Opening(inside=False, closed=True)):
        assert bound(Grammar(kind=kind, source=source), None, opening).reasons is own
    assert bound(None, ToolUse(names=("g",)), OUTSIDE).reasons
    assert bound(DIGITS, None, INSIDE).reasons
    assert bound(DIGITS, None, Opening(inside=False, thinks=True)).reasons


def test_calls_that_must_be() -> None:
    found = bound(None, REQUIRED, OUTSIDE)
    assert accepts(found, CALL)
    assert not accepts(found, "12")
    after = bound(None, REQUIRED, INSIDE)
    assert (after.grammar, unpack("i", after.after)) == (found.grammar, [4091])
    thinking = bound(None, REQUIRED, Opening(inside=False, thinks=True))
    assert accepts(thinking, f"<think>why</think>\n\n{CALL}")
    assert accepts(thinking, CALL)


def test_calls_that_may_be_leave_room_to_reason() -> None:
    found = bound(None, STRICT, OUTSIDE)
    for text in (CALL, "hello", f"<think>why</think>\n{CALL}", "<think>why</think>so"):
        assert accepts(found, text)
    assert bound(None, ToolUse(names=("g",), parallel=False), OUTSIDE).grammar is not None
    assert bound(None, ToolUse(names=("g",), bound=True), OUTSIDE).grammar is not None


def test_calls_or_a_format() -> None:
    found = bound(DIGITS, ToolUse(names=("g",)), OUTSIDE)
    assert accepts(found, CALL)
    assert accepts(found, "12")
    assert not accepts(found, "hello")
    assert found.grammar is not None
    assert found.grammar.param == "regex"


@pytest.mark.parametrize(
    ("opening", "thoughts"),
    [
        (Opening(inside=True, budget=2), ("", "one", "one two")),
        (Opening(inside=False, budget=2), ("<think>", "<think>one")),
    ],
)
def test_a_budget(opening: Opening, thoughts: tuple[str, ...]) -> None:
    found = bound(None, None, opening)
    for thought in thoughts:
        assert accepts(found, f"{thought}</think>so")
    assert not accepts(found, f"{thoughts[0]}one two three four five six</think>so")
    assert accepts(bound(DIGITS, None, opening), f"{thoughts[-1]}</think>\n\n12")
    assert not accepts(bound(DIGITS, None, opening), f"{thoughts[-1]}</think>so")


def test_no_budget_at_all() -> None:
    assert accepts(bound(None, None, Opening(inside=True, budget=0)), "</think>so")
    assert not accepts(bound(None, None, Opening(inside=True, budget=0)), "x</think>so")
    assert not accepts(bound(None, None, Opening(inside=False, budget=0)), "<think>x</think>so")
    assert accepts(bound(DIGITS, None, Opening(inside=False, budget=0)), "12")


def test_a_budget_that_cannot_be_held() -> None:
    for dialect in (Dialect(), Dialect(reasoning=THINK)):
        with pytest.raises(InvalidRequest) as caught:
            bound(None, None, Opening(inside=False, budget=3), dialect)
        assert caught.value.param == "thinking_token_budget"


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar(kind="json_object"), "{}", "[]"), (Grammar(kind="json_schema", source='{"enum": [1, 2]}'), "1", "3"),
        (DIGITS, "12", "x"), (Grammar(kind="choice", source='["yes", "no"]'), "yes", "maybe"),
        (Grammar(kind="grammar", source='root ::= "a" | "b"'), "a", "c"),
        (Grammar(kind="structural_tag", source='{"format": {"type": "const_string", "value": "v"}}'), "v", "w"),
    ],
)  # fmt: skip
def test_every_kind_of_grammar_as_a_format(grammar: Grammar, right: str, wrong: str) -> None:
    found = Bound(Grammar(kind="structural_tag", source=json.dumps({"format": format_of(grammar)})))
    assert accepts(found, right)
    assert not accepts(found, wrong)


def test_older_tags_and_wrong_sources() -> None:
    older: Any = {"structures": [{"begin": "<a>", "schema": {"enum": [1]}, "end": "</a>"}], "triggers": ["<a>"]}
    found = Bound(Grammar(kind="structural_tag", source=json.dumps({
        "format": format_of(Grammar(kind="structural_tag", source=json.dumps(older)))})))  # fmt: skip
    assert accepts(found, "x <a>1</a> y")
    with pytest.raises(InvalidRequest):
        format_of(Grammar(kind="json_schema", source="{", param="guided_json"))
    assert format_of(Grammar(kind="structural_tag", source="[]"))["type"] == "structural_tag"


CHANNELS = Dialect(calls=CallFormat.HARMONY, reasoning=ANALYSIS, closing=4091)
WHY, BEGIN = "<|channel|>analysis<|message|>why<|end|>", "<|start|>assistant"
ASKED = "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}"
THINKING = Opening(inside=False, thinks=True)


def test_structures_and_calls_on_channels() -> None:
    final = "<|channel|>final<|message|>"
    structure = bound(DIGITS, None, THINKING, CHANNELS)
    assert structure.reasons
    for text in (f"{WHY}{BEGIN}{final}12", f"{final}12"):
        assert accepts(structure, text)
    for text in ("12", f"{WHY}{final}12", f"{WHY}{BEGIN}{final}twelve", f"{WHY}{BEGIN}{ASKED}", f"{WHY}12"):
        assert not accepts(structure, text)
    called = bound(None, REQUIRED, THINKING, CHANNELS)
    for text in (f"{WHY}{BEGIN}{ASKED}", ASKED):
        assert accepts(called, text)
    assert not accepts(called, f"{WHY}{BEGIN}{final}12")
    either = bound(DIGITS, ToolUse(names=("g",)), THINKING, CHANNELS)
    for text in (f"{WHY}{BEGIN}{ASKED}", f"{WHY}{BEGIN}{final}12"):
        assert accepts(either, text)
    assert not accepts(either, f"{WHY}{BEGIN}{final}so")
    free = bound(None, STRICT, THINKING, CHANNELS)
    preamble = "<|channel|>commentary<|message|>I look.<|end|>"
    for text in (f"{WHY}{BEGIN}{final}so", f"{WHY}{BEGIN}{preamble}{BEGIN}{ASKED}", f"{WHY}{BEGIN}{ASKED}", ASKED):
        assert accepts(free, text)
    assert not accepts(free, f"{WHY}{BEGIN}{ASKED.replace('{}', '{x')}")


def test_a_budget_on_channels_leaves_the_rest_free() -> None:
    """No token of the test's vocabulary ends the analysis, so none of it is all that can be bounded here."""
    none = Opening(inside=False, thinks=True, budget=0)
    final = "<|channel|>final<|message|>so"
    assert accepts(bound(None, None, none, CHANNELS), final)
    assert not accepts(bound(None, None, none, CHANNELS), ASKED)
    for text in (final, ASKED):
        assert accepts(bound(None, ToolUse(names=("g",)), none, CHANNELS), text)
        assert not accepts(bound(None, ToolUse(names=("g",)), none, CHANNELS), f"{WHY}{BEGIN}{text}")
