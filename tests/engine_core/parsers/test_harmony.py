"""Messages on channels, in the spellings that OpenAI's "harmony response format" has."""

from __future__ import annotations

import itertools

import pytest

from penstock.engine_core.parsers.dialect import ANALYSIS, OutputParser, Parsing
from penstock.engine_core.parsers.formats import CallFormat
from penstock.engine_core.parsers.harmony import LONGEST_HEADER, HarmonyParser
from penstock.protocol.messages import PieceKind
from tests.engine_core.parsers.outputs import NAMES, calls_of, content_of, cut, parsed, reasoning_of

THOUGHT = "<|channel|>analysis<|message|>Need to use function f.<|end|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
FINAL = "<|channel|>final<|message|>2 + 2 = 4.<|return|>"
BEGIN = "<|start|>assistant"
HALF = CALL.removesuffix('"a": 1}<|call|>')
F = ("f", '{"a": 1}')
WHY, SO = "Need to use function f.", "2 + 2 = 4."


def machine(*, calls: bool = True, reasons: bool = True, inside: bool = False) -> OutputParser:
    return OutputParser(None, HarmonyParser(NAMES if calls else None, reasons=reasons, inside=inside))


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (THOUGHT + BEGIN + CALL, WHY, "", [F]), (THOUGHT + BEGIN + FINAL, WHY, SO, []), (FINAL, "", SO, []),
        (CALL.removesuffix("<|call|>"), "", "", [F]), (THOUGHT, WHY, "", []),
        # The recipient before the channel, as templates print earlier calls; without a type; on the other channel.
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', "", "", [F]),
        (THOUGHT + BEGIN + ' to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|>', WHY, "", [F]),
        ('<|channel|>analysis to=functions.f code<|message|>{"a": 1}<|call|>', "", "", [F]),
        ('<|channel|>commentary to=f<|constrain|>json<|message|>{"a": 1}<|call|>', "", "", [F]),
        # Several messages: a preamble is content, and thoughts are told one below the other.
        ("<|channel|>commentary<|message|>I look.<|end|>" + BEGIN + CALL, "", "I look.", [F]),
        (THOUGHT + BEGIN + THOUGHT + BEGIN + FINAL, f"{WHY}\n{WHY}", SO, []),
        (CALL + BEGIN + CALL, "", "", [F, F]), (FINAL + BEGIN + FINAL, "", f"{SO}\n{SO}", []),
        # Tools of the model's own that nobody offered.
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", []),
        ('<|channel|>commentary to=browser.search<|message|>{"q": 1}<|call|>', "", '{"q": 1}', []),
        # What breaks off, what is left out, and what is no such message at all.
        (HALF, "", "", [("f", "{")]), (THOUGHT[:-10], WHY[:-3], "", []),
        (THOUGHT + BEGIN + "<|chan", WHY, "", []),
        (THOUGHT + BEGIN, WHY, "", []), (THOUGHT + "<|chan", WHY, "", []),
        (THOUGHT.replace("<|end|>", "") + BEGIN + FINAL, WHY, SO, []),
        (THOUGHT + FINAL, WHY, SO, []), ("plain text", "", "plain text", []), ("<b>", "", "<b>", []),
        (" to", "", " to", []),
        ("", "", "", []), ("<", "", "<", []), ("<|message|>so", "", "so", []),
        ("<|channel|>commentary to=functions.f<|message|>no object<|call|>", "", "no object", []),
        ("<|channel|>commentary to=functions.f<|message|> <|call|>", "", " ", []),
        ("<|channel|>final <|constrain|>json<|message|>{}\n<|return|>", "", "{}\n", []),
        ("<|channel|>commentary to=functions.f<|message|> {} \n<|call|>", "", "", [("f", "{}")]),
        ('<|channel|>commentary to=functions.f<|message|>{"ü": {"x": ["}<|", "é\\""]}}<|call|>', "", "",
         [("f", '{"ü": {"x": ["}<|", "é\\""]}}')]),
    ],
)  # fmt: skip
def test_texts(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([text], list(text), cut(text, [7, 13, 40, 61, 90])):
        pieces = parsed(machine(), cuts)
        assert (reasoning_of(pieces), content_of(pieces), calls_of(pieces)) == (reasoning, content, calls)


def test_a_header_without_end_is_text() -> None:
    text = "<|channel|>" + "a" * LONGEST_HEADER + "<|message|>x"
    for cuts in ([text], list(text)):
        assert content_of(parsed(machine(), cuts)) == text


def test_calls_and_reasoning_that_nobody_asked_for_are_content() -> None:
    pieces = parsed(machine(calls=False, reasons=False), list(THOUGHT + BEGIN + CALL))
    assert [(piece.kind, piece.text) for piece in pieces] == [(PieceKind.CONTENT, f'{WHY}\n{{"a": 1}}')]


def test_a_prompt_that_has_begun_the_analysis() -> None:
    inner = THOUGHT.removeprefix("<|channel|>analysis<|message|>")
    found = machine(inside=True)
    assert found.thinking
    pieces = parsed(found, list(inner + BEGIN + FINAL))
    assert (reasoning_of(pieces), content_of(pieces)) == (WHY, SO)


def test_what_it_is_doing_is_known_while_it_comes() -> None:
    found, states = machine(), []
    for part in ("<|channel|>analysis", "<|message|>", "why", "<|end|>", BEGIN + HALF, "}", "<|call|>"):
        found.push(part)
        states.append((found.thinking, found.called, found.complete))
    no, thinks, whole = (False, False, False), (True, False, False), (False, True, True)
    assert states == [no, thinks, thinks, no, (False, True, False), whole, whole]
    assert not found.plain


def test_arguments_flow() -> None:
    found = machine()
    told = [[piece.text for piece in found.push(part)] for part in (HALF, '"a"', ": 1}", "<|call|>")]
    assert told == [["f", "{"], ['"a"'], [": 1}"], []]


def test_the_parser_of_a_request() -> None:
    for calls, reasoning in itertools.product((CallFormat.HARMONY, None), (ANALYSIS, None)):
        made = Parsing(channels=True, calls=calls, reasoning=reasoning, names=NAMES).parser()
        pieces = parsed(made, [THOUGHT + BEGIN + CALL])
        assert (calls_of(pieces) == [F]) == (calls is not None)
        assert (reasoning_of(pieces) == WHY) == (reasoning is not None)
