"""Unique items beside the automaton: masks lose exactly the tokens that repeat one, and never all of them."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from benchmarks.schema_judge import byte_tokenizer, compiled
from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.masks import MaskRow, MaskStore
from penstock.engine_core.grammar.sources import source_of
from penstock.engine_core.grammar.token_index import TokenIndex
from penstock.engine_core.grammar.unique_items import PLACES, Spot, UniqueItems, decoded, follow
from penstock.protocol.errors import EngineFailure, GrammarFailure, InvalidRequest
from penstock.protocol.messages import Automaton, Grammar
from tests.engine_core.grammar.vocabulary import END, allowed, ids, tokens

STRING = {"type": "string"}
INT = {"type": "integer"}
LIKELY = set(b'ab01",[]{}:-\\n')  # bytes of which outputs repeat themselves


def unique(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


def made(schema: Any, whitespace: str = "bounded", after: tuple[int, ...] = ()) -> Automaton:
    found = source_of(Grammar(kind="json_schema", source=json.dumps(schema), whitespace=whitespace), tokens())
    assert found.unique
    return Automaton(source=found.text, unique=found.unique, after=np.array(after, np.int32).tobytes())


def guide(schema: Any, output: str = "", whitespace: str = "bounded") -> Guide:
    found = Guide(tokens(), made(schema, whitespace))
    found.advance(single(output))
    return found


def single(text: str) -> list[int]:
    """Byte by byte."""
    return [tokens().single[byte] for byte in text.encode()]


def masks(found: Guide, drafts: list[int] | None = None) -> list[set[int]]:
    """Allowed tokens after nothing, draft 0, draft 1, ..."""
    filled = MaskStore(tokens(), 64, 2).fill(1, 0, [MaskRow(found, drafts or [], 0)])
    width = len(filled.bits) // len(np.frombuffer(filled.new_slots, np.int32))
    bits = dict(zip(np.frombuffer(filled.new_slots, np.int32).tolist(), range(0, len(filled.bits), width), strict=True))
    slots = np.frombuffer(filled.slots, np.int32).tolist()
    return [allowed(filled.bits[bits[slot] : bits[slot] + width]) for slot in slots]


def texts(found: Guide) -> set[bytes]:
    return {tokens().text([token_id]) for token_id in masks(found)[0]}


SCHEMAS: dict[str, Any] = {
    "strings": unique(STRING),
    "short strings": unique({**STRING, "maxLength": 2}),
    "all of a pattern": unique({**STRING, "pattern": "^[ab]{1,2}$"}, minItems=6),
    "ends of a pattern": unique({**STRING, "pattern": "^(a|b[0-9]*|\\n)$"}, minItems=5),
    "integers": unique(INT),
    "all integers of a range": unique({**INT, "minimum": -12, "maximum": 55}, minItems=66),
    "dates": unique({**STRING, "format": "date"}),
    "many values": unique({"enum": [f"v{i}" for i in range(70)]}, minItems=66),
    "lists of sets": {"type": "array", "items": unique({**STRING, "maxLength": 1}, maxItems=6)},
    "two sets": {"type": "object", "properties": {"a": unique(STRING), "b": {"type": "array", "items": unique(INT)}}},
}


@pytest.mark.sweep
@pytest.mark.parametrize("whitespace", ["bounded", "none"])
@pytest.mark.parametrize("name", list(SCHEMAS))
def test_a_mask_loses_the_tokens_that_repeat_an_item_and_no_others(name: str, whitespace: str) -> None:
    """Along outputs that repeat themselves where they can: each token by itself, and a way on from anywhere."""
    turns = random.Random(name + whitespace)
    for _ in range(3):
        automaton = made(SCHEMAS[name], whitespace)
        places, spot = PLACES.decode(automaton.unique), Spot()
        found, output = Guide(tokens(), automaton), b""
        for step in range(150):
            mask = masks(found)[0]
            assert mask, output
            if step % 10 == 0:
                every = allowed(found.matcher.compute_bitmask())
                kept = {each for each in every - tokens().eos if follow(places, spot, tokens().text([each]))}
                assert mask - tokens().eos == kept, output
            going = sorted(mask - tokens().eos)
            if not going or (found.may_end() and turns.random() < 0.2):
                break
            likely = [each for each in going if LIKELY.issuperset(tokens().text([each]))]
            token_id = turns.choice(likely if likely and turns.random() < 0.9 else going)
            found.advance([token_id])
            output += tokens().text([token_id])
            spot = follow(places, spot, tokens().text([token_id])) or pytest.fail("the mask allowed a repeated item")


class Nasty:
    """A vocabulary of tokens that open an array, end an item, and repeat one."""

    texts = (
        *(
            b"[",
            b'"',
            b"a",
            b'a"',
            b'["a","a"',
            b'["a","b"',
            b'"a","a',
            b'"a","a"',
            b',"a"',
            b', "a',
            b'a","a","',
            b'"a"',
        ),
        *(b'"],["b","b"', b'b","b","a"', b'":["a","a"', b'{"s":["a","a"]', b'"s', b"{", b",", b"]", b" ", b'"'),
        *(b"1", b"1,", b"[1,1", b"[1,1,", b"[1, 1]", b",1", b"1,1,", b"1]", b"1,11]", b"],[2,1,2", b"-0", b"0,-0,"),
        *(b"\\", b"n", b'n"', b'\\n"', b'\\u000a"', b"\\u00", b'0a"', b'a\\"', b'n","', b'\\"a'),
    )
    index = TokenIndex((text, number) for number, text in enumerate(texts))

    def text(self, token_ids: list[int]) -> bytes:
        return b"".join([self.texts[each] for each in token_ids])


@pytest.mark.parametrize("schema", [
    unique(STRING), unique(INT), {"type": "array", "items": unique(STRING)}, {"type": "array", "items": unique(INT)},
    {"type": "object", "additionalProperties": unique(STRING)}, unique({**STRING, "pattern": "^([ab]{1,2}|\\n)$"}),
])  # fmt: skip
def test_tokens_of_more_than_one_item(schema: Any) -> None:
    """Of what the automaton allows, byte by byte, exactly what `follow` refuses is taken out."""
    places, turns = PLACES.decode(made(schema).unique), random.Random(3)
    root, refused = compiled(byte_tokenizer(), schema).matcher, 0
    assert root is not None
    for _ in range(120):
        walk, followed, spot = root.deep_copy(), UniqueItems(Nasty(), made(schema).unique), Spot()  # type: ignore[arg-type]
        for _ in range(8):
            every = {n for n, text in enumerate(Nasty.texts) if walk.validate_tokens(list(text)) == len(text)}
            mask = bits(every)
            followed.restrict(mask, [])
            kept = {each for each in every if follow(places, spot, Nasty.texts[each])}
            assert allowed(mask.tobytes()) == kept
            refused += len(every) - len(kept)
            if not kept:
                break
            token_id = turns.choice(sorted(kept))
            followed.take(token_id)
            walk.consume_tokens(list(Nasty.texts[token_id]))
            spot = follow(places, spot, Nasty.texts[token_id]) or spot
    assert refused > 100


def bits(token_ids: set[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A mask of 64 tokens."""
    return np.array([[sum(1 << each for each in token_ids)]], np.uint64).view(np.int32)


