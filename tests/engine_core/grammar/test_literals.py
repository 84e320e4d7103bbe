"""Text of a grammar is bytes, never a control token: whatever it spells, the output parses by the grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import NFKC

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.grammar.answers import format_of
from penstock.engine_core.grammar.calls import Function, calls_alone
from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.masks import MaskRow, MaskStore
from penstock.engine_core.grammar.sources import source_of
from penstock.engine_core.grammar.spacing import Habits
from penstock.engine_core.grammar.tokens import GrammarTokens
from penstock.engine_core.parsers.dialect import Dialect
from penstock.engine_core.parsers.formats import CallFormat
from penstock.engine_core.text.detokenizer import detokenizer
from penstock.engine_core.tokenizer.codec import FastCodec
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Automaton, Grammar
from tests.engine_core.grammar.vocabulary import END, tokens, vocabulary
from tests.engine_core.parsers.outputs import elements, pairs

THINK, CALL = 4090, 4092
SPECIAL = ["<|end|>", "<|call|>", "[INST]", "<s>", "</s>", "<|tool▁call▁begin|>", "<unk>"]
ADDED = ["<thinking>", "[THINK]", "  ", "    ", "hello world", "<|im_end|>x", "</arg_value>", "!!!", "<b>"]


@cache
def many() -> tuple[GrammarTokens, Vocabulary]:
    """A tokenizer with many added tokens, overlapping ones among them, which rewrites what it is given."""
    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    tokenizer.normalizer = NFKC()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=True, lstrip=True) for text in ADDED])
    tokenizer.add_special_tokens([f"<|reserved_{number}|>" for number in range(200)])
    found = Vocabulary(FastCodec(tokenizer), {"eos_token": "<|im_end|>"})
    names = {found.token(token_id): token_id for token_id in range(found.size)}
    return GrammarTokens(found, found.size + 40, [names["<|im_end|>"], names["<|call|>"], names["</s>"]]), found


VOCABULARIES: dict[str, Callable[[], tuple[GrammarTokens, Vocabulary]]] = {
    "embedded": lambda: (tokens(), vocabulary()), "many": many,
}  # fmt: skip


def written(grammar: Grammar, of: tuple[GrammarTokens, Vocabulary], rng: random.Random) -> str:
    """An output of the grammar as a client gets it, with drafts of every kind, right ones and wrong ones."""
    model, names = of
    guide = Guide(model, Automaton(source=source_of(grammar, model).text))
    guide.learn(Habits())
    store, output = MaskStore(model, 512, 1), list[int]()
    for step in range(1, 2000):
        forced = guide.forced()
        # A prediction or a prompt that reads like the output: its control tokens are whole.
        looked_up = names.encode(model.text(forced).decode(errors="ignore"), add_special_tokens=False)
        drafts = rng.choice([[], forced, forced + guide.likely(forced), looked_up, [rng.choice([*model.eos, THINK])]])
        drafts = [token for token in drafts[:32] if token not in model.eos]
        filled = store.fill(step, step - 1, [MaskRow(guide, drafts, 0)])
        masks = [store._stored[place].text for place in np.frombuffer(filled.slots, np.int32)]
        for place in range(len(drafts) + 1):
            legal = np.flatnonzero(np.unpackbits(np.frombuffer(masks[place], np.uint8), bitorder="little")).tolist()
            token = drafts[place] if place < len(drafts) and drafts[place] in legal else rng.choice(legal)
            guide.advance([token])
            if guide.ended:
                stream = detokenizer(names, skip_special_tokens=True)
                return "".join(map(stream.push, output)) + stream.flush()
            output.append(token)
            if place < len(drafts) and token != drafts[place]:
                break
    raise AssertionError("no end")


def texts(of: tuple[GrammarTokens, Vocabulary], rng: random.Random) -> str:
    """What control tokens read like, parts of that, and what tokenizers rewrite."""
    names = [*of[0].specials, *ADDED]
    parts = ["e\u0301", "\uff1cthink\uff1e", "ﬁ", " ", "\n", "x", '"', "\\", "é", "😀", "{", "/"]
    found = [*names, *names, *[name[1:] for name in names], *[name[:-1] for name in names], *parts * (len(names) // 9)]
    return "".join(rng.choices(found, k=rng.randint(1, 5)))


def lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@pytest.mark.sweep
@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("seed", range(25))
def test_an_output_parses_by_its_grammar_whatever_it_spells(name: str, seed: int) -> None:
    of, rng = VOCABULARIES[name](), random.Random(seed)
    one, two = texts(of, rng), texts(of, rng)

    def output(kind: str, source: Any) -> str:
        return written(Grammar(kind=kind, source=source if isinstance(source, str) else json.dumps(source)), of, rng)

    assert json.loads(output("json_schema", {"const": one})) == one
    assert json.loads(output("json_schema", {"enum": [one, two]})) in (one, two)
    keyed = {"type": "object", "properties": {one: {"const": two}}, "required": [one], "additionalProperties": False}
    assert json.loads(output("json_schema", keyed)) == {one: two}
    assert output("choice", [one, two]) in (one, two)
    assert output("regex", f"{re.escape(one)}[ab]{{2}}")[:-2] == one
    literal = lark_text(one)
    assert output("grammar", f"start: {literal} T\nT: {lark_text(two)}") == one + two
    assert output("grammar", f"root ::= {literal} | {literal} {lark_text(two)}") in (one, one + two)
    choice = format_of(Grammar(kind="choice", source=json.dumps([two])))
    parts = [{"type": "const_string", "value": one}, {"type": "regex", "pattern": re.escape(two)},
             {"type": "json_schema", "json_schema": {"const": one}}, choice]  # fmt: skip
    found = output("structural_tag", {"format": {"type": "sequence", "elements": parts}})
    assert found.startswith(one + two)
    assert found.endswith(two)
    assert json.loads(found[len(one + two) : -len(two)]) == one


@pytest.mark.parametrize(
    ("kind", "source"),
    [("choice", '["<|im_end|>"]'), ("choice", '["<think>x"]'), ("regex", "<tool_call>x"), ("choice", '["a</think>b"]'),
     ("json_schema", '{"const": "<|im_end|>"}')],
)  # fmt: skip
def test_a_forced_run_holds_no_control_token(kind: str, source: str) -> None:
    grammar = Grammar(kind=kind, source=source)
    guide = Guide(tokens(), Automaton(source=source_of(grammar, tokens()).text))
    forced = guide.forced()
    assert forced
    assert set(tokens().specials.values()).isdisjoint(forced)
    assert written(grammar, (tokens(), vocabulary()), random.Random(1)) in ('"<|im_end|>"', *map(str, [
        "<|im_end|>", "<think>x", "<tool_call>x", "a</think>b"]))  # fmt: skip


def test_what_marks_a_structure_may_be_a_control_token() -> None:
    tag = {"type": "tag", "begin": "<tool_call>", "content": {"type": "const_string", "value": "<tool_call>"},
           "end": "<|im_start|>"}  # fmt: skip
    source = source_of(Grammar(kind="structural_tag", source=json.dumps({"format": tag})), tokens()).text
    forced = Guide(tokens(), Automaton(source=source)).forced()
    assert forced[0] == CALL
    assert forced.count(CALL) == 1
    assert tokens().text(forced) == b"<tool_call><tool_call><|im_start|>"


@pytest.mark.parametrize("calls", [CallFormat.QWEN3_CODER, CallFormat.GLM45])
def test_a_tool_s_own_words_are_text(calls: CallFormat) -> None:
    """Markers of the call format are control tokens; a parameter's name and its enum's words are the client's."""
    schema = {"type": "object", "properties": {"<|im_end|>": {"type": "string", "enum": ["<think>"]}},
              "required": ["<|im_end|>"]}  # fmt: skip
    form = calls_alone(Dialect(calls=calls), [Function("f", schema, True, "tools[0].function")], several=False)
    grammar = Grammar(kind="structural_tag", source=json.dumps({"format": form}))
    guide = Guide(tokens(), Automaton(source=source_of(grammar, tokens()).text))
    output: list[int] = []
    while not guide.finished:
        run = [token for token in guide.forced() if token not in tokens().eos]
        assert run
        guide.advance(run)
        output += run
    assert [token for token in output if token in tokens().specials.values()] == [CALL, CALL + 1]
    write = elements if calls is CallFormat.QWEN3_CODER else pairs
    assert tokens().text(output).decode() == write([("f", {"<|im_end|>": "<think>"})])


