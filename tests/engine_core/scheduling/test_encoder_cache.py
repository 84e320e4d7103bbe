"""Rows of the encoder cache: who gets them, who keeps them, when they are given away, and what is encoded next."""

from __future__ import annotations

import random
from array import array

import pytest

from penstock.engine_core.scheduling.encoder_cache import ENCODES, NEVER, NOWHERE, EncoderCache, first_fit
from penstock.engine_core.scheduling.request import Request, Sequence
from penstock.protocol.images import Image
from penstock.protocol.messages import Sampling, SubmitTokens
from tests.sim.executor import ints
from tests.sim.idle import rows_are_free
from tests.sim.images import picture

A, B, C, D = (picture(number, 4) for number in range(4))
LONG = picture(9, 8)


def user() -> Sequence:
    message = SubmitTokens(id=1, token_ids=b"", sampling=Sampling())
    return Sequence(Request(message, 0, 0, 0, 0, None, frozenset()), 0, (0, 0, 0), array("i"), [])


def ask(cache: EncoderCache, *images: Image, sequence: Sequence | None = None) -> Sequence | None:
    """A sequence that asks in a pass of its own, and enters if it may."""
    sequence = sequence or user()
    cache.begin_pass()
    if not cache.ask(sequence, images):
        return None
    cache.enter(sequence)
    return sequence


def encode(cache: EncoderCache) -> None:
    """Everything that was asked for."""
    while cache.messages:
        number = cache.messages.pop(0).number
        assert cache.encoded(number, "") == []


def hold(cache: EncoderCache, *images: Image) -> Sequence:
    found = ask(cache, *images)
    assert found is not None
    encode(cache)
    return found


def use(cache: EncoderCache, *images: Image) -> None:
    """Somebody has had them."""
    cache.leave(hold(cache, *images), 0, 0)


def firsts(cache: EncoderCache, *images: Image) -> list[int]:
    """First rows, NOWHERE without any."""
    return [cache._residents[image.digest].first if image.digest in cache._residents else NOWHERE for image in images]


def at(image: Image, position: int) -> Image:
    return Image(
        position=position, length=image.length, rows=image.rows, width=image.width, height=image.height,
        digest=image.digest, pixels=image.pixels,
    )  # fmt: skip


def test_an_image_gets_the_first_run_that_fits() -> None:
    cache = EncoderCache(16, 1)
    use(cache, A, B, C)
    assert firsts(cache, A, B, C) == [0, 4, 8]
    assert first_fit([(0, 2), (6, 7)], 4, 16) == 2
    assert first_fit([(0, 2), (5, 7)], 4, 16) == 7
    assert first_fit([(0, 2), (5, 14)], 4, 16) is None


def test_the_longest_unused_go_until_a_run_fits_and_no_more() -> None:
    cache = EncoderCache(16, 1)
    use(cache, A, B, C, D)
    use(cache, A)
    use(cache, LONG)
    assert firsts(cache, A, B, C, D, LONG) == [0, NOWHERE, NOWHERE, 12, 4]
    assert cache.statistics().evicted == 2


def test_what_is_held_stays() -> None:
    cache = EncoderCache(12, 1)
    use(cache, A)
    holder = hold(cache, B)
    use(cache, C)
    assert ask(cache, LONG) is None, "B stands in the middle"
    assert firsts(cache, A, B, C) == [0, 4, 8], "nobody goes for nothing"
    cache.leave(holder, 0, 0)
    assert ask(cache, LONG) is not None


def test_all_images_of_a_sequence_get_rows_or_none_does() -> None:
    cache = EncoderCache(12, 1)
    hold(cache, A)
    assert ask(cache, B, LONG) is None
    assert firsts(cache, A, B, LONG) == [0, NOWHERE, NOWHERE]
    assert not cache.messages


def test_equal_images_share_rows() -> None:
    cache = EncoderCache(4, 1)
    sequence = hold(cache, at(A, 3), at(A, 20))
    other = ask(cache, A)
    assert other is not None
    assert not cache.messages
    stand = cache.statistics()
    assert (stand.images, stand.held, stand.encoded, stand.hits) == (1, 4, 1, 2)
    cache.advance(sequence, 7, 1)
    cache.applied(1)
    cache.leave(other, 0, 0)
    assert cache.statistics().held == 4, "its second place is still to come"
    cache.leave(sequence, 0, 0)
    assert rows_are_free(cache)


