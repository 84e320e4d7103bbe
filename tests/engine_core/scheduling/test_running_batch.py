from __future__ import annotations

from array import array

import numpy as np
import pytest

from penstock.engine_core.kv.block_layout import BlockLayout
from penstock.engine_core.scheduling.request import Request, Sequence
from penstock.engine_core.scheduling.running_batch import Slots, blocks_at_end, joined
from penstock.protocol.messages import Sampling, SubmitTokens

LAYOUT = BlockLayout(4)


def choice(number: int, source: int = 0, blocks: int = 0) -> Sequence:
    message = SubmitTokens(id=number, token_ids=b"", sampling=Sampling())
    request = Request(message, source, number, 3, 20, None, frozenset())
    return Sequence(request, 0, (0, number, 0), array("i", [1, 2, 3]), [], blocks=list(range(1, blocks + 1)))


def test_a_life_names_its_slot_and_is_never_used_again() -> None:
    slots, seen = Slots(3, LAYOUT), set()
    for number in range(20):
        one = choice(number)
        slot = slots.enter(one)
        assert one.life % 3 == slot
        assert one.life not in seen
        seen.add(one.life)
        assert slots.free == 2
        assert slots.blocks.committed == 5
        assert slots.leave(one) == slot
        assert (one.slot, one.life, slots.life[slot]) == (-1, 0, 0)
        slots.give(slot)
    assert slots.blocks.committed == 0


@pytest.mark.parametrize(("block_size", "blocks"), [(19, 1), (20, 1), (18, 2), (1, 19)])
def test_the_last_token_needs_no_block(block_size: int, blocks: int) -> None:
    assert blocks_at_end(choice(1), BlockLayout(block_size)) == blocks  # its limit is 20


def test_a_life_begins_where_its_prefix_ends() -> None:
    slots = Slots(2, LAYOUT)
    slot = slots.enter(choice(1, blocks=2))
    assert (slots.blocks.capacity[slot], slots.blocks.held[slot]) == (8, 2)
    assert (slots.num_computed_tokens[slot], slots.num_tokens[slot]) == (8, 3)


def test_the_lane_is_one_object_while_nobody_comes_or_goes() -> None:
    slots = Slots(4, LAYOUT)
    places = [slots.enter(choice(number)) for number in (1, 2, 3)]
    for slot in places:
        slots.set_ready(slot, True)
    lane = slots.decoding()
    slots.set_ready(places[0], True)
    assert slots.decoding() is lane
    assert lane.slots.tolist() == sorted(places)
    assert lane.source == 0
    slots.pause(np.array([places[1]]))
    assert slots.decoding().slots.tolist() == sorted((places[0], places[2]))
    slots.set_ready(places[0], False)
    assert slots.decoding().slots.tolist() == [places[2]]


def test_a_batch_knows_which_of_its_rows_have_left() -> None:
    slots = Slots(4, LAYOUT)
    ones = [choice(number) for number in (1, 2, 3)]
    for one in ones:
        slots.set_ready(slots.enter(one), True)
    before = slots.decoding()
    assert slots.kept(before).tolist() == [True] * 3
    slots.pause(np.array([ones[1].slot]))
    rest = slots.decoding()
    slots.give(slots.leave(ones[1]))
    slots.enter(choice(4))  # into the same slot
    assert slots.kept(before).tolist() == [True, False, True]
    assert slots.kept(rest).tolist() == [True, True]
    assert slots.kept(joined(rest, slots.decoding())).tolist() == [True] * 4
    assert slots.decoding().departures == slots.departures == 1, "its steps need not look at each row"
    assert slots.running == 3


def test_a_lane_over_several_sources_says_so() -> None:
    slots = Slots(4, LAYOUT)
    places = [slots.enter(choice(number, source=number % 2)) for number in (1, 2, 4)]
    assert slots.batch(np.array(places)).source == -1
    even = slots.batch(np.array(places[1:]))
    assert even.source == 0
    assert joined(even, slots.batch(np.array(places[:1]))).source == -1
    assert joined(slots.batch(np.array([], np.int64)), even) is even
    both = joined(even, slots.batch(np.array(places[:1])))
    assert both.ids.tolist() == [2, 4, 1]
    assert [one.request.message.id for one in both.sequences] == [2, 4, 1]


@pytest.mark.skipif(not __debug__, reason="our own mistakes are told by assertions, which are off")
def test_clear_wants_everybody_gone() -> None:
    slots = Slots(2, LAYOUT)
    one = choice(1)
    slots.enter(one)
    with pytest.raises(AssertionError):
        slots.clear()
    slots.leave(one)
    slots.clear()
    assert slots.free == 2