def test_an_item_may_begin_as_one_before_it_and_not_end_there() -> None:
    found = texts(guide(unique(STRING), '["ab", "a'))
    assert b"b" in found
    assert b'"' in found
    assert b'"' not in texts(guide(unique(STRING), '["ab", "ab'))
    assert b"]" not in texts(guide(unique(INT), "[12,12"))
    assert {b"3", b"0"} < texts(guide(unique(INT), "[12,12"))
    assert b"]" in texts(guide(unique(INT), "[12,1"))


@pytest.mark.parametrize(("output", "repeats"), [
    ('["a\\n", "a\\u000a', True), ('["a\\u000a", "a\\n', True), ('["\\\\", "\\\\', True), ('["\\\\n", "\\n', False),
    ('["a\\"", "a\\"', True), ('["a\\"b", "a', False),
    ('["é", "é', True), ('["\\u007f", "\\u007f', True), ('["é", "è', False), ('["", "', True),
])  # fmt: skip
def test_items_are_compared_as_json_reads_them(output: str, repeats: bool) -> None:
    assert (b'"' in texts(guide(unique(STRING), output))) is not repeats


def test_a_character_may_be_spelled_in_two_ways_within_one_token() -> None:
    vocabulary = Nasty()
    vocabulary.texts = (b'\x7f"', b'\\u007f"', b'"\x7f"', b'"\\u007f"', b"\x7f")
    vocabulary.index = TokenIndex((text, number) for number, text in enumerate(vocabulary.texts))
    for output in (b'["\x7f","', b'["\x7f",'):
        followed = UniqueItems(vocabulary, made(unique(STRING)).unique)  # type: ignore[arg-type]
        followed._spot = follow(PLACES.decode(made(unique(STRING)).unique), Spot(), output) or Spot()
        mask = bits(set(range(5)))
        followed.restrict(mask, [])
        assert allowed(mask.tobytes()) == ({2, 3, 4} if output.endswith(b'"') else {0, 1, 4})


def test_zero_has_two_spellings_and_nothing_follows_it() -> None:
    for first in ("0", "-0"):
        assert b"0" not in texts(guide(unique(INT), f"[{first},"))
        assert b"0" not in texts(guide(unique(INT), f"[{first},-"))
        assert b"1" in texts(guide(unique(INT), f"[{first},-"))


