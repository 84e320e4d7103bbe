"""Columns of a result: their tensors in a row and back, and their messages."""

from __future__ import annotations

import numpy as np
import torch

from engine_core.execution.results import Columns, Launched, logprob_rows, row_logprobs


def columns() -> Columns:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([4, -1, 6, 7], dtype=torch.int32)
    narrow = logprob_rows((0, 3), 1, logits[[0, 3]], tokens[[0, 3]], 2)
    wide = logprob_rows((1,), 1, logits[1:2], tokens[1:2], 5)
    return Columns(tokens, (narrow, wide), (logprob_rows((9,), 2, logits[4:], torch.tensor([1, 2]), 0),))


def test_tensors_in_a_row_and_back() -> None:
    before = columns()
    tensors = before.tensors()
    assert len(tensors) == 1 + 3 * 3
    after = before.replaced([tensor.clone() for tensor in tensors])
    assert all(torch.equal(old, new) for old, new in zip(tensors, after.tensors(), strict=True))
    assert [part.rows for part in after.logprobs] == [(0, 3), (1,)]
    assert [(part.rows, part.positions) for part in after.prompt_logprobs] == [((9,), 2)]


def test_a_message_for_each_row() -> None:
    found = columns()
    messages = list(row_logprobs(found.logprobs))
    assert [message.row for message in messages] == [0, 3, 1]
    assert [message.logprobs.width for message in messages] == [3, 3, 6]
    for at, message in enumerate(messages[:2]):
        part = found.logprobs[0]
        assert np.array_equal(np.frombuffer(message.logprobs.token_ids, "<i4"), part.token_ids[at].numpy())
        assert np.array_equal(np.frombuffer(message.logprobs.values, "<f4"), part.values[at].numpy())
        assert np.frombuffer(message.logprobs.ranks, "<i4").tolist() == [int(part.ranks[at])]
    (prompt,) = row_logprobs(found.prompt_logprobs)
    assert np.frombuffer(prompt.logprobs.token_ids, "<i4").tolist() == [1, 2]
    assert len(np.frombuffer(prompt.logprobs.ranks, "<i4")) == 2


def test_a_step_without_an_event_is_finished() -> None:
    found = columns()
    assert Launched(step=1, epoch=1, fetched=found, held=found, began=None, done=None).finished
