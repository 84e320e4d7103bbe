"""What comes next if whitespace stands where it mostly does, in every style; and the automaton stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.spacing import (
    KEPT,
    LONGEST,
    MOST_PLACES,
    MOST_UNREAD,
    STRONGEST,
    Blank,
    Habits,
    Place,
    Spacing,
    candidates,
    indented,
)
from penstock.engine_core.grammar.tokens import ABSENT
from tests.engine_core.grammar.vocabulary import END, automaton, guide, ids, tokens

CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather"},
        "arguments": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}},
                          "required": ["lat", "lon"], "additionalProperties": False},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "days", "where", "unit"], "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"], "additionalProperties": False,
}  # fmt: skip
STYLES: dict[str, dict[str, Any]] = {
    "spaces": {}, "two": {"indent": 2}, "four": {"indent": 4}, "tabs": {"indent": "\t"},
    "dense": {"separators": (",", ":")},
}  # fmt: skip


def call(city: str, style: str) -> list[int]:
    """The tokens of a call in this style."""
    arguments = {"city": city, "days": [1, 2], "where": {"lat": 1.5, "lon": 20.25}, "unit": "celsius"}
    return ids(json.dumps({"name": "get_weather", "arguments": arguments}, **STYLES[style]))


def looking(schema: object = CALL, shared: Habits | None = None, **words: object) -> Guide:
    """A guide that guesses."""
    found = guide("json_schema", json.dumps(schema), **words)
    found.learn(Habits() if shared is None else shared)
    return found


def said(token_ids: Sequence[int]) -> str:
    return tokens().text(token_ids).decode()


def likely(one: Guide) -> str:
    return said(one.likely(one.forced()))


def steps(one: Guide, text: list[int], guess: Callable[[Guide], list[int]]) -> tuple[int, int]:
    """Steps that the text takes where each step verifies a guess, and guessed tokens that did not come."""
    place = count = wrong = 0
    while place < len(text):
        draft = guess(one)
        hits = next((hits for hits, (a, b) in enumerate(zip(draft, text[place:], strict=False)) if a != b), None)
        hits = min(len(draft), len(text) - place) if hits is None else hits
        wrong += len(draft) - hits
        one.advance(text[place : place + hits + 1])
        place, count = place + hits + 1, count + 1
    return count, wrong


def forced(one: Guide) -> list[int]:
    return one.forced()


def whole(one: Guide) -> list[int]:
    run = one.forced()
    return run + one.likely(run)


def test_what_json_begins_with_is_likely_as_most_texts_have_it() -> None:
    one = looking()
    assert said(one.forced()) + likely(one) == '{"name": "get_weather", "arguments": {"city"'
    one.advance(ids('{"name'))
    assert likely(one) == '": "get_weather", "arguments": {"city":'
    one.advance(ids('": "get_weather", "arguments": {"city": "Par'))
    assert likely(one) == ""  # what a string holds is the model's
    one.advance(ids('is"'))
    assert likely(one) == ', "days": ['


@pytest.mark.parametrize("style", STYLES)
def test_every_style_takes_fewer_steps_and_the_next_output_fewer_still(style: str) -> None:
    shared = Habits()
    plain = steps(looking(), call("Oslo", style), forced)
    first = steps(looking(shared=shared), call("Oslo", style), whole)
    second = steps(looking(shared=shared), call("Rome", style), whole)
    assert first[0] < plain[0]
    assert second[0] < 0.72 * plain[0]
    assert second[0] <= first[0]
    assert second[1] <= first[1]
    assert plain[1] == 0


def test_a_style_is_the_outputs_own_before_it_is_that_of_all() -> None:
    shared = Habits()
    for _ in range(3):
        steps(looking(shared=shared), call("Oslo", "spaces"), whole)
    one = looking(shared=shared)
    one.advance(ids('{"name":"get_weather","arguments":{"city":"x"'))
    assert likely(one) == ',"days":['
    assert likely(looking(shared=shared)) == '{"name": "get_weather", "arguments": {"city"'


def test_indentation_follows_the_depth() -> None:
    one = looking()
    one.advance(ids('{\n   "name": "get_weather",\n   "arguments": {\n'))
    assert likely(one) == '      "city": "'
    one.advance(ids('      "city": "a",\n      "days": [\n         1,\n         2\n      ],\n      "where": {\n'))
    assert likely(one) == '         "lat": '
    one.advance(ids('         "lat": 1,\n         "lon": 2\n      }'))
    assert likely(one) == ',\n      "unit": "'


def test_in_whitespace_that_it_does_not_know_nothing_is_likely() -> None:
    one = looking()
    one.advance(ids('{"name": "get_weather",\n  '))
    assert likely(one) == ""
    one.advance(ids('"arguments"\n '))
    assert likely(one) == ""
    one.advance(ids(": "))
    assert likely(one) == '{"city"\n  : "'  # no second space is allowed, and before colons it breaks lines


def test_before_numbers_whitespace_alone_is_likely() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    one = looking(schema)
    assert said(one.forced()) + likely(one) == '{"a": '
    one.advance(ids('{"a": 7'))
    assert likely(one) == ""  # the number may go on
    one.advance(ids(","))
    assert likely(one) == ' "b": '
    one.advance(ids(' "b": 1 '))
    assert likely(one) == ""
    one.advance(ids("}"))
    assert one.finished
    assert one.forced() == [END]
    assert one.likely([END]) == []


def test_where_several_may_stand_behind_whitespace_nothing_is_likely() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": ["string", "null"]}},
              "additionalProperties": False}  # fmt: skip
    one = looking(schema)
    one.advance(ids("{"))
    assert likely(one) == ""  # a key or the end
    one.advance(ids('"b": '))
    assert likely(one) == ""
    one.advance(ids('"x"'))
    assert likely(one) == "}"


def test_quotes_and_brackets_in_strings_are_no_structure() -> None:
    shared = Habits()
    one = looking({"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}, shared)
    for text in ('["a \\" ,   b: {[[{"', ',"]]}} \\\\"', ',"c"'):
        one.advance(ids(text))
        likely(one)
    assert one.forced() + one.likely(one.forced()) == ids("]")
    spacing = one._spacing
    assert spacing is not None
    assert spacing._place == Place(b'"'[0], b"", 1)
    assert spacing._guess((b","[0], b'"'[0])) == Blank(b"")


def test_without_whitespace_nothing_is_likely_nor_learned() -> None:
    shared = Habits()
    one = looking(shared=shared, whitespace="none")
    assert steps(one, call("Oslo", "dense"), whole) == steps(guide("json_schema", json.dumps(CALL), whitespace="none"),
                                                           call("Oslo", "dense"), forced)  # fmt: skip
    assert shared.guess((b":"[0], b'"'[0])) == Blank(b" ")


def test_one_that_does_not_learn_guesses_nothing_and_copies_do_not() -> None:
    plain = guide("json_schema", json.dumps(CALL))
    assert plain.likely(plain.forced()) == []
    assert looking().copy().likely([]) == []


def test_a_guide_that_has_failed_ended_or_is_slow_guesses_nothing() -> None:
    failed, slow = looking(), looking()
    failed.fail("too complex")
    slow.spend(0.2, 1)
    assert failed.likely([]) == slow.likely([]) == []
    free = Guide(tokens(), automaton("json_schema", json.dumps(CALL), after=(5,)))
    free.learn(Habits())
    assert free.likely([]) == []
    assert looking().likely([7] * 40) == []  # long runs are drafts enough


DIGITS = st.lists(st.integers(0, 9), max_size=3)
WORDS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=6)
VALUES = st.one_of(WORDS, st.integers(-999, 999), st.booleans(), st.none(), DIGITS)
TYPES = {str: "string", int: "integer", bool: "boolean", type(None): "null", list: "array"}


@given(
    st.dictionaries(st.text("abcé\"{}[]\\:, ", min_size=1, max_size=5), VALUES, min_size=1, max_size=4),
    st.sampled_from([*STYLES.values()]), st.booleans(),
)  # fmt: skip
def test_looking_ahead_leaves_the_automaton_as_it_was(
    value: dict[str, Any], style: dict[str, Any], required: bool
) -> None:
    """At every token of any text, in any style: what is forced, what is allowed, and every guess may come."""
    properties = {key: {"type": TYPES[type(item)]} for key, item in value.items()}
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    if required:
        schema["required"] = [*value]
    one, untouched = looking(schema), guide("json_schema", json.dumps(schema))
    for token in ids(json.dumps(value, ensure_ascii=False, **style)):
        run = one.forced()
        assert run == untouched.forced()
        guess = run + one.likely(run)
        assert untouched.matcher.validate_tokens(guess) == len(guess)
        assert one.matcher.compute_bitmask() == untouched.matcher.compute_bitmask()
        one.advance([token])
        untouched.advance([token])
    assert one.matcher.is_accepting()


def test_votes_wear_a_habit_down() -> None:
    habits = Habits()
    between = (b":"[0], b'"'[0])
    assert habits.guess(between) == Blank(b" ")
    habits.tell(between, Blank(b""))
    assert habits.guess(between) == Blank(b"")
    for _ in range(100):
        habits.tell(between, Blank(b" "))
    for _ in range(STRONGEST - 1):
        habits.tell(between, Blank(b""))
    assert habits.guess(between) == Blank(b" ")
    habits.tell(between, Blank(b""))
    assert habits.guess(between) == Blank(b"")


def test_whitespace_by_depth() -> None:
    assert indented(b"\n    ", 2) == Blank(b"\n", b"  ")
    assert indented(b"\r\n\t\t\t", 3) == Blank(b"\r\n", b"\t")
    assert indented(b"\n   ", 2) == Blank(b"\n   ")
    assert indented(b"\n \t", 2) == Blank(b"\n \t")
    assert indented(b"\n", 0) == Blank(b"\n")
    assert indented(b"\n", 3) == Blank(b"\n")
    assert indented(b"  ", 2) == Blank(b"  ")
    assert Blank(b"\n", b"  ").text(3) == b"\n      "


def test_places() -> None:
    place = Place().behind(b'{ "a": [')
    assert place == Place(b"["[0], b"", 2)
    assert place.behind(b" ").behind(b"\n") == Place(b"["[0], b" \n", 2)
    assert place.behind(b"1]} ") == Place(b"}"[0], b" ", 0)
    assert candidates(0) == candidates(b","[0])
    assert b'"'[0] in candidates(b"{"[0])
    assert b":"[0] in candidates(b'"'[0])
    assert b"."[0] in candidates(b"7"[0])


def test_guesses_that_are_kept_and_tokens_that_wait_are_bounded() -> None:
    one = looking({"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}},
                                              "required": ["a"], "additionalProperties": False}})  # fmt: skip
    one.advance(ids("["))
    item = ids('{"a": "b"}, ')
    for _ in range(MOST_UNREAD // len(item) + 2):
        one.advance(item)
    spacing = one._spacing
    assert spacing is not None
    assert len(spacing._unread) < MOST_UNREAD
    assert likely(one) == '{"a": "'
    for number in range(40):
        one.advance(ids(f'{{"a": "{number}"'))
        assert likely(one) == "}"
        one.advance(ids("}, "))
    assert all(len(known) <= KEPT for known in spacing._known.values())
    blanks = looking(whitespace="[ \\n]*")
    for _ in range(2 * MOST_PLACES):
        blanks.advance(ids(" ") if blanks.matcher.validate_tokens(ids(" ")) else ids("{"))
        likely(blanks)
    assert blanks._spacing is not None
    assert len(blanks._spacing._known) <= MOST_PLACES


def test_a_byte_without_a_token_ends_a_guess() -> None:
    class Lacking:
        def __init__(self, byte: int) -> None:
            single = [*tokens().single]
            single[byte] = ABSENT
            self.single, self.text, self.split = tuple(single), tokens().text, tokens().split

    for byte, expected in ((b"g", '{"name": "'), (b"\n", ""), (b" ", '{"name":'), (b"{", "")):
        one = guide("json_schema", json.dumps(CALL))
        assert one.forced() == []
        assert said(Spacing(Lacking(byte[0]), Habits()).likely(one.matcher, [])) == expected  # type: ignore[arg-type]
        assert one.forced() == []


def test_no_output_makes_the_habits_of_all_large() -> None:
    """A model may write whitespace without end; what is remembered of it is what a guess may hold."""
    shared = Habits()
    one = looking(CALL, shared, whitespace="[ \\n]*")
    likely(one)
    for text in ("{ ", *[" " * 200] * 5, '"name":  "get_weather",'):
        one.advance(ids(text))
        likely(one)
    held = [blank for blank, _ in shared._found.values()]
    assert Blank(b"  ") in held
    assert max(len(blank.head) + len(blank.each) for blank in held) <= LONGEST