def test_a_step_in_flight_keeps_the_rows_that_it_reads() -> None:
    cache = EncoderCache(4, 1)
    sequence = hold(cache, at(A, 3))
    cache.advance(sequence, 6, 1)
    cache.advance(sequence, 7, 2)
    assert ask(cache, B) is None
    cache.applied(1)
    assert ask(cache, B) is None, "step 2 reads them too"
    cache.applied(2)
    assert ask(cache, B) is not None


def test_a_sequence_that_leaves_keeps_them_until_its_last_step_is_applied() -> None:
    cache = EncoderCache(4, 1)
    cache.leave(hold(cache, A), 5, 4)
    assert ask(cache, B) is None
    assert not rows_are_free(cache)
    cache.applied(5)
    assert ask(cache, B) is not None


def test_rows_that_are_being_written_are_nobody_elses() -> None:
    cache = EncoderCache(4, 1)
    sequence = ask(cache, A)
    assert sequence is not None
    cache.leave(sequence, 0, 0)
    assert ask(cache, B) is None
    cache.encoded(cache.messages.pop().number, "")
    assert ask(cache, B) is not None


def test_each_image_is_encoded_by_the_rank_with_the_least_to_do() -> None:
    cache = EncoderCache(64, 2)
    assert ask(cache, LONG, A, B, C, D) is not None
    assert [message.rank for message in cache.messages] == [0, 1, 1, 0], "8 rows, then 4 each; two at a rank at once"
    number = next(message.number for message in cache.messages if message.rank == 1)
    cache.encoded(number, "")
    assert cache.messages[-1].rank == 1


def test_the_first_step_that_reads_an_image_has_the_other_ranks_receive_it() -> None:
    cache = EncoderCache(16, 2)
    first = hold(cache, at(A, 3), at(B, 9))
    cache.advance(first, 3, 1)
    assert cache.take_shares() == b"", "the chunk ends before it"
    cache.advance(first, 5, 2)
    assert ints(cache.take_shares(), 3) == [[0, 0, 4]], "though its last tokens come later"
    cache.advance(first, 9, 3)
    second = hold(cache, at(B, 0), at(A, 4))
    cache.advance(second, 8, 3)
    assert ints(cache.take_shares(), 3) == [[1, 4, 4]]
    cache.advance(first, 13, 4)
    assert cache.take_shares() == b"", "once is enough"
    alone = EncoderCache(16, 1)
    alone.advance(hold(alone, A), 4, 1)
    assert alone.take_shares() == b""


def test_few_are_sent_at_once_and_those_of_running_sequences_go_first() -> None:
    cache, waiting = EncoderCache(64, 1), user()
    cache.begin_pass()
    assert cache.ask(user(), (A,))
    assert cache.ask(waiting, (B, C))
    running = user()
    assert cache.ask(running, (D,))
    cache.enter(running)
    assert [message.first_row for message in cache.messages] == firsts(cache, A, B)
    assert len(cache.messages) == ENCODES
    cache.encoded(cache.messages[0].number, "")
    assert cache.messages[-1].pixels == D.pixels
    cache.encoded(cache.messages[1].number, "")
    assert cache.messages[-1].pixels == C.pixels


def test_what_nobody_needs_any_more_is_not_encoded() -> None:
    cache = EncoderCache(64, 1)
    gone = user()
    cache.begin_pass()
    assert cache.ask(gone, (A, B, C, D))
    cache.leave(gone, 0, 0)
    cache.begin_pass()
    for message in cache.messages[:ENCODES]:
        cache.encoded(message.number, "")
    assert len(cache.messages) == ENCODES
    assert rows_are_free(cache)


def test_nobody_behind_a_sequence_that_lacks_rows_gets_any_or_holds_some_longer() -> None:
    cache = EncoderCache(8, 1)
    holder = hold(cache, A)
    cache.begin_pass()
    first, second, third = user(), user(), user()
    assert not cache.ask(first, (LONG,))
    assert not cache.ask(second, (B,)), "there is room for it"
    assert not cache.ask(third, (A,)), "the first one's would be held on and on"
    assert cache.waits(first)
    assert cache.waits(third)
    cache.leave(holder, 0, 0)
    cache.begin_pass()
    assert cache.ask(first, (LONG,))
    assert cache.waits(first), "it is not encoded"
    encode(cache)
    assert not cache.waits(first)


