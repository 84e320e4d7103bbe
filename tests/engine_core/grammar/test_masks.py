"""Masks of a step: the right bits at the right entries, places that nobody reads any more, rows that fail alone."""

from __future__ import annotations

import json
import random
import threading

import numpy as np
import pytest

from penstock.engine_core.grammar import masks
from penstock.engine_core.grammar.masks import FilledMasks, MaskRow, MaskStore, bits_of, call
from penstock.engine_core.grammar.states import LONGEST
from penstock.protocol.errors import GrammarFailure
from tests.engine_core.grammar.vocabulary import END, OTHER_END, allowed, guide, ids, tokens, vocabulary

WORDS = 128
THINK = 4091


class Executors:
    """A store as executors keep it, fed by what is sent."""

    def __init__(self, places: int) -> None:
        self.store = np.zeros((places, WORDS), np.int32)

    def masks(self, filled: FilledMasks) -> dict[int, set[int]]:
        """Allowed tokens of each entry."""
        fresh = np.frombuffer(filled.new_slots, np.int32)
        self.store[fresh] = np.frombuffer(filled.bits, np.int32).reshape(-1, WORDS)
        entries = np.frombuffer(filled.entries, np.int32).tolist()
        places = np.frombuffer(filled.slots, np.int32).tolist()
        return {entry: allowed(self.store[place].tobytes()) for entry, place in zip(entries, places, strict=True)}


def test_each_entry_gets_the_mask_of_its_place_in_the_output() -> None:
    store, executors = MaskStore(tokens(), 64, 2), Executors(64)
    one, two = guide("regex", "[ab]c"), guide("regex", "x*")
    drafts = ids("a")
    masks = executors.masks(store.fill(1, 0, [MaskRow(one, drafts, 3), MaskRow(two, [], 7)]))
    assert sorted(masks) == [3, 4, 7]
    assert {vocabulary().token(token) for token in masks[3]} >= {"a", "b"}
    assert {vocabulary().token(token)[0] for token in masks[4]} == {"c"}
    assert {END, OTHER_END} < masks[7]
    assert one.matcher.compute_bitmask() == guide("regex", "[ab]c").matcher.compute_bitmask()


USERS = json.dumps({"type": "array", "items": {
    "type": "object", "properties": {"id": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["id", "name"], "additionalProperties": False,
}})  # fmt: skip


def single(text: str) -> list[int]:
    """Byte by byte."""
    return [tokens().single[byte] for byte in text.encode()]


def test_the_mask_behind_a_rejected_draft_is_not_taken_for_a_later_one() -> None:
    """The library keeps the mask that it made last, and knows it by the number of rows of items and the lexer's state.
    The draft ends behind the colon and a line break, the output goes on to a line break before one, with as many rows,
    and no mask is kept on the way there, where tokens are forced."""
    store, executors = MaskStore(tokens(), 64, 2), Executors(64)
    found = guide("json_schema", USERS)
    found.advance(ids("["))
    executors.masks(store.fill(1, 0, [MaskRow(found, single('{"id":\n'), 0)]))
    found.advance(single(' {"id"\n'))
    behind = executors.masks(store.fill(2, 1, [MaskRow(found, [], 0)]))[0]
    assert {vocabulary().token(token)[0] for token in behind} & {":", "1"} == {":"}


def test_guides_stand_where_they_stood_when_a_fill_with_drafts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*words: object) -> None:
        raise ValueError("no mask")

    store = MaskStore(tokens(), 64, 2)
    one, two = guide("regex", "[ab]cde"), guide("regex", "x{1,9}")
    with monkeypatch.context() as patch:
        patch.setattr(masks, "fill_next_token_bitmask_par", failing)
        store.fill(1, 0, [MaskRow(one, ids("a"), 0), MaskRow(two, single("xx"), 2)])
    assert one.failed
    assert two.failed
    for found, again in ((one, guide("regex", "[ab]cde")), (two, guide("regex", "x{1,9}"))):
        assert found.matcher.compute_bitmask() == again.matcher.compute_bitmask()


