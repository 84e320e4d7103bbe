"""What requests forbid, bias and penalise: the reference against the plain steps in float64, and its parts alone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from penstock.kernels.adjustment import adjust, completing, forbid, output_tail
from tests.kernels.sampling_scene import Row, Scene, adjusted, entry_rows, packed, random_rows, scene

VOCABULARY = 70


def adjusted_rows(logits: torch.Tensor, given: Scene) -> torch.Tensor:
    """Logits of all entries after steps 1 and 2; logits [rows, vocabulary]."""
    found = logits[given.row_of].float()
    uses = given.sampling.uses.numpy()[given.entries.slots.numpy()]
    adjust(found, uses, given.entries.masks.numpy(), given.entries, given.sampling, given.history)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_random_requests(seed: int) -> None:
    chance = np.random.default_rng(seed)
    rows = random_rows(chance, 20, VOCABULARY)
    logits = torch.from_numpy(chance.normal(size=(20, VOCABULARY)) * 3).float()
    given = scene(rows, VOCABULARY)
    found = adjusted_rows(logits, given)
    for line, row, at in zip(found, entry_rows(rows), given.row_of, strict=True):
        expected = torch.from_numpy(adjusted(logits[at].double().numpy(), row))
        assert torch.equal(line.isfinite(), expected.isfinite())
        kept = expected.isfinite()
        assert torch.allclose(line[kept].double(), expected[kept], atol=1e-5)


def test_rows_that_ask_for_nothing_are_left_alone() -> None:
    logits = torch.randn(3, VOCABULARY)
    found = adjusted_rows(logits, scene([Row(), Row(presence=1.0), Row(top_k=3)], VOCABULARY))
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert not torch.equal(found[1], logits[1])


def test_a_mask_has_a_bit_for_each_token_and_what_lies_behind_the_vocabulary_is_not_read() -> None:
    for vocabulary in (1, 31, 32, 33, 70):
        allowed = tuple(range(0, vocabulary, 3))
        logits = torch.zeros(2, vocabulary)
        bits = packed(allowed, vocabulary)[None].numpy()
        bits[0, -1] |= np.int32(-(2**31)) if vocabulary % 32 else 0
        forbid(logits, np.array([1]), bits)
        assert logits[0].tolist() == [0.0] * vocabulary
        assert logits[1].isfinite().nonzero()[:, 0].tolist() == list(allowed)


def test_a_mask_and_allowed_tokens_hold_together() -> None:
    found = adjusted_rows(torch.zeros(1, VOCABULARY), scene([Row(mask=(1, 2, 69), allowed=(2, 3, 69))], VOCABULARY))
    assert found[0].isfinite().nonzero()[:, 0].tolist() == [2, 69]


def test_the_output_before_an_entry_ends_with_its_drafts() -> None:
    given = scene([Row(tokens=(1, 2, 3, 4), prompt=2, drafts=(5, 6))], VOCABULARY)
    tails = [output_tail(at, 5, given.entries, given.sampling, given.history).tolist() for at in range(3)]
    assert tails == [[4, 3, -2, -2, -2], [5, 4, 3, -2, -2], [6, 5, 4, 3, -2]]
    assert output_tail(2, 1, given.entries, given.sampling, given.history).tolist() == [6]


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        (((9,),), [9]),
        (((4, 9), (3, 9)), [9]),
        (((3, 4, 9),), [9]),
        (((2, 3, 4, 9),), []),  # the prompt is no output
        (((5, 9), (7, 8)), []),
    ],
)
def test_words_are_completed_by_the_output_alone(words: tuple[tuple[int, ...], ...], forbidden: list[int]) -> None:
    given = scene([Row(tokens=(1, 2, 3, 4), prompt=2, bad_words=words)], VOCABULARY)
    assert completing(0, given.entries, given.sampling, given.history).tolist() == forbidden


def test_what_min_tokens_forbids_ends_at_its_position_and_the_bias_stays() -> None:
    row = Row(forbidden_until=((7, 5), (8, 6)), bias=((7, 1.5), (9, 2.0)), drafts=(1, 1, 1))
    found = adjusted_rows(torch.zeros(1, VOCABULARY), scene([row], VOCABULARY))
    assert found[:, 7].tolist() == [-math.inf, -math.inf, 1.5, 1.5]  # at positions 3 to 6
    assert found[:, 8].tolist() == [-math.inf] * 3 + [0.0]
    assert found[:, 9].tolist() == [2.0] * 4


def test_penalties_count_drafts_as_output_and_leave_the_history_alone() -> None:
    row = Row(tokens=(5, 6, 6), prompt=1, frequency=1.0, presence=10.0, repetition=2.0, drafts=(6, 7))
    given = scene([row], VOCABULARY)
    before = given.history.counts.clone()
    found = adjusted_rows(torch.full((1, VOCABULARY), 4.0), given)
    assert found[:, 5].tolist() == [2.0] * 3  # prompt: repetition alone
    assert found[:, 6].tolist() == [2.0 - 12.0, 2.0 - 13.0, 2.0 - 13.0]
    assert found[:, 7].tolist() == [4.0, 4.0, 2.0 - 11.0]
    assert torch.equal(given.history.counts, before)
    negative = adjusted_rows(torch.full((1, VOCABULARY), -4.0), given)
    assert negative[0, 5] == -8.0


def test_an_entry_is_changed_as_a_row_that_holds_its_drafts() -> None:
    row = Row(tokens=(5, 6), prompt=1, presence=1.0, bad_words=((6, 7, 8),), forbidden_until=((3, 4),), drafts=(7, 6))
    logits = torch.randn(1, VOCABULARY)
    found = adjusted_rows(logits, scene([row], VOCABULARY))
    for depth in range(3):
        plain = dataclasses.replace(row, tokens=row.tokens + row.drafts[:depth], drafts=())
        assert torch.equal(found[depth], adjusted_rows(logits, scene([plain], VOCABULARY))[0])
