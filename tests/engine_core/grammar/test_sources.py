"""What each kind of grammar becomes, and that it holds what it says."""

from __future__ import annotations

import json

import pytest

from penstock.engine_core.grammar.fields import read_json
from penstock.engine_core.grammar.sources import BOUNDED, SHORT, read_choices, source_of
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Grammar
from tests.engine_core.grammar.vocabulary import accepts, tokens

PAIR = json.dumps({
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
    "additionalProperties": False,
})  # fmt: skip


LONG = json.dumps({"enum": ["one", "other", *[f"value {number}" for number in range(SHORT // 8)]]})


def source(kind: str, text: str = "", **words: object) -> str:
    return source_of(Grammar(kind=kind, source=text, **words), tokens()).text  # type: ignore[arg-type]


def test_any_object_is_a_json_object_and_nothing_else() -> None:
    found = source("json_object")
    for text in ("{}", '{"a": [1, {"b": null}], "c": "x"}', '{\n  "a": 1\n}'):
        assert accepts(found, text)
    for text in ("[]", "1", '"x"', "{", "{'a': 1}"):
        assert not accepts(found, text)


@pytest.mark.parametrize(
    ("whitespace", "good", "bad"),
    [
        ("none", ['{"a":1,"b":2}'], ['{"a": 1,"b":2}', '{"a":1, "b":2}', '{"a":1,"b":2} ']),
        ("bounded", ['{"a":1,"b":2}', '{"a": 1, "b": 2}', '{\n    "a": 1,\r\n\t"b": 2\n}'],
         ['{  "a":1,"b":2}', '{\n\n"a":1,"b":2}', "{\n" + " " * 33 + '"a":1,"b":2}', ' {"a":1,"b":2}']),
        ("[ ]{0,3}", ['{   "a":1,"b":   2}'], ['{\n"a":1,"b":2}', '{    "a":1,"b":2}']),
    ],
)  # fmt: skip
def test_whitespace_is_bounded(whitespace: str, good: list[str], bad: list[str]) -> None:
    found = source("json_schema", PAIR, whitespace=whitespace)
    for text in good:
        assert accepts(found, text), text
    for text in bad:
        assert not accepts(found, text), text
    assert "{0,32}" in BOUNDED


def test_options_of_the_library_are_not_the_clients() -> None:
    schema = json.loads(PAIR) | {"x-guidance": {"whitespace_pattern": ".*", "lenient": True}}
    assert not accepts(source("json_schema", json.dumps(schema)), '{"a":1,   "b":2}')


def test_a_schema_that_nothing_satisfies_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no value"):
        source("json_schema", "false")
    assert accepts(source("json_schema", "true"), "[1]")


def test_patterns_match_the_whole_output() -> None:
    found = source("regex", "[0-9]{3}-[a-z]+")
    assert accepts(found, "123-abc")
    assert not accepts(found, "x123-abc")
    assert not accepts(found, "123-")
    for anchored in ("^ab$", "^ab", "ab$"):
        assert accepts(source("regex", anchored), "ab")


def test_choices_are_taken_letter_by_letter() -> None:
    choices = ['a"b', "a\\b", "(.*)", "", "é", "line\nbreak"]
    found = source("choice", json.dumps(choices))
    for text in choices:
        assert accepts(found, text)
    for text in ("a", "anything", "a'b"):
        assert not accepts(found, text)


def test_a_grammar_is_ebnf_or_lark() -> None:
    assert accepts(source("grammar", 'root ::= "a" | "(" root ")"'), "((a))")
    assert accepts(source("grammar", 'root ::= "a" | "b"'), "b")
    assert accepts(source("grammar", 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'), "1+22+3")


@pytest.mark.parametrize("before", ["", "\n", "\t \r\n"])
def test_a_grammar_of_the_librarys_own_is_no_lark(before: str) -> None:
    """It would have a schema that nothing has rewritten or bounded."""
    with pytest.raises(InvalidRequest, match="begins with a rule"):
        source("grammar", before + '{"grammars": [{"json_schema": {"type": "string", "minLength": 1000000}}]}')


@pytest.mark.parametrize("text", ["[]", '"a"', '{"a":1}', '["a",1]', "[["])
def test_choices_are_a_list_of_strings(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_choices(text)


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": Infinity}', "[" * 100_000, "1" * 5000])
def test_what_is_no_json_is_told(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_json(text)
    assert caught.value.code in ("invalid_json", "invalid_grammar")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="haiku"):
        source("haiku")


def test_lenient_grammars_say_what_they_approximate() -> None:
    exact = source_of(Grammar(kind="json_schema", source=PAIR, lenient=True), tokens())
    assert exact.approximations == ()


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_schema", LONG), ("regex", 'a/"\n{2}'), ("choice", '["a/b", "\\n"]'),
     ("grammar", 'root ::= "a" | "{"'), ("grammar", 'start: "{" | "a"')],
)  # fmt: skip
def test_one_long_grammar_alone_is_written_in_lark(kind: str, text: str) -> None:
    """JSON would be read with the GIL held, for milliseconds if it is long, in the process that schedules."""
    assert source(kind, text).startswith("start: ")


def test_a_schema_means_the_same_whatever_its_length() -> None:
    short = json.dumps({"enum": ["one", "other"]})
    assert source("json_schema", short).startswith("{")
    for found in (source("json_schema", short), source("json_schema", LONG)):
        assert accepts(found, '"one"')
        assert accepts(found, '"other"')
        for text in ('"on"', '"others"', "one", '["one"]', "", '"one" '):
            assert not accepts(found, text)