def test_a_fill_equals_a_walk() -> None:
    """Any drafts, allowed or not, ends among them: the masks are those of the guide that took them one by one, and the
    guide itself is where it was."""
    rng = random.Random(5)
    store, executors = MaskStore(tokens(), 512, 2), Executors(512)
    properties = '{"a":{"type":"integer"},"b":{"enum":["x","yy"]}}'
    source = f'{{"type":"object","properties":{properties},"additionalProperties":false}}'
    for step in range(1, 40):
        rows, expected, entry = [], {}, 0
        for _ in range(rng.randrange(1, 6)):
            found = guide("json_schema", source)
            for _ in range(rng.randrange(8)):
                choices = sorted(allowed(found.matcher.compute_bitmask()) - tokens().eos)
                if not choices:
                    break
                found.advance([rng.choice(choices)])
            before, twin, drafts, good = found.matcher.compute_bitmask(), found.copy(), [], True
            expected[entry] = allowed(before)
            for place in range(rng.randrange(5)):
                choices = sorted(allowed(twin.matcher.compute_bitmask()))
                token = rng.choice(choices) if rng.random() < 0.8 else rng.randrange(4096)
                drafts.append(token)
                good = good and token in choices and token not in tokens().eos
                if good:
                    twin.advance([token])
                    expected[entry + place + 1] = allowed(twin.matcher.compute_bitmask())
            rows.append((MaskRow(found, drafts, entry), before))
            entry += len(drafts) + 1
        masks = executors.masks(store.fill(step, step - 1, [row for row, _ in rows]))
        assert sorted(masks) == list(range(entry))
        for place, want in expected.items():
            assert masks[place] == want
        for row, before in rows:
            assert row.guide.matcher.compute_bitmask() == before


def test_families_are_filled_side_by_side_and_each_row_keeps_its_entry() -> None:
    store, executors = MaskStore(tokens(), 256, 4), Executors(256)
    origins = [guide("regex", f"{letter}+[0-9]") for letter in "abc"]
    rows, expected = [], {}
    for entry in range(0, 60, 2):
        twin = origins[entry % 3].copy()
        drafts = ids("abc"[entry % 3]) if entry % 4 == 0 else []
        rows.append(MaskRow(twin, drafts, entry))
        expected[entry] = allowed(twin.matcher.compute_bitmask())
    masks = executors.masks(store.fill(1, 0, rows))
    assert {entry: masks[entry] for entry in expected} == expected
    assert len({id(row.guide.family) for row in rows}) == 3


def test_a_mask_that_stands_there_is_not_sent_again() -> None:
    store, executors = MaskStore(tokens(), 64, 1), Executors(64)
    rows = [MaskRow(guide("json_object"), [], entry) for entry in range(20)]
    first = store.fill(1, 0, rows)
    assert len(first.new_slots) == 4
    expected = executors.masks(first)
    again = store.fill(2, 1, rows)
    assert again.new_slots == again.bits == b""
    assert executors.masks(again) == expected


def test_a_place_is_not_reused_while_a_step_in_flight_reads_it() -> None:
    store, executors = MaskStore(tokens(), 8, 1), Executors(8)
    assert store.most == 4
    letters = "abcdefghijklmnopqrstuvwxyz"
    read: dict[int, tuple[set[int], dict[int, set[int]]]] = {}
    for step in range(1, 200):
        rows = [MaskRow(guide("regex", f"{letters[(step * 3 + row) % 26]}+1"), [], row) for row in range(4)]
        filled = store.fill(step, step - 2, rows)
        fresh = set(np.frombuffer(filled.new_slots, np.int32).tolist())
        if step - 1 in read:
            assert fresh.isdisjoint(read[step - 1][0]), "the step before may still read it"
        read[step] = set(np.frombuffer(filled.slots, np.int32).tolist()), executors.masks(filled)
        for row in range(4):
            assert read[step][1][row] == allowed(rows[row].guide.matcher.compute_bitmask())


def test_a_mask_in_use_outlives_those_that_are_not() -> None:
    store, executors = MaskStore(tokens(), 4, 1), Executors(4)
    steady = guide("regex", "a+")
    for step, letter in enumerate("bcdef", 1):
        rows = [MaskRow(steady, [], 0), MaskRow(guide("regex", letter), [], 1)]
        found = executors.masks(store.fill(step, step - 1, rows))
        assert {vocabulary().token(token)[0] for token in found[0]} == {"a"}
        assert {vocabulary().token(token)[0] for token in found[1]} == {letter}


