"""What waits for an api process stays in order, is merged, and is never lost."""

from __future__ import annotations

from penstock.engine_core.text.choice import Delta
from penstock.engine_core.text.outbox import VECTOR_BYTES, Outbox, Seat, merge_extras
from penstock.protocol.columns import unpack
from penstock.protocol.messages import Finish, Rejected
from penstock.protocol.outputs import PositionLogprobs, TextBatch, TextExtra, TokenLogprob
from tests.engine_core.text.streams import STATUS

REJECTED = Rejected(id=9, status=400, message="no")


def position(token_id: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob("t", token_id, -1.0, b"t"), 1, (), 0)


def taken(outbox: Outbox) -> TextBatch:
    message = outbox.next()
    assert isinstance(message, TextBatch)
    outbox.sent()
    return message


def test_deltas_of_a_choice_share_a_row_until_it_leaves() -> None:
    outbox, one, two = Outbox(), Seat(1, 0), Seat(1, 1)
    outbox.add(one, Delta("a", 1, extra=TextExtra(row=0, prompt_tokens=4, logprobs=(position(1),))))
    outbox.add(two, Delta("x", 1))
    outbox.add(one, Delta("b", 2, Finish.STOP, TextExtra(row=0, stop_reason="s", logprobs=(position(2),))))
    assert outbox.waiting() == 2
    batch = taken(outbox)
    assert (unpack("q", batch.ids), unpack("H", batch.choices)) == ([1, 1], [0, 1])
    assert batch.text == ("ab", "x")
    assert (unpack("i", batch.tokens), batch.finish) == ([3, 1], bytes([Finish.STOP, Finish.NONE]))
    extra = TextExtra(row=0, prompt_tokens=4, stop_reason="s", logprobs=(position(1), position(2)))
    assert batch.extras == (extra,)
    outbox.add(two, Delta("y", 1, extra=TextExtra(row=0, error="e")))
    batch = taken(outbox)
    assert batch.text == ("y",)
    assert batch.extras == (TextExtra(row=0, error="e"),)
    assert outbox.next() is None


def test_a_message_comes_after_the_rows_before_it() -> None:
    outbox, seat = Outbox(), Seat(1, 0)
    outbox.add(seat, Delta("a", 1))
    outbox.post(REJECTED)
    outbox.add(seat, Delta("b", 1))
    assert taken(outbox).text == ("a",)
    assert outbox.next() is REJECTED
    assert outbox.next() is REJECTED
    outbox.sent()
    assert taken(outbox).text == ("b",)
    assert outbox.waiting() == 0


def test_what_was_offered_stays_as_it_was() -> None:
    outbox, seat = Outbox(), Seat(1, 0)
    outbox.add(seat, Delta("a", 1))
    offered = outbox.next()
    outbox.add(seat, Delta("b", 1))
    assert outbox.next() is offered
    outbox.sent()
    assert taken(outbox).text == ("b",)


def test_only_the_newest_status_waits() -> None:
    outbox = Outbox()
    outbox.report(STATUS)
    outbox.report(STATUS)
    assert outbox.next() is STATUS
    outbox.sent()
    assert outbox.next() is None


def test_rows_of_extras_are_those_of_the_batch() -> None:
    outbox = Outbox()
    for choice in range(4):
        outbox.add(Seat(1, choice), Delta("a", 1, extra=TextExtra(row=0, cached_tokens=choice) if choice > 1 else None))
    assert [(extra.row, extra.cached_tokens) for extra in taken(outbox).extras] == [(2, 2), (3, 3)]


def test_merging_keeps_what_was_first_and_what_is_last() -> None:
    first = TextExtra(row=3, prompt_tokens=1, prompt_logprobs=(None,), weights=((0, "0"),))
    second = TextExtra(row=0, cached_tokens=2, stop_reason=7, error="e", drafted=(4, 1), weights=((1, "1"),))
    merged = TextExtra(
        row=0, prompt_tokens=1, cached_tokens=2, prompt_logprobs=(None,), stop_reason=7, error="e", drafted=(4, 1),
        weights=((0, "0"), (1, "1")),
    )  # fmt: skip
    assert merge_extras(first, second) == merged


def test_approximations_survive_a_merge() -> None:
    first, second = TextExtra(row=0, approximations=("a",)), TextExtra(row=0, stop_reason="x")
    assert merge_extras(first, second).approximations == ("a",)
    assert merge_extras(second, first).approximations == ("a",)


def test_the_prompts_ids_survive_a_merge() -> None:
    first, second = TextExtra(row=0, prompt_token_ids=b"5678"), TextExtra(row=0, cached_tokens=1)
    assert merge_extras(first, second).prompt_token_ids == b"5678"
    assert merge_extras(second, first).prompt_token_ids == b"5678"


def test_token_ids_are_merged_row_by_row() -> None:
    outbox, seats = Outbox(), (Seat(1, 0), Seat(1, 1))
    given = [1]
    outbox.add(seats[0], Delta("a", 1), given)
    outbox.add(seats[1], Delta("b", 2), [2, 3])
    outbox.add(seats[0], Delta("c", 1), [4])
    outbox.add(seats[1], Delta("", 0, Finish.STOP))
    batch = outbox.next()
    assert isinstance(batch, TextBatch)
    assert (unpack("i", batch.tokens), unpack("i", batch.token_ids)) == ([2, 2], [1, 4, 2, 3])
    assert given == [1], "a row is never written into what it was given"


def test_vectors_go_in_messages_of_bounded_size() -> None:
    outbox, vector = Outbox(), bytes(VECTOR_BYTES // 4)
    for number in range(10):
        outbox.add(Seat(number, 0), Delta("", 0, Finish.STOP, TextExtra(row=0, vector=vector)))
    sizes = []
    while (message := outbox.next()) is not None:
        assert isinstance(message, TextBatch)
        assert all(extra.vector == vector for extra in message.extras)
        sizes.append(len(message.extras))
        outbox.sent()
    assert sizes == [4, 4, 2]
