"""What a request holds on to, and what it lets go."""

from __future__ import annotations

from typing import Any

from penstock.engine_core.text.choice import Delta
from penstock.engine_core.text.outbox import merge_extras
from penstock.engine_core.text.prompts import Prepared
from penstock.engine_core.text.request import Kept, Request
from penstock.protocol.columns import pack
from penstock.protocol.images import Image
from penstock.protocol.messages import Finish, Sampling, SubmitText, SubmitTokens, Written
from penstock.protocol.outputs import PositionLogprobs, TextExtra, TokenLogprob
from tests.engine_core.tokenizer.vocabularies import vocabulary

FOUND = vocabulary("byte_level")


def position(token_id: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob("t", token_id, -1.0, b"t"), 1, (), 0)


def started(**fields: Any) -> Request:
    request = Request(3, SubmitText(id=9, sampling=fields.pop("sampling", Sampling()), **fields))
    assert request.encoding
    assert request.open()
    prepared = Prepared(SubmitTokens(id=9, token_ids=b"", sampling=Sampling()), [7, 8], "")
    request.start(FOUND, prepared)
    return request


def test_choices_are_made_with_the_prompt() -> None:
    request = started(prompt="x", n=3)
    assert not request.encoding
    assert [(seat.request, seat.choice) for seat in request.seats] == [(9, 0), (9, 1), (9, 2)]
    assert len(request.choices) == len(request.kept) == 3
    for choice in request.choices:
        assert request.open()
        choice.end(Finish.ABORT)
    assert not request.open()


def test_tokens_of_images_are_told_with_the_first_delta() -> None:
    images = tuple(
        Image(position=at, length=length, rows=4, width=1, height=1, digest=bytes(16), pixels=b"")
        for at, length in ((0, 4), (5, 6))
    )
    request = Request(3, SubmitText(id=9, sampling=Sampling(), prompt="x"))
    message = SubmitTokens(id=9, token_ids=b"", sampling=Sampling(), images=images)
    request.start(FOUND, Prepared(message, list(range(12)), ""))
    first, second = request.choices[0].advance((7,)), request.choices[0].advance((8,), Finish.LENGTH)
    assert first.extra is not None
    assert (first.extra.prompt_tokens, first.extra.image_tokens) == (12, 10)
    assert second.extra is None or second.extra.image_tokens == 0
    assert merge_extras(first.extra, TextExtra(row=0)).image_tokens == 10
    assert merge_extras(TextExtra(row=0), first.extra).image_tokens == 10


def test_the_prompt_is_kept_only_for_its_logprobs() -> None:
    assert not started(prompt="x").token_ids
    assert started(prompt="x", sampling=Sampling(prompt_logprobs=0)).token_ids == [7, 8]
    assert started(prompt="x" * 1000, stream=True)._text is None
    assert not started(prompt="x", stream=True).kept


def test_kept_deltas_become_one() -> None:
    kept = Kept()
    kept.add(Delta("a", 1, extra=TextExtra(row=0, prompt_tokens=4, cached_tokens=2, logprobs=(position(1),))), [5])
    kept.add(Delta("", 1), [6])
    kept.add(Delta("b", 1, extra=TextExtra(row=0, prompt_logprobs=(None,), logprobs=(position(2),))), [7])
    end = TextExtra(row=0, stop_reason="s", error="e", logprobs=(position(3),), drafted=(5, 2))
    last = Delta("c", 2, Finish.STOP, end)
    extra = TextExtra(
        row=0,
        prompt_tokens=4,
        cached_tokens=2,
        logprobs=(position(1), position(2), position(3)),
        prompt_logprobs=(None,),
        stop_reason="s",
        drafted=(5, 2),
        error="e",
    )
    assert kept.join(last, [8, 9]) == Delta("abc", 5, Finish.STOP, extra)
    assert kept.token_ids == [5, 6, 7, 8, 9]
    assert Kept().join(Delta("c", 2, Finish.LENGTH), [1, 2]) == Delta("c", 2, Finish.LENGTH)


def test_approximations_of_the_first_delta_stand_in_the_answer() -> None:
    kept = Kept()
    kept.add(Delta("a", 1, extra=TextExtra(row=0, prompt_tokens=2, approximations=("minimum at /a",))), [1])
    extra = kept.join(Delta("b", 1, Finish.STOP), [2]).extra
    assert extra is not None
    assert extra.approximations == ("minimum at /a",)


def test_kept_token_ids_stand_in_the_answer() -> None:
    kept = Kept()
    kept.add(Delta("a", 2, extra=TextExtra(row=0, prompt_tokens=1, prompt_token_ids=b"\1\0\0\0")), [5, 6])
    extra = kept.join(Delta("b", 1, Finish.STOP), [7]).extra
    assert extra is not None
    assert kept.token_ids == [5, 6, 7]
    assert extra.prompt_token_ids == pack("i", [1])


def test_the_prompts_ids_wait_where_they_are_asked_for() -> None:
    assert started(prompt="x").prompt_ids is None
    assert started(prompt="x", with_token_ids=True).prompt_ids == pack("i", [7, 8])


def test_a_scheduler_gets_all_that_was_written() -> None:
    request = started(prompt="x", n=2)
    assert request.handover().written == ()
    request.choices[0].advance([5, 6])
    request.choices[1].advance([7], Finish.STOP)
    assert request.handover().written == (Written(pack("i", [5, 6])), Written(pack("i", [7]), ended=True))
    assert request.confirmed == 1, "nobody will confirm the end of what has ended"


def test_what_came_with_the_first_token_is_not_told_again() -> None:
    fields = {"with_token_ids": True, "sampling": Sampling(prompt_logprobs=0), "prompt": "x"}
    fresh = started(**fields, n=2, written=(Written(), Written(pack("i", [5]))))
    assert (fresh.prompt_ids, fresh.token_ids) == (pack("i", [7, 8]), [7, 8])
    for written in (Written(pack("i", [5])), Written(ended=True)):
        request = started(**fields, n=2, written=(written, Written()))
        assert (request.prompt_ids, request.token_ids) == (None, ())
        assert request.choices[0].ended == written.ended
