"""Log-probabilities of ids become those of tokens with their bytes and places."""

from __future__ import annotations

import math
import struct

import pytest

from penstock.engine_core.text.detokenizer import LOWEST, positions, prompt_positions
from penstock.protocol.columns import pack
from penstock.protocol.outputs import Logprobs
from tests.engine_core.tokenizer.vocabularies import vocabulary


def test_columns_become_positions() -> None:
    found = vocabulary("byte_level")
    (one,) = found.encode("a", add_special_tokens=False)
    smile = found.encode("😀", add_special_tokens=False)
    ids = [one, smile[0], one, smile[-1], one, smile[0]]
    values = [-0.5, -0.25, -1.0, -2.0, -3.0, -4.0]
    given = Logprobs(3, pack("i", ids), struct.pack("<6f", *values), pack("i", [1, 7]))
    first, second = positions(found, given, [10, 11])
    assert (first.chosen.token, first.chosen.raw, first.chosen.logprob) == ("a", b"a", -0.5)
    assert (first.rank, first.text_offset, second.rank, second.text_offset) == (1, 10, 7, 11)
    assert [token.token_id for token in first.top] == [smile[0], one]
    assert first.top[0].raw == found.raw(smile[0])
    assert "\ufffd" in first.top[0].token or len(smile) == 1


def test_what_cannot_come_is_not_among_the_best_and_minus_infinity_is_never_said() -> None:
    found = vocabulary("byte_level")
    one, two = (found.encode(text, add_special_tokens=False)[0] for text in "ab")
    given = Logprobs(
        3, pack("i", [one, one, two, two, two, 0]), struct.pack("<6f", 0.0, 0.0, *[-math.inf] * 4), pack("i", [1, 2])
    )
    alone, chosen = positions(found, given, [0, 1])
    assert [token.token_id for token in alone.top] == [one]
    assert (chosen.chosen.logprob, chosen.top) == (LOWEST, ())


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_a_prompts_first_token_has_none(kind: str) -> None:
    found = vocabulary(kind)
    ids = found.encode("one two three", add_special_tokens=True)
    given = Logprobs(1, pack("i", ids[1:]), bytes(4 * len(ids[1:])), pack("i", [1] * len(ids[1:])))
    first, *rest = prompt_positions(found, given, ids, skip_special_tokens=True)
    assert first is None
    assert [position.chosen.token_id for position in rest if position] == ids[1:]
    text = found.decode(ids, skip_special_tokens=True)
    for position, token_id in zip(rest, ids[1:], strict=True):
        assert position is not None
        token = found.raw(token_id).decode()
        start = position.text_offset
        assert text[start : start + len(token)] == token or start == 0
