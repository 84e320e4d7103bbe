"""From requests' parameters to a step's sampling batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engine_core.execution.sampling_parameters import SlotParameters, read_lists
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.changes import change_slots
from penstock.kernels.records import (
    ALLOWED,
    COUNTS,
    DRAWS,
    EDITS,
    HEAD,
    PENALTIES,
    PROCESSED,
    TOP_K,
    TOP_P,
    WORDS,
    SlotMemory,
    SlotSampling,
)
from penstock.protocol import limits
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import SlotStart

VOCABULARY = 50


def enter(parameters: SlotParameters, starts: list[SlotStart]) -> None:
    """Slots without tokens or blocks."""
    slots = len(parameters.uses)
    heads = [HEAD.pack(at.slot, 0, 0, 0, 0, *own) for at, own in zip(starts, parameters.start(starts), strict=True)]
    packed = torch.from_numpy(np.frombuffer(bytearray().join((COUNTS.pack(len(starts), 0, 0, 0), *heads)), np.int32))
    nothing = torch.zeros(slots, 1, dtype=torch.int32)
    change_slots(packed, SlotMemory(nothing, nothing, parameters.numbers))


def tables(samplings: list[Sampling], places: int = 0) -> SlotSampling:
    """The sampler's tables with these requests in slots 1.., of which each has a prompt of 10 tokens."""
    parameters = SlotParameters(len(samplings) + 2, VOCABULARY, Upload(torch.device("cpu")), places)
    enter(parameters, [
        SlotStart(
            slot=at + 1, token_ids=b"", prompt_tokens=10, computed=0, blocks=b"", sampling=sampling, seed=2**64 - 1 - at
        )
        for at, sampling in enumerate(samplings)
    ])  # fmt: skip
    return parameters.sampling


def allowed_by(table: SlotSampling, line: int) -> list[int]:
    bits = np.unpackbits(table.masks[line].numpy().view(np.uint8), bitorder="little")
    assert not bits[VOCABULARY:].any()
    return [int(token) for token in bits.nonzero()[0]]


def test_slots_of_nobody_use_nothing() -> None:
    table = tables([Sampling(temperature=2.0, logprobs=3)])
    assert table.uses.tolist() == [0, DRAWS, 0]
    assert table.logprobs.tolist() == [-1, 3, -1]
    assert table.top_p.tolist() == table.repetition.tolist() == [1.0] * 3


def test_columns_hold_what_requests_say() -> None:
    table = tables(
        [
            Sampling(temperature=0.5, min_p=0.25, top_p=0.75, top_k=7),
            Sampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5),
        ]
    )
    assert table.temperature.tolist() == [1.0, 0.5, 0.0, 1.0]
    assert table.min_p.tolist() == [0.0, 0.25, 0.0, 0.0]
    assert table.top_p.tolist() == [1.0, 0.75, 1.0, 1.0]
    assert table.top_k.tolist() == [0, 7, 0, 0]
    assert table.repetition.tolist() == [1.0, 1.0, 1.5, 1.0]
    assert table.presence.tolist() == [0.0, 0.0, -1.0, 0.0]
    assert table.frequency.tolist() == [0.0, 0.0, 0.5, 0.0]
    assert table.seed.tolist() == [0, -1, -2, 0]
    assert table.prompt_tokens.tolist() == [0, 10, 10, 0]


@pytest.mark.parametrize(
    ("sampling", "used"),
    [
        (Sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5), 0),
        (Sampling(temperature=1e-6), 0),
        (Sampling(min_p=0.5), DRAWS),
        (Sampling(top_k=5), DRAWS | TOP_K),
        (Sampling(top_k=VOCABULARY), DRAWS),
        (Sampling(top_p=0.9), DRAWS | TOP_P),
        (Sampling(temperature=0.0, presence_penalty=0.1), PENALTIES),
        (Sampling(temperature=0.0, logit_bias=((1, 1.0),)), EDITS),
        (Sampling(temperature=0.0, min_tokens=1, eos_token_ids=(3,)), EDITS),
        (Sampling(temperature=0.0, min_tokens=1), 0),
        (Sampling(temperature=0.0, bad_words=((1,),)), WORDS),
        (Sampling(temperature=0.0, bad_words=((1, VOCABULARY),)), 0),
        (Sampling(temperature=0.0, allowed_token_ids=(VOCABULARY,)), ALLOWED),
        (Sampling(temperature=0.0, logprobs=2, processed_logprobs=True), PROCESSED),
    ],
)
def test_what_a_request_uses(sampling: Sampling, used: int) -> None:
    assert tables([sampling]).uses[1] == used


def test_a_seed_and_top_k_of_any_size_fit() -> None:
    table = tables([Sampling(top_k=2**31 - 1, min_tokens=2**31 - 1, stop_token_ids=(3,))])
    assert table.top_k[1] == 0
    assert table.edit_until[1, 0] == 2**31 - 1