def ended_by(end: Any, *, content: Any = None, behind: str = "") -> Guide:
    tag = {"type": "tag", "begin": "a", "content": content or {"type": "regex", "pattern": "b+"}, "end": end}
    found = {"format": {"type": "sequence", "elements": [tag, {"type": "const_string", "value": behind}]}
             if behind else tag}  # fmt: skip
    source = source_of(Grammar(kind="structural_tag", source=json.dumps(found)), tokens()).text
    return Guide(tokens(), Automaton(source=source))


@pytest.mark.parametrize("end", ["<|im_end|>", ["<|im_end|>", "</x>"]])
def test_a_last_tag_may_end_with_the_end_of_the_sequence(end: Any) -> None:
    guide = ended_by(end)
    with pytest.raises(Exception, match="inside its structure"):
        guide.copy().advance([*tokens().split(b"a"), END])
    guide.advance(tokens().split(b"abb"))
    guide.advance([END])
    assert guide.ended
    free = ended_by("<|im_end|>", content={"type": "any_text"})
    free.advance([*tokens().split(b"a and so on"), END])
    assert free.ended


def test_the_end_of_the_sequence_stands_nowhere_else() -> None:
    with pytest.raises(InvalidRequest, match=r"format.elements\[0\].end: <\|im_end\|> ends the output"):
        ended_by("<|im_end|>", behind="c")
    ending = {"type": "tag", "begin": "a", "content": {"type": "const_string", "value": "b"}, "end": "<|im_end|>"}
    several = {"type": "triggered_tags", "triggers": ["a"], "tags": [ending]}
    for tag in (several, {"type": "tag", "begin": "<|im_end|>", "content": {"type": "any_text"}, "end": "x"}):
        with pytest.raises(InvalidRequest, match="ends the output"):
            source_of(Grammar(kind="structural_tag", source=json.dumps({"format": tag})), tokens())
    once = json.dumps({"format": {**several, "stop_after_first": True}})
    assert source_of(Grammar(kind="structural_tag", source=once), tokens())


@pytest.mark.parametrize(
    "lark",
    ['start: "a" <|im_end|> "b"', "start: <[4089]>", "start: <[1-9, 4080-4090]>", "start: <[^5]>", "start: <[*]>",
     'start: x\nx[stop=<|im_end|>]: "a"'],
)  # fmt: skip
def test_a_lark_grammar_names_no_end_of_the_sequence(lark: str) -> None:
    tag = json.dumps({"format": {"type": "grammar", "grammar": lark}})
    for grammar in (Grammar(kind="grammar", source=lark), Grammar(kind="structural_tag", source=tag)):
        with pytest.raises(InvalidRequest, match="ends the output"):
            source_of(grammar, tokens())


@pytest.mark.parametrize(
    "lark",
    ['start: "<|im_end|>"', "start: /<\\|im_end\\|>/", 'start: "a" // <|im_end|>', "start: <think> <[4090-4091]>",
     "start: <[^4087,4089]>", "start: <[^4085-4095]>"],
)  # fmt: skip
def test_a_lark_grammar_names_other_tokens_as_it_likes(lark: str) -> None:
    source = source_of(Grammar(kind="grammar", source=lark), tokens()).text
    assert not tokens().matcher(source).is_error()