def test_a_flood_of_masks_keeps_as_many_as_there_are_places() -> None:
    store = MaskStore(tokens(), 8, 1)
    for step in range(1, 300):
        one = guide("regex", f"[{chr(0x4E00 + step)}ab]{{{step}}}[a-z]{{0,{step % 7}}}")
        one.advance(ids("a" * (step - 1)))
        store.fill(step, step - 1, [MaskRow(one, ids("b"), 0)])
        assert len(store._known) + len(store._free) == len(store._stored) == 8


def test_masks_with_one_digest_keep_apart() -> None:
    store, executors = MaskStore(tokens(), 64, 1), Executors(64)
    store._factors[:] = 0  # every mask has the same digest
    rows = [MaskRow(guide("regex", letter), [], entry) for entry, letter in enumerate("abcabc")]
    masks = executors.masks(store.fill(1, 0, rows))
    assert masks[0] == masks[3] != masks[1] == masks[4] != masks[2] == masks[5]
    assert store.fill(2, 1, rows).new_slots == b""


def test_new_executors_are_sent_everything_again() -> None:
    rows = [MaskRow(guide("json_object"), [], 0)]
    for _ in range(2):
        assert len(MaskStore(tokens(), 64, 1).fill(1, 0, rows).new_slots) == 4


def test_entries_before_a_structure_begins_allow_everything_but_an_end() -> None:
    store, executors = MaskStore(tokens(), 64, 1), Executors(64)
    found = guide("regex", "[0-9]", after=(THINK,))
    masks = executors.masks(store.fill(1, 0, [MaskRow(found, [5, THINK, 16], 0)]))
    assert masks[0] == masks[1] == set(range(WORDS * 32)) - {END, OTHER_END}
    assert masks[2] == allowed(guide("regex", "[0-9]").matcher.compute_bitmask())
    assert masks[3] == {END, OTHER_END}
    assert not found.bound


def test_after_the_end_only_ends_follow() -> None:
    store, executors = MaskStore(tokens(), 64, 1), Executors(64)
    found = guide("regex", "a*")
    found.advance([*ids("a"), END])
    assert executors.masks(store.fill(1, 0, [MaskRow(found, [], 0)]))[0] == {END, OTHER_END}


def test_a_step_without_rows_is_an_empty_message() -> None:
    assert MaskStore(tokens(), 8, 1).fill(1, 0, []) == FilledMasks(b"", b"", b"", b"")


def test_a_row_that_fails_fails_alone() -> None:
    store, executors = MaskStore(tokens(), 64, 2), Executors(64)
    good, bad = guide("regex", "[ab]c"), guide("regex", "[ab]c")
    bad.matcher.consume_token(7)  # in error from here on: its masks would allow the end
    masks = executors.masks(store.fill(1, 0, [MaskRow(bad, ids("a"), 0), MaskRow(good, ids("a"), 2)]))
    assert masks[0].isdisjoint(tokens().eos)
    assert masks[2] == allowed(guide("regex", "[ab]c").matcher.compute_bitmask())
    good.advance(ids("a"))
    with pytest.raises(GrammarFailure):
        bad.advance([min(masks[0])])


def test_a_fill_that_raises_is_done_again_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    store, executors = MaskStore(tokens(), 64, 2), Executors(64)
    rows = [MaskRow(guide("regex", "[ab]c"), [], entry) for entry in range(4)]

    def once(jobs, filled, executors):
        if any(job[0] is rows[2].guide for job in jobs):
            raise ValueError("too many expressions")
        call(jobs, filled, executors)

    monkeypatch.setattr(masks, "call", once)
    found = executors.masks(store.fill(1, 0, rows))
    assert found[0] == found[1] == found[3] != found[2]
    with pytest.raises(GrammarFailure, match="too many expressions"):
        rows[2].guide.advance(ids("a"))
    rows[1].guide.advance(ids("a"))


