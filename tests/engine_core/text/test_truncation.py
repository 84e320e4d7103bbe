"""Prompts of which the last tokens are kept (prompts.py)."""

from __future__ import annotations

import pytest

from penstock.protocol.columns import pack, unpack
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Sampling
from tests.engine_core.text.test_prompts import LENGTH, prepare

IDS = list(range(5, 45))


def kept(truncate: int, max_tokens: int | None = None, *, first: bool = False) -> list[int]:
    sampling = Sampling(max_tokens=max_tokens)
    made = prepare(prompt_ids=pack("i", IDS), truncate=truncate, sampling=sampling, keep_first=first)
    assert unpack("i", made.request.token_ids) == list(made.token_ids)
    return list(made.token_ids)


@pytest.mark.parametrize("truncate", [1, 7, 39, 40])
def test_the_last_tokens_are_kept(truncate: int) -> None:
    assert kept(truncate) == IDS[-truncate:]
    assert kept(truncate, first=True) == IDS[:truncate]


@pytest.mark.parametrize("truncate", [0, 41, LENGTH])
def test_a_prompt_that_is_short_enough_is_kept_whole(truncate: int) -> None:
    assert kept(truncate, 8) == IDS


@pytest.mark.parametrize(("max_tokens", "length"), [(None, 40), (24, 40), (25, 39), (60, 4), (LENGTH - 1, 1)])
def test_room_for_the_output(max_tokens: int | None, length: int) -> None:
    assert kept(-1, max_tokens) == IDS[-length:]
    assert kept(-1, max_tokens, first=True) == IDS[:length]


def test_more_than_the_context_holds() -> None:
    with pytest.raises(InvalidRequest, match="--max-model-len") as caught:
        kept(LENGTH + 1)
    assert caught.value.param == "truncate_prompt_tokens"


def test_texts_and_chats_are_truncated_and_echoed_as_far_as_kept() -> None:
    whole = prepare(prompt="one two three")
    short = prepare(prompt="one two three", truncate=1, echo=True)
    assert list(short.token_ids) == list(whole.token_ids)[-1:]
    assert "one two three".endswith(short.echo.strip())
    assert len(short.echo) < len("one two three")
    assert prepare(prompt="one two three", truncate=60, echo=True).echo == "one two three"
    assert len(prepare(messages=b'[{"role":"user","content":"hi"}]', truncate=2).token_ids) == 2
