"""Outputs of a step: their tensors in a row and back, and their messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from penstock.engine_core.execution.step_output import (
    Launched,
    Output,
    PromptScores,
    entry_logprobs,
    prompt_logprobs,
    step_times,
)
from penstock.kernels.logprobs import token_logprobs
from penstock.kernels.records import TokenLogprobs
from penstock.protocol.steps import REJECTED

WIDTHS = (2, -1, 5, 0, 2)  # of slots 0 to 4
TOKENS = (4, 9, 6, -1, REJECTED)


def scores() -> TokenLogprobs:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    tokens, slots = torch.tensor(TOKENS, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    return token_logprobs(logits, tokens, slots, torch.tensor(WIDTHS, dtype=torch.int32))


def output() -> Output:
    found = scores()
    return Output(torch.tensor(TOKENS, dtype=torch.int32), found, (PromptScores(9, scores(), 3),))


def launched(found: Output, widths: tuple[int, ...] | None) -> Launched:
    wanted = None if widths is None else np.array(widths)
    return Launched(step=1, epoch=1, widths=wanted, fetched=found, held=found, began=None, done=None)


def test_tensors_in_a_row_and_back() -> None:
    before = output()
    tensors = before.tensors()
    assert len(tensors) == 1 + 3 * 2
    after = before.replaced([tensor.clone() for tensor in tensors])
    assert all(torch.equal(old, new) for old, new in zip(tensors, after.tensors(), strict=True))
    assert [(prompt.chunk, prompt.width) for prompt in after.prompts] == [(9, 3)]


def test_a_step_that_samples_nothing_fetches_nothing() -> None:
    nothing = Output(None, None, ())
    assert nothing.tensors() == []
    assert nothing.replaced([]) == nothing


def test_a_message_for_each_entry_that_asks_and_has_a_token() -> None:
    found = output()
    tokens = np.array(TOKENS, np.int32)
    messages = list(entry_logprobs(launched(found, WIDTHS), tokens))
    assert [(message.row, message.logprobs.width) for message in messages] == [(0, 3), (2, 6)]
    assert found.scores is not None
    for message in messages:
        ids = np.frombuffer(message.logprobs.token_ids, "<i4")
        assert np.array_equal(ids, found.scores.ids[message.row, : message.logprobs.width].numpy())
        assert ids[0] == tokens[message.row]
        assert np.frombuffer(message.logprobs.ranks, "<i4").tolist() == [int(found.scores.ranks[message.row])]
    assert list(entry_logprobs(launched(found, None), tokens)) == []


def test_prompt_positions_of_a_chunk_are_one_message() -> None:
    (message,) = prompt_logprobs(output().prompts)
    assert (message.row, message.logprobs.width) == (9, 4)
    assert len(np.frombuffer(message.logprobs.token_ids, "<i4")) == 5 * 4
    assert len(np.frombuffer(message.logprobs.ranks, "<i4")) == 5


def test_a_step_without_an_event_is_finished() -> None:
    assert launched(output(), None).finished


class Moment:
    """Stands in for an event of a device, at so many milliseconds."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, later: Moment) -> float:
        return later.at - self.at


def test_a_step_that_waits_for_its_masks_is_idle_meanwhile() -> None:
    def step(began: float, ended: float, halves: tuple[float, float] | None = None) -> Launched:
        between = None if halves is None else (Moment(halves[0]), Moment(halves[1]))
        return replace(launched(output(), None), began=Moment(began), ended=Moment(ended), halves=between)

    before = step(0.0, 5.0)
    assert step_times(before, None).busy == 0.005
    assert step_times(step(5.0, 10.0, (9.0, 9.0)), before).waited == 0.0
    found = step_times(step(6.0, 14.0, (9.0, 12.0)), before)
    assert (round(found.busy, 6), round(found.waited, 6)) == (0.005, 0.004)
