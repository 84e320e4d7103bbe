"""Scores of formats, from what two models said."""

from __future__ import annotations

from math import exp, log

import msgspec
import pytest

from benchmarks.demo_model.conversation import Conversation, exchange
from benchmarks.demo_model.suites import SUITES
from benchmarks.format_scores import Said, held_out, score

ASKED = [("addition", Conversation((exchange("addition", "", f"{one} + 1?", str(one + 1)),))) for one in range(3)]
ORIGINAL = Said(
    answers=["1", "2", "4"], tokens=[[11, 9], [12, 9], [14, 9]], chosen=[[11, 9], [12, 9], [14, 9]],
    logprobs=[[0.0, 0.0], [0.0, 0.0], [log(0.5), 0.0]],
)  # fmt: skip


def test_what_is_counted() -> None:
    itself = score("bf16", 10, ASKED, ORIGINAL, ORIGINAL)
    assert (itself.right, itself.same_tokens, itself.same_answers) == (2, 1.0, 1.0)
    other = msgspec.structs.replace(
        ORIGINAL, answers=["1", "3", "3"], tokens=[[11, 9], [13, 9], [13, 9]], chosen=[[11, 9], [13, 9], [13, 8]],
        logprobs=[[0.0, 0.0], [log(0.25), 0.0], [0.0, log(0.5)]],
    )  # fmt: skip
    found = score("int4", 4, ASKED, other, ORIGINAL)
    assert (found.format, found.bytes, found.right) == ("int4", 4, 2)
    assert found.loss == pytest.approx(-log(0.25 * 0.5) / 6)
    assert found.perplexity == pytest.approx(exp(found.loss))
    assert found.same_tokens == pytest.approx(3 / 6)
    assert found.same_answers == pytest.approx(1 / 3)


def test_every_format_is_asked_the_same() -> None:
    asked = held_out(1)
    assert [suite for suite, _ in asked] == list(SUITES)
    assert asked == held_out(1)
