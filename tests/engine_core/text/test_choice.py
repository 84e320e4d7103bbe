"""One choice: text, counts and log-probabilities are the same however its tokens arrive."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.text.choice import Choice, Delta, without_surplus
from penstock.engine_core.text.detokenizer import detokenizer
from penstock.engine_core.text.outbox import merge_extras
from penstock.engine_core.text.stops import StopScanner, compile_stops
from penstock.protocol.columns import pack
from penstock.protocol.messages import Finish
from penstock.protocol.outputs import Logprobs, TextExtra, TokenExtra
from tests.engine_core.text.test_stops import expected
from tests.engine_core.tokenizer.vocabularies import CORPUS, vocabulary

FOUND = vocabulary("byte_level")
EOS = FOUND.eos or 0


def make(
    stops: tuple[str, ...] = (), *, echo: str = "", min_tokens: int = 0, include: bool = False, alone: bool = False
) -> Choice:
    return Choice(
        FOUND,
        detokenizer(FOUND, skip_special_tokens=True),
        StopScanner(compile_stops(stops), include_stop=include) if stops else None,
        echo=echo,
        prompt_tokens=5,
        min_tokens=min_tokens,
        include_stop=include,
        echo_alone=alone,
    )


def logprobs(ids: Sequence[int], width: int = 2) -> TokenExtra:
    """Made-up numbers that tell every position apart."""
    rows = [[token_id, *range(width - 1)] for token_id in ids]
    values = [-float(token_id) - column for token_id in ids for column in range(width)]
    return TokenExtra(
        row=0,
        logprobs=Logprobs(
            width,
            pack("i", [token_id for row in rows for token_id in row]),
            struct.pack(f"<{len(values)}f", *values),
            pack("i", ids),
        ),
    )


def run(choice: Choice, parts: Sequence[Sequence[int]], finish: Finish, *, with_logprobs: bool) -> Delta:
    """All deltas as one."""
    text, tokens, extra = "", 0, TextExtra(row=0)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        delta = choice.advance(part, finish if last else Finish.NONE, logprobs(part) if with_logprobs else None)
        text, tokens = text + delta.text, tokens + delta.tokens
        extra = merge_extras(extra, delta.extra) if delta.extra is not None else extra
        if delta.finish:
            return Delta(text, tokens, delta.finish, extra)
    return Delta(text, tokens, Finish.NONE, extra)


@settings(max_examples=200, deadline=None)
@given(
    text=st.one_of(st.sampled_from(CORPUS), st.text(max_size=30)),
    stops=st.lists(st.sampled_from(["e", "the", ", ", "x j", "你好", "é", "zz"]), max_size=3).map(tuple),
    cuts=st.lists(st.integers(1, 9), min_size=1),
    min_tokens=st.integers(0, 6),
    finish=st.sampled_from([Finish.STOP, Finish.LENGTH]),
    include=st.booleans(),
)
def test_the_cut_does_not_matter(
    text: str, stops: tuple[str, ...], cuts: list[int], min_tokens: int, finish: Finish, include: bool
) -> None:
    ids = FOUND.encode(text, add_special_tokens=False)
    if finish is Finish.STOP:
        ids = [*ids, EOS]
    whole = run(make(stops, echo="!!", min_tokens=min_tokens, include=include), [ids], finish, with_logprobs=True)
    parts, start = [], 0
    while start < len(ids):
        count = cuts[len(parts) % len(cuts)]
        parts.append(ids[start : start + count])
        start += count
    parts = parts or [[]]
    pieces = run(make(stops, echo="!!", min_tokens=min_tokens, include=include), parts, finish, with_logprobs=True)
    assert pieces == whole
    floor = len(FOUND.decode(ids[:min_tokens], skip_special_tokens=True).rstrip("\ufffd"))
    match = expected(text, stops, floor) if stops else None
    if match is None:
        assert (whole.text, whole.tokens, whole.finish) == ("!!" + text, len(ids), finish)
    else:
        start, stop = match
        assert whole.text == "!!" + text[: start + len(stop) * include]
        assert whole.finish is Finish.STOP
        assert whole.extra is not None
        assert whole.extra.stop_reason == stop
        assert len(whole.extra.logprobs) == whole.tokens <= len(ids)


@pytest.mark.parametrize("cut", [1, 2, 9])
@pytest.mark.parametrize("min_tokens", range(5))
def test_a_stop_string_ends_the_first_token_past_min_tokens(min_tokens: int, cut: int) -> None:
    """As end-of-sequence does: so many tokens are there whatever they say, and the next one may end it. Whichever way
    they come, one by one or several at once."""
    (token,) = FOUND.encode("b", add_special_tokens=False)
    ids = [token] * 9
    parts = [ids[start : start + cut] for start in range(0, len(ids), cut)]
    for scored in (False, True):
        made = run(make(("b",), min_tokens=min_tokens), parts, Finish.LENGTH, with_logprobs=scored)
        assert (made.text, made.tokens, made.finish) == ("b" * min_tokens, min_tokens + 1, Finish.STOP)
        assert made.extra is not None
        assert made.extra.stop_reason == "b"


def test_positions_say_where_tokens_begin() -> None:
    text = "größe 你好 😀 one"
    ids = FOUND.encode(text, add_special_tokens=False)
    made = run(make(echo="ab"), [[token_id] for token_id in ids], Finish.LENGTH, with_logprobs=True)
    assert made.extra is not None
    found = made.extra.logprobs
    assert [position.chosen.token_id for position in found] == ids
    assert b"".join(position.chosen.raw for position in found).decode() == text
    before = ""
    for position in found:
        assert position.text_offset == 2 + len(before.encode().decode(errors="ignore"))
        before = FOUND.decode(ids[: found.index(position) + 1], skip_special_tokens=True).rstrip("\ufffd")
    assert [position.rank for position in found] == ids
    assert all(len(position.top) == 1 for position in found)


def test_the_first_delta_carries_the_echo_and_the_usage() -> None:
    choice = make(echo="prompt")
    first = choice.advance([FOUND.encode("a", add_special_tokens=False)[0]], 0, TokenExtra(row=0, cached_tokens=3))
    assert first.text == "prompta"
    assert first.extra == TextExtra(row=0, prompt_tokens=5, cached_tokens=3)
    assert choice.advance(FOUND.encode("b", add_special_tokens=False)) == Delta("b", 1)


def test_an_end_without_tokens_still_has_the_first_extra() -> None:
    delta = make(echo="prompt").advance([], Finish.ABORT)
    assert (delta.text, delta.tokens, delta.finish) == ("prompt", 0, Finish.ABORT)
    assert delta.extra == TextExtra(row=0, prompt_tokens=5)


@pytest.mark.parametrize(("finish", "told"), [
    (Finish.LENGTH, Finish.LENGTH), (Finish.STOP, Finish.LENGTH), (Finish.NONE, Finish.LENGTH),
    (Finish.ABORT, Finish.ABORT), (Finish.GRAMMAR, Finish.GRAMMAR),
])  # fmt: skip
def test_an_echo_alone_tells_nothing_of_what_was_generated(finish: Finish, told: Finish) -> None:
    ids = FOUND.encode("a", add_special_tokens=False)
    choice = make(("a",), echo="prompt", alone=True)
    extra = msgspec.structs.replace(logprobs(ids), cached_tokens=3, stop_token=ids[0])
    delta = choice.advance(ids, finish, extra)
    assert (delta.text, delta.tokens, delta.finish, delta.stop_hit) == ("prompt", 0, told, finish is Finish.NONE)
    assert delta.extra == TextExtra(row=0, prompt_tokens=5, cached_tokens=3)
    assert choice.ended
    assert choice.tokens == 0


def test_an_engines_error_is_told() -> None:
    delta = make().advance([], Finish.ERROR, TokenExtra(row=0, error="non-finite logits"))
    assert delta.finish is Finish.ERROR
    assert delta.extra is not None
    assert delta.extra.error == "non-finite logits"


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.STOP])
def test_it_knows_that_it_ended(finish: Finish) -> None:
    choice = make(("stop",))
    ids = FOUND.encode("sto", add_special_tokens=False)
    assert choice.advance(ids).text == ""
    assert not choice.ended
    delta = choice.advance([EOS], finish)
    assert choice.ended
    assert delta.text == "sto"
    assert choice.tokens == len(ids) + 1


@pytest.mark.parametrize(
    ("stops", "parts", "told", "expected"),
    [
        ((), ["one ", "two"], [None, (3, 1)], (3, 1)),
        ((), ["one ", "two"], [None, None], None),
        (("two",), ["one ", "two three"], [(2, 0), None], (2, 0)),
        (("one",), ["one two three four"], [(9, 2)], "cut"),
    ],
)
def test_drafts_are_told_with_the_end(
    stops: tuple[str, ...], parts: list[str], told: list[tuple[int, int] | None], expected: tuple[int, int] | str | None
) -> None:
    """Also where a stop string ends the choice: as last told, without what was accepted behind it."""
    choice = make(stops)
    for number, (part, drafted) in enumerate(zip(parts, told, strict=True)):
        last = number == len(parts) - 1
        ids = FOUND.encode(part, add_special_tokens=False)
        finish = Finish.LENGTH if last and not stops else Finish.NONE
        delta = choice.advance(ids, finish, None if drafted is None else TokenExtra(row=0, drafted=drafted))
        found = None if delta.extra is None else delta.extra.drafted
        if not last:
            assert found is None
    if expected == "cut":
        lost = len(ids) - delta.tokens - 1
        assert lost > 0
        expected = (9 - lost, 2 + lost)
    assert choice.ended
    assert found == expected


def test_a_stop_string_in_the_steady_step_tells_drafts_too() -> None:
    choice = make(("c",))
    first, *rest = FOUND.encode("a b c", add_special_tokens=False)
    choice.advance([first], Finish.NONE, TokenExtra(row=0, drafted=(5, 1)))
    deltas = [choice.advance([token_id]) for token_id in rest]
    assert deltas[-1].finish == Finish.STOP
    assert deltas[-1].extra is not None
    assert deltas[-1].extra.drafted == (5, 1)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_what_stands_behind_a_stop_string_is_not_accepted(accepted: int, rejected: int, surplus: int) -> None:
    taken, others = without_surplus((accepted, rejected), surplus)
    assert taken + others == accepted + rejected
    assert 0 <= taken <= accepted
    assert accepted - taken == min(accepted, max(0, surplus - 1))