def test_an_odd_number_of_words_is_hashed_too() -> None:
    from penstock.engine_core.grammar.tokens import GrammarTokens

    odd = GrammarTokens(vocabulary(), 4097, (END,))
    assert odd.words == 129
    assert allowed(bits_of(odd, {0, 4096}).tobytes()) == {0, 4096}
    store = MaskStore(odd, 8, 1)
    assert len(store.fill(1, 0, [MaskRow(guide("regex", "a"), [], 0)]).bits) == 129 * 4


def test_it_may_run_in_a_thread_while_others_are_advanced() -> None:
    store, found = MaskStore(tokens(), 256, 2), []
    rows = [MaskRow(guide("json_object"), [], entry) for entry in range(64)]
    thread = threading.Thread(target=lambda: found.append(store.fill(1, 0, rows)))
    thread.start()
    for _ in range(50):
        guide("regex", "[ab]c").advance(ids("ac"))
    thread.join()
    assert len(found[0].entries) == 256


def test_rows_that_are_measured_get_the_same_masks_and_who_is_slow_fails_alone() -> None:
    store, executors = MaskStore(tokens(), 64, 1), Executors(64)
    slow, quick = guide("regex", "[ab]c"), guide("regex", "x*")
    readings = iter([0.0, 5.0, 5.0, 5.001, *range(6, 100)])
    plain = executors.masks(store.fill(1, 0, [MaskRow(slow, ids("a"), 0), MaskRow(quick, [], 2)]))
    timed = executors.masks(
        store.fill(2, 1, [MaskRow(slow, ids("a"), 0), MaskRow(quick, [], 2)], lambda: float(next(readings)))
    )
    assert timed == plain
    assert slow.failed
    assert not quick.failed
    after = executors.masks(store.fill(3, 2, [MaskRow(slow, [], 0), MaskRow(quick, [], 1)]))
    assert after[1] == plain[2]
    assert not after[0] & tokens().eos
    with pytest.raises(GrammarFailure, match="ms a token"):
        slow.advance(ids("a"))


def test_a_mask_made_beside_the_steps_leaves_with_the_next_of_them() -> None:
    store, executors = MaskStore(tokens(), 64, 1), Executors(64)
    origin = guide("regex", "[ab]c*")
    one, two = origin.copy(), origin.copy()
    two.advance(ids("a"))
    assert (one.ready, two.ready) == (False, False)
    executors.masks(store.fill(1, 0, [MaskRow(one, [], 0)]))
    assert (one.ready, two.ready) == (True, False)
    store.keep(two.spot, store.make(two), 0)
    assert two.ready
    filled = store.soon(2, 0, [MaskRow(two, [], 0), MaskRow(one, [], 1)])
    assert filled is not None
    assert len(filled.new_slots) == 4
    assert executors.masks(filled)[0] >= {*ids("c"), END}
    again = store.soon(3, 0, [MaskRow(two, [], 0)])
    assert again is not None
    assert again.new_slots == b"", "it was sent"


def test_a_mask_is_not_kept_where_steps_in_flight_may_read_every_slot() -> None:
    store, executors = MaskStore(tokens(), 2, 1), Executors(2)
    guides = [guide("regex", text) for text in ("a", "b", "c")]
    for step, each in enumerate(guides[:2], 1):
        executors.masks(store.fill(step, 0, [MaskRow(each, [], 0)]))
    made = store.make(guides[2])
    store.keep(guides[2].spot, made, 0)
    assert not guides[2].ready
    store.keep(guides[2].spot, made, 1)
    assert [each.ready for each in guides] == [False, True, True], "step 1 is over"
    filled = store.soon(3, 0, [MaskRow(guides[2], [], 0)])
    assert filled is not None
    assert executors.masks(filled)[0] == set(ids("c"))


def test_a_mask_whose_slot_was_taken_before_it_left_is_not_sent() -> None:
    store = MaskStore(tokens(), 2, 1)
    first, second, third = (guide("regex", text) for text in ("a", "b", "c"))
    store.keep(first.spot, store.make(first), 0)
    store.keep(second.spot, store.make(second), 0)
    store.keep(third.spot, store.make(third), 0)
    assert [each.ready for each in (first, second, third)] == [False, True, True]
    filled = store.soon(1, 0, [MaskRow(second, [], 0)])
    assert filled is not None
    assert len(filled.new_slots) == 8
    assert len(set(np.frombuffer(filled.new_slots, np.int32).tolist())) == 2