def test_edits_are_biases_and_the_stops_that_min_tokens_forbids() -> None:
    found = read_lists(
        Sampling(
            logit_bias=((3, 1.5), (VOCABULARY, 9.0), (-1, 9.0), (7, 2.0), (3, 0.25)), min_tokens=4,
            stop_token_ids=(8, 7, VOCABULARY), eos_token_ids=(2, 7), ignore_eos=True,
        ),
        prompt_tokens=10,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    forbidden = -np.inf
    assert found.edits == (
        (2, 14, forbidden, 0.0),
        (3, 14, 1.75, 1.75),
        (7, 14, forbidden, 2.0),
        (8, 14, forbidden, 0.0),
    )
    assert read_lists(Sampling(stop_token_ids=(1,), eos_token_ids=(2,)), 10, VOCABULARY).edits == ()


def test_edits_stand_in_their_slots_lines() -> None:
    table = tables([Sampling(logit_bias=((1, 1.0), (2, 2.0))), Sampling(), Sampling(logit_bias=((5, -3.0),))])
    assert table.edit_counts.tolist() == [0, 2, 0, 1, 0]
    assert table.edit_tokens[1, :2].tolist() == [1, 2]
    assert table.edit_early[1, :2].tolist() == table.edit_late[1, :2].tolist() == [1.0, 2.0]
    assert table.edit_tokens[3, 0] == 5
    assert table.edit_late[3, 0] == -3.0


def test_bad_words_stand_backwards_and_end() -> None:
    table = tables([Sampling(), Sampling(bad_words=((4,), (1, 2, 3), (9, VOCABULARY), (-7, 6), ()))])
    assert table.word_counts.tolist() == [0, 0, 3, 0]
    assert table.words[2, 0, :3].tolist() == [4, -1, -1]
    assert table.words[2, 1, :4].tolist() == [3, 2, 1, -1]
    assert table.words[2, 2, 0] == 6
    assert table.words[2, 2, 1] > VOCABULARY  # matches nothing
    assert table.words[2, 2, 2] == -1


def test_allowed_tokens_are_masks_behind_those_of_grammars() -> None:
    some, none = (9, 3, 9, VOCABULARY, 49), (VOCABULARY,)
    table = tables([Sampling(allowed_token_ids=some), Sampling(), Sampling(allowed_token_ids=none)], places=4)
    assert table.masks.shape == (4 + 5, 2)
    assert table.own_masks == 4
    assert allowed_by(table, 4 + 1) == [3, 9, 49]
    assert allowed_by(table, 4 + 3) == []


def test_the_longest_lists_that_limits_allow_fit() -> None:
    parameters = SlotParameters(2, 4096, Upload(torch.device("cpu")))
    sampling = Sampling(
        logit_bias=tuple((token, 1.0) for token in range(limits.MAX_LOGIT_BIAS)),
        min_tokens=1,
        stop_token_ids=tuple(range(2000, 2000 + limits.MAX_STOP_TOKEN_IDS)),
        eos_token_ids=tuple(range(3000, 3064)),
        bad_words=tuple((at,) * limits.MAX_BAD_WORD_TOKENS for at in range(2 * limits.MAX_BAD_WORDS)),
    )
    start = SlotStart(slot=0, token_ids=b"", prompt_tokens=1, computed=0, blocks=b"", sampling=sampling, seed=1)
    enter(parameters, [start])
    assert parameters.sampling.edit_counts[0] == parameters.sampling.edit_tokens.shape[1]
    assert parameters.sampling.word_counts[0] == parameters.sampling.words.shape[1]
    assert parameters.sampling.words[0, -1].tolist() == [2 * limits.MAX_BAD_WORDS - 1] * limits.MAX_BAD_WORD_TOKENS


def test_a_new_request_takes_over_the_whole_slot() -> None:
    parameters = SlotParameters(2, VOCABULARY, Upload(torch.device("cpu")))
    for sampling in (
        Sampling(logit_bias=((1, 1.0), (2, 1.0)), bad_words=((1,), (2, 3)), allowed_token_ids=(1, 2), top_k=3),
        Sampling(logit_bias=((4, 1.0),), allowed_token_ids=(5,)),
    ):
        start = SlotStart(slot=0, token_ids=b"", prompt_tokens=1, computed=0, blocks=b"", sampling=sampling, seed=1)
        enter(parameters, [start])
    table = parameters.sampling
    assert table.uses[0] == DRAWS | EDITS | ALLOWED
    assert table.edit_counts[0] == 1
    assert table.edit_tokens[0, 0] == 4
    assert table.word_counts[0] == table.top_k[0] == 0
    assert allowed_by(table, 0) == [5]
