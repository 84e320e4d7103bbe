"""Log-probabilities in each of their three shapes."""

from __future__ import annotations

import msgspec

from penstock.protocol.outputs import PositionLogprobs, TokenLogprob
from penstock.services.openai.answers import (
    LEAST,
    CompletionLogprobs,
    chat_logprobs,
    completion_logprobs,
    prompt_positions,
    with_prompt,
)
from tests.services.client.fake_engine import position


def test_the_chosen_token_stands_among_the_top_ones_of_a_completion() -> None:
    best = TokenLogprob("best", 1, -0.1, b"best")
    unlikely = TokenLogprob("odd", 9, -7.0, b"odd")
    found = completion_logprobs([PositionLogprobs(unlikely, 40, (best,), 3)])
    assert found.top_logprobs == [{"best": -0.1, "odd": -7.0}]
    assert (found.tokens, found.token_logprobs, found.text_offset) == (["odd"], [-7.0], [3])


def test_tokens_that_read_the_same_keep_the_likelier_value() -> None:
    first, second = (TokenLogprob("\ufffd", k, -float(k), bytes([200 + k])) for k in (1, 2))
    found = completion_logprobs([PositionLogprobs(second, 2, (first, second), 0)])
    assert found.top_logprobs == [{"\ufffd": -1.0}]


def test_a_piece_of_a_character_keeps_its_bytes() -> None:
    half = TokenLogprob("\ufffd", 1, -1.0, b"\xf0\x9f")
    (entry,) = chat_logprobs([PositionLogprobs(half, 1, (half,), 0)]).content
    assert (entry.bytes, entry.top_logprobs[0].bytes) == ((0xF0, 0x9F), (0xF0, 0x9F))
    assert msgspec.json.decode(msgspec.json.encode(entry))["bytes"] == [0xF0, 0x9F]


def test_minus_infinity_is_a_number() -> None:
    at = position("a", 1, 0, 1, float("-inf"))
    assert completion_logprobs([at]).token_logprobs == [LEAST]
    assert chat_logprobs([at]).content[0].logprob == LEAST


def test_the_rank_of_a_prompt_token_is_its_own() -> None:
    best = TokenLogprob("best", 1, -0.1, b"best")
    there = TokenLogprob("there", 9, -7.0, b"there")
    assert prompt_positions((None, PositionLogprobs(there, 40, (best,), 3))) == [
        None,
        prompt_positions((PositionLogprobs(there, 40, (best,), 3),))[0],
    ]
    (entries,) = prompt_positions((PositionLogprobs(there, 40, (best,), 3),))
    assert entries is not None
    assert [(key, entry.rank, entry.decoded_token) for key, entry in entries.items()] == [
        ("9", 40, "there"), ("1", 1, "best")
    ]  # fmt: skip


def test_the_first_token_of_an_echo_is_the_text_before_the_second() -> None:
    nothing = CompletionLogprobs([], [], [], [])
    found = with_prompt("Hello world", (None, position(" world", 2, 5)), nothing)
    assert found.tokens == ["Hello", " world"]
    assert with_prompt("Hello", (None,), nothing).tokens == ["Hello"]