def test_an_item_is_not_begun_that_can_become_nothing_new() -> None:
    assert b"b" not in texts(guide(unique({**STRING, "pattern": "^(a|bc)$"}), '["bc","'))
    days = ",".join(f'"2024-03-{day}"' for day in (30, 31))
    assert b"3" not in texts(guide(unique({**STRING, "format": "date"}), f'[{days},"2024-03-'))
    assert b"3" in texts(guide(unique({**STRING, "format": "date"}), f'[{days},"2024-05-'))
    assert b"b" not in texts(guide(unique({**STRING, "maxLength": 2}), '["ab","a'))


def test_arrays_one_behind_the_other_and_their_keys_know_nothing_of_one_another() -> None:
    sets = {"type": "object", "additionalProperties": {"type": "array", "items": unique(STRING)}}
    found = guide(sets, '{"x\\n":[["a","b"],["a')
    assert b'"' in texts(found)
    assert b'"' in texts(guide(sets, '{"x":[["a"]],"'))


def test_masks_behind_drafts_know_the_items_of_the_drafts() -> None:
    found = guide(unique({**STRING, "pattern": "^[ab]$"}), "[")
    before = masks(found)
    rows = masks(found, single('"a","b"'))
    assert single("a")[0] in rows[1]
    assert single("a")[0] not in rows[5]
    assert single("b")[0] in rows[5]
    assert masks(found) == before


def test_behind_a_draft_that_repeats_an_item_anything_stands() -> None:
    found = guide(unique(STRING), '["a","a')
    rows = masks(found, single('","'))
    assert single('"')[0] not in rows[0]
    assert rows[1:] == [allowed(row) for row in [guide(unique(STRING), f'["a","b{text}').matcher.compute_bitmask()
                                                 for text in ('"', '",', '","')]]  # fmt: skip


def test_a_repeated_item_ends_the_request() -> None:
    found = guide(unique(STRING), '["a","a')
    with pytest.raises(EngineFailure, match="repeats an item"):
        found.advance(single('"'))


def test_copies_go_their_own_ways() -> None:
    found = guide(unique(STRING), '["a","')
    twin = found.copy()
    found.advance(single('b","'))
    twin.advance(single('c","b'))
    assert b'"' in texts(twin)
    found.advance(single("b"))
    assert b'"' not in texts(found)


def test_items_count_from_where_the_structure_begins() -> None:
    found = Guide(tokens(), made(unique(STRING), after=tuple(ids("x"))))
    found.advance([*single('["a","'), *ids("x"), *single('["b","a')])
    assert b'"' in texts(found)
    found.advance(single('","b'))
    assert b'"' not in texts(found)


def test_a_finished_array_may_end() -> None:
    assert END in masks(guide(unique(STRING), '["a"]'))[0]


def test_an_escape_is_not_begun_whose_characters_are_taken() -> None:
    escapes = unique({**STRING, "pattern": r'^(a|["\\])$'})
    assert b"\\" in texts(guide(escapes, r'["\"","'))
    assert texts(guide(escapes, r'["\"","\\","')) == {b"a"}
    lines = unique({**STRING, "pattern": r"^(a|[\n\x01])$"})
    assert b"\\" not in texts(guide(lines, r'["\n","\u0001","'))
    assert texts(guide(lines, r'["\n","\u00')) == {b"0"}


def test_a_guide_without_a_way_on_fails_and_gets_another_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UniqueItems, "restrict", lambda self, masks, drafts: masks.fill(0))
    stuck = guide(unique(STRING))
    assert masks(stuck)[0]
    with pytest.raises(GrammarFailure, match="nothing can follow but a repeated item"):
        stuck.advance(single("["))


@pytest.mark.parametrize(("text", "read"), [
    (b"ab", b"ab"), (b"a\\n", b"a\n"), (b"a\\", None), (b"\\u00", None), (b"\\u00e9", "é".encode()), (b"\\ud83d", None),
    (b"\\ud83d\\ude00", "😀".encode()), (b"\\n\xc3", b"\n\xc3"), (b"\\n\xf0\x9f\x98", b"\n\xf0\x9f\x98"), (b"", b""),
])  # fmt: skip
def test_what_a_string_has_as_far_as_it_has_come(text: bytes, read: bytes | None) -> None:
    assert decoded(text) == read


def test_outputs_that_are_no_json_are_followed_without_an_error() -> None:
    places = PLACES.decode(made(unique(STRING)).unique)
    turns = random.Random(5)
    for _ in range(300):
        follow(places, Spot(), bytes(turns.choices(b'[]{}",:\\ua1\xff ', k=12)))


def test_a_schema_in_a_tag_is_refused() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": unique(STRING)}}
    with pytest.raises(InvalidRequest, match="in a tag or a tool call"):
        source_of(Grammar(kind="structural_tag", source=json.dumps(tag)), tokens())
