"""Structural tags: text that is free until a trigger, and what must follow it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.engine_core.grammar.sources import SchemaForm
from penstock.engine_core.grammar.tags import TagGrammar
from penstock.protocol.errors import InvalidRequest
from tests.engine_core.grammar.vocabulary import accepts, ids, tokens

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
START = 4088  # <|im_start|>, a control token
CALL, CALL_END = 4092, 4093  # <tool_call>, </tool_call>


def source(tag: Any) -> str:
    found = TagGrammar(SchemaForm("bounded", lenient=False), tokens().specials, tokens().plain, tokens().ends)
    return found.source(tag)


def form(**words: Any) -> str:
    return source({"type": "structural_tag", "format": words})


def takes(found: str, *parts: str | int) -> bool:
    """Whether texts and control tokens in a row are taken."""
    matcher = tokens().matcher(found)
    assert not matcher.is_error(), matcher.get_error()
    for part in parts:
        for token in [part] if isinstance(part, int) else tokens().tokenizer.greedy_tokenize(part):
            if not matcher.consume_token(token):
                return False
    return matcher.is_accepting()


def older(**words: Any) -> str:
    return source({
        "structures": [
            {"begin": "<f=point>", "schema": POINT, "end": "</f>"}, {"begin": "<f=any>", "schema": {}, "end": "</f>"}
        ], "triggers": ["<f="], **words
    })  # fmt: skip


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("just talk", True), ("", True), ('<f=point>{"x": 1}</f>', True), ('a <f=point>{"x":1}</f> b', True),
        ('<f=point>{"x":1}</f><f=any>[1, "2"]</f> end', True), ("less < more, <f", True), ("<f=other>1</f>", False),
        ('<f=point>{"y":1}</f>', False), ("<f=point>", False), ('<f=point>{"x":1}', False), ("so <f=", False),
    ],
)  # fmt: skip
def test_the_older_spelling(text: str, good: bool) -> None:
    assert accepts(older(), text) == good


def test_at_least_one_and_the_first_alone() -> None:
    tag = {"begin": "<a>", "content": {"type": "const_string", "value": "x"}, "end": "</a>"}

    def tagged(**words: Any) -> str:
        return form(type="triggered_tags", triggers=["<a>"], tags=[tag], **words)

    one, two = "<a>x</a>", "<a>x</a> and <a>x</a>"
    assert [accepts(tagged(), text) for text in ("t", one, two, one + "t")] == [True, True, True, True]
    assert [accepts(tagged(at_least_one=True), text) for text in ("t", one, two)] == [False, True, True]
    assert [accepts(tagged(stop_after_first=True), text) for text in ("t", one, two, one + "t")] == [
        True, True, False, False,
    ]  # fmt: skip
    both = tagged(stop_after_first=True, at_least_one=True)
    assert [accepts(both, text) for text in ("t", one, two, "t" + one)] == [False, True, False, True]


def test_tags_with_a_separator() -> None:
    tags = [{"begin": f"<{name}>", "content": {"type": "regex", "pattern": "[a-z/<]+"}, "end": f"</{name}>"}
            for name in "ab"]  # fmt: skip
    found = form(type="tags_with_separator", tags=tags, separator=", ", at_least_one=True)
    assert accepts(found, "<a>xy</a>")
    assert accepts(found, "<a>x</a>, <b>y</b>, <a>z</a>")
    assert not accepts(found, "")
    assert not accepts(found, "<a>x</b>")
    assert not accepts(found, "<a>x</a><b>y</b>")
    assert accepts(form(type="tags_with_separator", tags=tags, separator=","), "")
    once = form(type="tags_with_separator", tags=tags, separator=",", stop_after_first=True, at_least_one=True)
    assert not accepts(once, "<a>x</a>,<b>y</b>")


def test_sequences_alternatives_grammars_and_free_text() -> None:
    found = form(
        type="sequence",
        elements=[
            {"type": "tag", "begin": "[[", "content": {"type": "any_text"}, "end": "]]"},
            {
                "type": "or",
                "elements": [{"type": "json_schema", "json_schema": POINT}, {"type": "const_string", "value": "no"}],
            },
            {"type": "grammar", "grammar": 'root ::= "(" root ")" | "."'},
            {"type": "grammar", "grammar": "start: /[0-9]/"},
            {"type": "any_text"},
        ],
    )  # fmt: skip
    assert accepts(found, '[[hm, ] so]]{"x":5}((.))7 and so on')
    assert accepts(found, "[[]]no.0")
    assert not accepts(found, "[[hm]no.0")
    assert not accepts(found, "[[hm]]no.x")


def test_control_tokens_are_tokens_and_not_their_spelling() -> None:
    found = form(
        type="triggered_tags",
        triggers=["<tool_call>"],
        tags=[
            {
                "begin": '<tool_call>\n{"name": "f", "arguments": ',
                "content": {"type": "json_schema", "json_schema": POINT},
                "end": "}\n</tool_call>",
            }
        ],
    )  # fmt: skip
    call = (CALL, '\n{"name": "f", "arguments": {"x": 3}}\n', CALL_END)
    assert takes(found, *call)
    assert takes(found, "Let me see. ", *call, *call)
    assert takes(found, "<tool_call> in plain letters starts nothing")
    assert not takes(found, CALL, '\n{"name": "g"')
    assert not takes(found, START)
    literal = form(type="const_string", value="a<|im_start|>b")
    assert takes(literal, "a<|im_start|>b")
    assert not takes(literal, "a", START, "b")
    assert takes(form(type="tag", begin="a<|im_start|>b", content={"type": "any_text"}, end="."), "a", START, "b.")
    either = form(type="tag", begin="", content={"type": "any_text"}, end=["</x>", "<|im_start|>"])
    assert takes(either, "hm</x>")
    assert takes(either, "hm", START)
    assert ids("<tool_call>") == [CALL]


@pytest.mark.parametrize(
    ("tag", "place"),
    [
        ([], "an object"), ({}, "structures"), ({"format": {}}, "format.type"), ({"format": {"type": "xml"}}, "'xml'"),
        ({"format": {"type": "sequence", "elements": []}}, "format.elements"),
        ({"format": {"type": "const_string", "value": 3}}, "format.value"),
        ({"format": {"type": "json_schema", "json_schema": "x"}}, "format.json_schema"),
        ({"format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [{"begin": "b"}]}}, r"tags\[0\].begin"),
        ({"format": {"type": "triggered_tags", "triggers": ["a<|im_start|>"],
                     "tags": [{"begin": "a<|im_start|>", "content": {"type": "any_text"}, "end": "x"}]}}, "not both"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}}, r"elements\[0\]"),
        ({"format": {"type": "tag", "begin": "a", "content": {"type": "triggered_tags"}, "end": "b"}}, "content"),
        ({"structures": [{"begin": "a", "schema": 3}], "triggers": ["a"]}, r"json_schema"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(tag: Any, place: str) -> None:
    with pytest.raises(InvalidRequest, match=place):
        source(tag)


def test_formats_are_not_nested_without_end() -> None:
    deep: Any = {"type": "any_text"}
    for _ in range(100):
        deep = {"type": "or", "elements": [deep]}
    with pytest.raises(InvalidRequest, match="deeper"):
        source({"format": deep})


def test_schemas_have_the_whitespace_of_the_request() -> None:
    found = json.loads(TagGrammar(SchemaForm("none", lenient=False), {}).source({"format": {
        "type": "json_schema", "json_schema": POINT}}))  # fmt: skip
    assert found["grammars"][1]["json_schema"]["x-guidance"] == {"whitespace_flexible": False}


def allowed(matcher: Any) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_free_text_of_a_bounded_length_also_after_going_back() -> None:
    thought = {"type": "any_text", "max_tokens": 3}
    found = form(type="sequence", elements=[
        {"type": "tag", "begin": "", "content": thought, "end": "</think>"}, {"type": "any_text"}
    ])  # fmt: skip
    words = ids("one two three four")
    for back in (0, 1, 2, 3):
        matcher = tokens().matcher(found)
        for token in words[:back]:
            assert matcher.consume_token(token)
        assert matcher.rollback(back)
        for token in words[:3]:
            assert token in allowed(matcher)
            assert matcher.consume_token(token)
        assert allowed(matcher) == {4091}
        assert matcher.compute_ff_tokens() == [4091]
        copy = matcher.deep_copy()
        assert copy.consume_token(4091)
        assert len(allowed(copy)) > 1000
        assert allowed(matcher) == {4091}


@pytest.mark.parametrize("most", [0, -1, 1.5, "3", True, 1 << 40])
def test_lengths_that_are_none(most: object) -> None:
    with pytest.raises(InvalidRequest):
        form(type="tag", begin="", content={"type": "any_text", "max_tokens": most}, end="</think>")


def test_a_length_needs_a_control_token_behind_it() -> None:
    with pytest.raises(InvalidRequest):
        form(type="tag", begin="", content={"type": "any_text", "max_tokens": 3}, end="end")


def test_what_may_be_left_out() -> None:
    found = form(type="sequence", elements=[
        {"type": "optional", "content": {"type": "const_string", "value": "a"}}, {"type": "const_string", "value": "b"}
    ])  # fmt: skip
    assert takes(found, "ab")
    assert takes(found, "b")
    assert not takes(found, "aab")


def test_a_schema_may_be_held_loosely_beside_an_exact_one() -> None:
    odd: Any = {"type": "array", "uniqueItems": True}
    assert takes(form(type="json_schema", json_schema=odd, lenient=True), "[1,1]")
    with pytest.raises(InvalidRequest):
        form(type="json_schema", json_schema=odd)


def test_a_schema_that_has_a_form_in_lark_alone_stands_in_a_tag_as_others_do() -> None:
    levels = {"type": "array", "items": {"enum": ["low", "high"]}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"levels": levels}, "required": ["levels"], "additionalProperties": False}
    found = form(type="tag", begin="<f>", content={"type": "json_schema", "json_schema": schema}, end="</f>")
    assert takes(found, '<f>{"levels": ["low", "high"]}</f>')
    assert takes(found, '<f>{ "levels": [] }</f>')
    assert not takes(found, '<f>{"levels": ["low", "low"]}</f>')
    assert not takes(found, '<f>{"levels":  ["low"]}</f>')