def test_an_output_without_states_has_a_spot_until_it_goes_on() -> None:
    store = MaskStore(tokens(), 64, 1)
    found = guide("regex", "[ab]*")
    found.advance(ids("ab" * LONGEST))
    assert found.state is None
    store.keep(found.spot, store.make(found), 0)
    assert found.ready
    assert store.soon(1, 0, [MaskRow(found, [], 0)]) is not None
    found.advance(ids("a"))
    assert not found.ready
    assert store.soon(2, 0, [MaskRow(found, [], 0)]) is None


def test_drafts_are_covered_as_far_as_the_masks_behind_them_are_there() -> None:
    store = MaskStore(tokens(), 64, 1)
    origin = guide("regex", "abc")
    one, drafts = origin.copy(), single("abc")
    assert origin.covered(drafts) == 0
    for step, token in enumerate(drafts[:2], 1):
        one.advance([token])
        store.fill(step, step - 1, [MaskRow(one, [], 0)])
    assert origin.covered(drafts) == 2
    assert origin.covered([]) == 0
    origin.fail("it broke")
    assert (origin.ready, origin.covered(drafts)) == (True, 3)


def test_a_mask_that_a_step_in_flight_reads_stays_although_it_was_made_again() -> None:
    store = MaskStore(tokens(), 2, 1)
    one, other, third = guide("regex", "a"), guide("regex", "(a|a)"), guide("regex", "b")
    store.fill(5, 3, [MaskRow(one, [], 0)])
    store.keep(other.spot, store.make(other), 3)
    assert other.spot.place is one.spot.place
    store.keep(third.spot, store.make(third), 3)
    late = guide("regex", "c")
    store.keep(late.spot, store.make(late), 4)
    assert [each.ready for each in (one, third, late)] == [True, False, True]


def test_masks_of_a_quick_automaton_are_made_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same masks, with and without drafts; of one that is not known to be quick, nothing is done."""
    origin = guide("json_schema", USERS)
    twin = origin.copy()
    found = [MaskRow(origin, single('[{"id":'), 0), MaskRow(twin, [], 8)]
    executors, store = Executors(64), MaskStore(tokens(), 64, 2)
    assert store.soon(1, 0, found) is None
    expected = executors.masks(MaskStore(tokens(), 64, 2).fill(1, 0, found))
    for _ in range(199):
        origin.took(0.0001, 9)
    assert twin.pace < masks.SOON / 9, "it is the automaton's"
    monkeypatch.setattr(masks, "fill_next_token_bitmask_par", None)
    filled = store.soon(1, 0, found)
    assert filled is not None
    assert (filled.late, filled.made) == ((origin, twin), 9)
    assert executors.masks(filled) == expected


def test_masks_wait_for_a_thread_where_they_are_many_or_slow() -> None:
    origin, store = guide("regex", "[ab]{1,64}"), MaskStore(tokens(), 64, 2)
    for _ in range(199):
        origin.took(masks.SOON / 4, 1)
    ends = [origin.copy() for _ in range(5)]
    for each, text in zip(ends, ("", "a", "aa", "aaa", "aaaa"), strict=True):
        each.advance(single(text))
    rows = [MaskRow(each, [], entry) for entry, each in enumerate(ends)]
    assert store.soon(1, 0, rows) is None
    assert store.soon(1, 0, rows[:3]) is not None
    origin.took(0.01, 1)
    assert store.soon(2, 1, rows) is None, "a single slow one"
    assert store.soon(2, 1, rows[:3]) is not None, "they are in slots"


def test_the_pace_of_an_output_without_states_is_unknown() -> None:
    found = guide("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}))
    for _ in range(99):
        found.took(0.00001, 1)
    assert MaskStore(tokens(), 64, 2).soon(1, 0, [MaskRow(found, [], 0)]) is None
