"""Log-probabilities against float64, ties, and that nobody's are computed unasked."""

from __future__ import annotations

import pytest
import torch

from kernels.logprobs import MOST, logprobs, token_logprobs

VOCABULARY = 700


@pytest.mark.parametrize("width", [0, 1, 20])
def test_logprobs_are_of_the_raw_distribution(width: int) -> None:
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(4))
    chosen = torch.tensor([0, 5, 9, 63, int(logits[4].argmax())])
    expected = torch.log_softmax(logits.double(), -1)
    ids, values, ranks = logprobs(logits, chosen, width)
    assert ids.shape == values.shape == (5, 1 + width)
    assert torch.equal(ids[:, 0], chosen)
    assert torch.allclose(values.double(), expected.gather(1, ids), atol=1e-5)
    assert torch.equal(ids[:, 1:], logits.topk(width).indices)
    assert ranks.tolist() == [1 + int((row > row[at]).sum()) for row, at in zip(logits, chosen, strict=True)]
    assert ranks[4] == 1


def test_the_lower_id_comes_first_among_equals() -> None:
    logits = torch.tensor([[0.0, -0.0, -1.0, 3.0, 0.0, 3.0, -2.0]])
    ids, values, ranks = logprobs(logits, torch.tensor([4]), 7)
    assert ids.tolist() == [[4, 3, 5, 0, 1, 4, 2, 6]]
    assert ranks.tolist() == [3]
    assert values[0, 0] == values[0, 3] == values[0, 4]


def test_a_small_vocabulary_has_no_more_than_it_has() -> None:
    ids, _, _ = logprobs(torch.randn(1, 3), torch.tensor([1]), 20)
    assert ids.shape == (1, 4)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_of_slots_that_ask(kind: torch.dtype, device: str) -> None:
    logits = (torch.randn(7, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3).to(kind)
    tokens = torch.tensor([3, 699, -1, 5, -2, 12, 650], dtype=torch.int32)
    slots = torch.tensor([4, 0, 1, 2, 1, 1, 3], dtype=torch.int32)
    widths = torch.tensor([5, MOST, -1, 0, 1], dtype=torch.int32)
    found = token_logprobs(logits.to(device), tokens.to(device), slots.to(device), widths.to(device))
    assert found.ids.shape == found.values.shape == (7, 1 + MOST)
    for row, width in ((0, 1), (1, 5), (5, MOST), (6, 0)):
        ids, values, ranks = logprobs(logits[row : row + 1].double().float(), tokens[row : row + 1].long(), width)
        assert found.ids[row, : 1 + width].tolist() == ids[0].tolist()
        assert torch.allclose(found.values[row, : 1 + width].cpu(), values[0], atol=2e-5)
        assert found.ranks[row] == ranks[0]
