"""From requests' parameters to a step's sampling batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_core.execution.parameters import SlotParameters, read_lists
from engine_core.execution.transfer import Upload
from kernels.sampling import SamplingBatch
from protocol.messages import Sampling
from protocol.steps import SlotStart

VOCABULARY = 50


def batch(samplings: list[Sampling], seeds: list[int] | None = None, order: list[int] | None = None) -> SamplingBatch:
    """Sampling batch of slots 1.. holding these requests, rows in `order`."""
    parameters = SlotParameters(len(samplings) + 2, VOCABULARY, Upload(torch.device("cpu")))
    parameters.start([
        SlotStart(
            slot=at + 1, token_ids=b"", prompt_tokens=10 + at, computed=0, blocks=b"", sampling=sampling,
            seed=seeds[at] if seeds else at,
        )
        for at, sampling in enumerate(samplings)
    ])  # fmt: skip
    return parameters.batch(np.array(order or range(1, len(samplings) + 1), np.int64))


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_rows_need_nothing(temperature: float) -> None:
    greedy = Sampling(temperature=temperature, top_k=5, top_p=0.5, min_p=0.5, seed=9)
    assert batch([greedy, greedy]) == SamplingBatch(greedy=None)


def test_draws_of_mixed_rows() -> None:
    hot = Sampling(temperature=2.0, top_p=0.9, min_p=0.1)
    found = batch(
        [Sampling(temperature=0.5, top_k=7), Sampling(temperature=0.0), hot],
        seeds=[2**64 - 1, 5, 2**63 + 1],
        order=[3, 2, 1],
    )
    assert found.draws is not None
    assert found.greedy is not None
    assert found.greedy.tolist() == [1]
    assert found.draws.rows.tolist() == [0, 2]
    assert found.draws.seeds.tolist() == [-(2**63) + 1, -1]
    assert found.draws.temperature.tolist() == [2.0, 0.5]
    assert found.draws.top_k.tolist() == [0, 7]
    assert found.draws.largest_top_k == 7
    assert found.draws.nucleus
    assert found.draws.top_p.tolist() == [pytest.approx(0.9), 1.0]
    assert found.edits is found.words is None
    assert found.allowed is None
    assert found.penalties is None


def test_penalties_of_the_rows_that_have_them() -> None:
    found = batch([
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, repetition_penalty=1.5),
        Sampling(temperature=0.0, presence_penalty=-1.0, frequency_penalty=0.5),
    ]).penalties
    assert found is not None
    assert found.rows.tolist() == [1, 2]
    assert found.slots.tolist() == [2, 3]
    assert found.repetition.tolist() == [1.5, 1.0]
    assert found.presence.tolist() == [0.0, -1.0]
    assert found.frequency.tolist() == [0.0, 0.5]


def test_edits_are_biases_and_the_stops_that_min_tokens_forbids() -> None:
    lists = read_lists(
        Sampling(
            logit_bias=((3, 1.5), (VOCABULARY, 9.0), (-1, 9.0)), min_tokens=4, stop_token_ids=(8, 7, VOCABULARY),
            eos_token_ids=(2, 7), ignore_eos=True,
        ),
        prompt_tokens=10,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    assert lists.edit_tokens.tolist() == [3, 2, 7, 8]
    assert lists.edit_values.tolist() == [1.5] + 3 * [-np.inf]
    assert lists.edit_until.tolist()[1:] == [14, 14, 14]
    assert lists.edit_until[0] > 2**60
    assert len(read_lists(Sampling(stop_token_ids=(1,), eos_token_ids=(2,)), 10, VOCABULARY).edit_tokens) == 0


def test_edits_name_their_rows() -> None:
    found = batch([Sampling(logit_bias=((1, 1.0), (2, 2.0))), Sampling(), Sampling(logit_bias=((5, -3.0),))]).edits
    assert found is not None
    assert found.rows.tolist() == [0, 0, 2]
    assert found.tokens.tolist() == [1, 2, 5]
    assert found.values.tolist() == [1.0, 2.0, -3.0]


def test_bad_words_backwards_and_padded() -> None:
    words = ((4,), (1, 2, 3), (9, VOCABULARY), (-7, 6), ())
    found = batch([Sampling(), Sampling(bad_words=words), Sampling(bad_words=((5, 6),))]).words
    assert found is not None
    assert found.rows.tolist() == [1, 1, 1, 2]
    assert found.slots.tolist() == [2, 2, 2, 3]
    assert found.tokens.tolist() == [4, 3, 6, 6]
    prefixes = found.prefixes.tolist()
    assert prefixes[0] == [-1, -1]
    assert prefixes[1] == [2, 1]
    assert prefixes[2][0] > VOCABULARY  # matches nothing
    assert prefixes[3] == [5, -1]


def test_single_bad_words_have_no_prefixes() -> None:
    found = batch([Sampling(bad_words=((4,), (5,)))]).words
    assert found is not None
    assert found.prefixes.shape == (2, 0)


def test_allowed_tokens_once_each_and_none_left_is_still_a_constraint() -> None:
    some, none = (9, 3, 9, VOCABULARY), (VOCABULARY,)
    found = batch([Sampling(allowed_token_ids=some), Sampling(allowed_token_ids=none)]).allowed
    assert found is not None
    assert found.rows.tolist() == [0, 1]
    assert found.entry_rows.tolist() == [0, 0]
    assert found.entry_tokens.tolist() == [3, 9]