def test_what_was_asked_for_in_this_pass_stays_for_whoever_asked() -> None:
    cache, first = EncoderCache(4, 1), user()
    for _ in range(2):
        cache.begin_pass()
        assert cache.ask(first, (A,))
        assert not cache.ask(user(), (B,))
        encode(cache)
    cache.begin_pass()
    assert cache.ask(user(), (B,)), "it is first now"


def test_a_sequence_whose_own_images_stand_in_its_way_has_them_encoded_again() -> None:
    cache = EncoderCache(12, 1)
    use(cache, A, B, C)
    sequence = user()
    assert cache.can_have((B, LONG))
    assert ask(cache, B, LONG, sequence=sequence) is not None
    assert [message.pixels for message in cache.messages] == [B.pixels, LONG.pixels]
    encode(cache)
    assert cache.awaited(sequence) == NEVER
    assert cache.statistics().held == 12


def test_what_must_be_encoded_first_is_the_first_that_is_not() -> None:
    cache, sequence = EncoderCache(16, 1), user()
    images = at(A, 3), at(B, 9)
    cache.begin_pass()
    assert cache.ask(sequence, images)
    assert cache.awaited(sequence) == 3
    cache.enter(sequence)
    assert cache.awaited(sequence) == 3
    cache.encoded(cache.messages[0].number, "")
    assert cache.awaited(sequence) == 9
    assert cache.awaited(user()) == NEVER


def test_an_image_that_cannot_be_encoded_fails_all_who_need_it() -> None:
    cache = EncoderCache(16, 1)
    running, waiting, other = ask(cache, A), user(), user()
    assert running is not None
    cache.begin_pass()
    assert cache.ask(waiting, (A, B))
    assert cache.ask(other, (B,))
    number = cache.messages[0].number
    assert cache.in_flight_sequences() == [running, waiting, other]
    assert cache.encoded(number, "no") == [running, waiting]
    assert cache.encoded(number, "no") == [], "it is of another epoch"
    cache.leave(running, 0, 0)
    cache.leave(waiting, 0, 0)
    assert firsts(cache, A) == [NOWHERE]
    assert cache.statistics().failures == 1


def test_new_executors_begin_with_empty_rows_and_new_numbers() -> None:
    cache = EncoderCache(16, 1)
    sequence = hold(cache, A)
    cache.leave(sequence, 0, 0)
    cache.begin_pass()
    assert cache.ask(sequence, (B,))
    cache.clear(8)
    assert rows_are_free(cache)
    assert (cache.rows, cache.messages) == (8, [])
    cache.encoded(2, "")
    assert hold(cache, A)
    assert cache.statistics().encoded == 2
    assert cache._number == 3


def test_accounts_are_checked() -> None:
    cache = EncoderCache(16, 1)
    held = hold(cache, A, B)
    cache.advance(held, 4, 1)
    assert cache.check() == ()
    cache._residents[A.digest].holders += 1
    cache._residents[B.digest].first = 3
    assert cache.check() == ("an image's rows are held by others than it counts", "images share rows")


@pytest.mark.parametrize("seed", range(20))
def test_rows_never_overlap_and_the_first_one_is_served_when_nothing_is_held(seed: int) -> None:
    rng = random.Random(seed)
    cache = EncoderCache(rng.randint(8, 24), 1)
    pool = [picture(number, rng.randint(1, 8)) for number in range(12)]
    for _ in range(300):
        images = rng.sample(pool, rng.randint(1, 3))
        while sum(image.rows for image in images) > cache.rows:
            images.pop()
        cache.begin_pass()
        sequence = user()
        assert cache.ask(sequence, tuple(images)), "all rows can be had"
        found = [residents.span for residents in cache._residents.values()]
        assert all(0 <= first < end <= cache.rows for first, end in found)
        assert all(a[1] <= b[0] or b[1] <= a[0] for i, a in enumerate(found) for b in found[:i])
        if rng.random() < 0.9:
            cache.enter(sequence)
        encode(cache)
        cache.leave(sequence, 0, 0)
    assert rows_are_free(cache)
